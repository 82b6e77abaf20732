"""Tests NVTX ranges for a profiler. If the ranges are off, no NVTX library is loaded or called. If they are on, each
thread pops as many ranges as it pushes. The tests use a fake NVTX library.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flexkv import c_ext
from flexkv.config import load_config
from flexkv.errors import ConfigError
from flexkv.transfer import nvtx
from tests.own_tree import OWN_TREE
from tests.unit.transfer.fake_nvtx import build_fake_nvtx

RUN_S = 180


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The path of the compiled fake NVTX library."""
    return build_fake_nvtx(tmp_path_factory.mktemp("nvtx"))


def run_child(fake: Path, folder: Path, check: bool = True, **environment: str) -> Any:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("FLEXKV_OBSERVE")}
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.transfer.nvtx_child", str(fake), str(folder)],
        cwd=OWN_TREE,
        env={**clean, **environment},
        capture_output=True,
        text=True,
        timeout=RUN_S,
    )
    if not check:
        return done
    assert done.returncode == 0, f"{done.stderr[:4000]}\n...\n{done.stderr[-1000:]}"
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("variant") == c_ext.__variant__
    return found


def test_every_lane_and_stage_names_its_work_and_ends_it(fake: Path, tmp_path: Path) -> None:
    found = run_child(fake, tmp_path, FLEXKV_OBSERVE_NVTX=str(fake))
    assert found["mapped"]
    assert {
        "flexkv copy",
        "flexkv disk submit",
        "flexkv disk verify",
        "flexkv disk to pool",
        "flexkv pool to disk",
        "flexkv transform",
        "flexkv scatter",
        "flexkv outer",
        "flexkv inner",
    } == set(found["names"])
    assert len(found["threads"]) >= 4
    for pushes, pops, depth, lowest in found["threads"]:
        assert (pushes, depth, lowest) == (pops, 0, 0)
        assert pushes > 0


def test_off_is_the_default_and_nothing_is_loaded(fake: Path, tmp_path: Path) -> None:
    assert load_config(None, {}).observe.nvtx == "off"
    found = run_child(fake, tmp_path)
    assert found == {"mapped": False, "threads": [], "names": []}


def test_off_calls_nothing_of_a_library_that_is_there(fake: Path, tmp_path: Path) -> None:
    found = run_child(fake, tmp_path, LD_PRELOAD=f"{os.environ.get('LD_PRELOAD', '')} {fake}")
    assert found == {"mapped": True, "threads": [], "names": []}


def test_a_library_that_is_none_refuses_the_start_by_name(fake: Path, tmp_path: Path) -> None:
    for library, words in (("/no/such.so", "/no/such.so"), ("/proc/self/exe", "observe.nvtx=/proc/self/exe")):
        done = run_child(fake, tmp_path, check=False, FLEXKV_OBSERVE_NVTX=library)
        assert done.returncode == 1
        assert "ConfigError" in done.stderr
        assert words in done.stderr


def test_on_looks_in_wheels_too(fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []

    def load(path: str) -> None:
        if not path.startswith("/"):
            raise ConfigError(f"{path}: not found")
        loaded.append(path)

    wheel = tmp_path / "nvidia" / "cu13" / "lib"
    wheel.mkdir(parents=True)
    (wheel / nvtx.LIBRARIES[0]).symlink_to(fake)
    monkeypatch.setattr(c_ext, "load_nvtx", load)
    monkeypatch.setattr(nvtx, "_library", None)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    nvtx.enable("on")
    assert loaded == [str(wheel / nvtx.LIBRARIES[0])]


def test_on_without_a_library_says_where_it_looked_and_how_to_get_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(path: str) -> None:
        raise ConfigError(f"{path}: not found")

    monkeypatch.setattr(c_ext, "load_nvtx", refuse)
    monkeypatch.setattr(nvtx, "_library", None)
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(
        ConfigError, match=r"observe\.nvtx=on: libnvtx3interop\.so\.1: not found; .*nvidia-nvtx"
    ):
        nvtx.enable("on")
    nvtx.enable("off")
    assert nvtx.span("a") is nvtx.span("b")


@pytest.mark.parametrize(
    ("given", "kept"), [("on", "on"), (True, "on"), (False, "off"), ("/a/b.so", "/a/b.so")]
)
def test_the_setting_is_off_on_or_a_path(given: object, kept: str) -> None:
    assert load_config({"observe.nvtx": given}, {}).observe.nvtx == kept


def test_another_word_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected off, on, or the absolute path"):
        load_config({"observe.nvtx": "libnvtx.so"}, {})
