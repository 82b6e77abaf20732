"""Layerwise loads from disk to an engine's pool, bypassing host memory: the forward pass gets the first layer while the
last layer is still being read. The tests use the adapters of three engines; the pools are in ordinary memory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.faults.preload import build_preload

ROOT = Path(__file__).resolve().parents[2]
CHILD_S = 240
LAYERS = {"vllm": 2, "sglang": 3, "tensorrt_llm": 3}


@pytest.fixture(scope="module", params=LAYERS)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of `layers_child` for one engine: one for loads layer by layer, and one for loads of all layers at
    once."""
    folder = tmp_path_factory.mktemp("layers")
    environment = {**os.environ, "LD_PRELOAD": str(build_preload("stall_reads.cpp", folder))}
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.layers_child", request.param, str(folder)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=CHILD_S,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert all(len(each["waited"]) == LAYERS[request.param] for each in seen.values())
    return seen


def test_the_first_layer_is_there_while_the_last_is_being_read(found: dict[str, Any]) -> None:
    by_layer = found["by layer"]
    assert by_layer["right"]
    assert by_layer["waited"][0], "reads of the last layer waited when the forward had its first one"
    assert not by_layer["waited"][-1], "and had ended when it had its last one"


def test_control_pages_that_come_at_once_hold_the_first_layer_back(found: dict[str, Any]) -> None:
    assert found["at once"]["right"]
    assert not any(found["at once"]["waited"])
