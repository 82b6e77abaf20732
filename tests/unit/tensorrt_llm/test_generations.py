"""flexkv finds the package of each generation of the connector's interface, derives from its classes, and accepts its
calls.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flexkv.adapters.tensorrt_llm import api
from tests.unit.tensorrt_llm.generations import GENERATIONS, write_package
from tests.unit.tensorrt_llm.world import WHOLE, settings

ROOT = Path(__file__).resolve().parents[3]
DEADLINE_S = 240.0
MODULES = {
    "g1": "tensorrt_llm._torch.pyexecutor.kv_cache_connector",
    "g2": "tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector",
    "g3": "tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector",
}


def run(generation: str, folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.unit.tensorrt_llm.generation_child", generation, str(folder)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **settings()},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("generation", GENERATIONS)
def test_the_connector_runs_in_each_generation(tmp_path: Path, generation: str) -> None:
    write_package(tmp_path, generation, rank=0)
    found = run(generation, tmp_path)
    assert found["module"] == MODULES[generation]
    assert found["bases"] == [True, True]
    assert found["other signatures"] == []
    # Each tenant's prompt is first computed, then served from the cache. In G3, the engine also hands half of a promise
    # back.
    half = [WHOLE // 2] if generation == "g3" else []
    assert found["hits"] == [0, WHOLE] * 3 + half


@pytest.fixture
def found_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Makes a folder in which this process can find a package. After the test, the process forgets the package."""
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "tensorrt_llm"]:
        del sys.modules[name]


def test_the_packages_own_rank_is_taken(found_here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_package(found_here, "g2", rank=3)
    package = api.find_api()
    assert package is not None
    monkeypatch.setattr(api, "_api", package)
    assert api.mpi_rank() == 3


def test_without_the_package_launchers_say_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "_api", None)
    for name in api.RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert api.mpi_rank() == 0
    monkeypatch.setenv("SLURM_PROCID", "2")
    assert api.mpi_rank() == 2
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    assert api.mpi_rank() == 1


def test_a_broken_installation_is_said(found_here: Path) -> None:
    """If a module that the package imports is missing, the import fails. Without an error, the connector's classes
    would get wrong base classes.
    """
    write_package(found_here, "g1")
    [module] = found_here.rglob("kv_cache_connector.py")
    module.write_text("import a_module_that_nobody_has\n")
    with pytest.raises(ModuleNotFoundError, match="a_module_that_nobody_has"):
        api.find_api()
