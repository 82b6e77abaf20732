"""flexkv's entry point in `vllm.general_plugins`. vLLM's own loader finds and runs it in every process. So a user needs
to give only the connector's name.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from demo.engine_process import FLEXKV, IN_PROCESS, SEPARATE_CORE, EngineError, EngineProcess

from .conftest import UNPINNED, connector, engine_arguments
from .session import BLOCK_TOKENS, EngineSession, Prompt, Reference
from .test_beside_others import beside, hear

ROOT = Path(__file__).resolve().parents[2]
BY_NAME = {key: value for key, value in FLEXKV.items() if key != "kv_connector_module_path"}


@pytest.fixture(scope="module")
def metadata(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with flexkv's package metadata, made from the working tree, as `pip install` would write it."""
    folder = tmp_path_factory.mktemp("metadata")
    command = [sys.executable, "setup.py", "-q", "dist_info", "--output-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def start(
    model: Path, folder: Path, transfer: dict[str, Any], metadata: Path, **environment: str
) -> EngineProcess:
    arguments = engine_arguments(model) | {"kv_transfer_config": transfer}
    return EngineProcess(
        arguments,
        folder / "engine.log",
        environment={**UNPINNED, **environment},
        paths=[metadata, ROOT],
    )


def test_the_name_is_enough_in_a_multi_connector_of_separate_processes(
    model: Path, reference: Reference, metadata: Path, tmp_path: Path, stream: int
) -> None:
    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    transfer = beside(connector(BY_NAME), example)
    with start(model, tmp_path, transfer, metadata, **SEPARATE_CORE) as process:
        session = EngineSession(process, reference)
        prompt = Prompt.of(400, stream)
        session.check_one(prompt)
        blocks = prompt.whole_blocks // BLOCK_TOKENS
        hear(session, "vllm:flexkv_moved_pages_total{direction=store}", blocks)
        assert session.call("reset")["done"]
        assert session.check_one(prompt).cached == prompt.whole_blocks


def test_control_without_the_plugin_the_name_is_unknown(model: Path, metadata: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="Unsupported connector type: FlexKVConnector"):
        start(model, tmp_path, connector(BY_NAME), metadata, VLLM_PLUGINS="", **IN_PROCESS)
