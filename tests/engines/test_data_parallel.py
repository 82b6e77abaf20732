"""Two data-parallel ranks of a real vLLM engine. Each is a unit with its own host memory and folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .conftest import UNPINNED, connector, engine_arguments
from .session import Prompt, Reference

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 840.0
"""Time limit, in seconds. One process imports vLLM and five more start, which takes minutes if other processes use the
cores."""

SMALL = {"gpu_memory_utilization": 0.2}
"""At its start, each rank claims this share of the node's memory, before vLLM applies the smaller number of blocks that
the test sets."""


@pytest.mark.timeout(900)
def test_two_data_parallel_ranks(model: Path, reference: Reference, stream: int, tmp_path: Path) -> None:
    """Each of two data-parallel ranks gets hits on the pages that it stored in its own host memory, and none on those
    of the other rank."""
    mine, yours = Prompt.of(300, stream), Prompt.of(260, stream + 1)
    told = connector(
        host__bytes=24 << 20, disk__folders=str(tmp_path / "disk"), disk__bytes_per_folder=32 << 20
    )
    arguments = engine_arguments(model) | SMALL | {"data_parallel_size": 2, "kv_transfer_config": told}
    prompts = {"mine": mine, "yours": yours}
    asked = [("mine", 0), ("yours", 1), None, ("mine", 0), ("yours", 1), ("mine", 1), ("yours", 0)]
    orders = [order and (*order, list(prompts[order[0]].ids)) for order in asked]
    answers = run(arguments, orders, tmp_path / "engine.log")
    for answer in answers:
        assert tuple(answer["tokens"]) == reference.tokens(prompts[answer["name"]]), answer
    assert [answer["cached"] for answer in answers] == [0, 0, mine.whole_blocks, yours.whole_blocks, 0, 0]
    units = sorted(path.parent.name for path in (tmp_path / "disk").rglob("*.slab"))
    assert len(units) == len(set(units)) == 2, units


def run(arguments: dict[str, Any], orders: list[Any], log: Path) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "tests.engines.ranks_child", json.dumps(arguments), json.dumps(orders)]
    environ = {**os.environ, **UNPINNED}
    with log.open("w") as output:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environ,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=DEADLINE_S,
            check=False,
        )
    said = log.read_text()
    assert done.returncode == 0, said[-6000:]
    return [json.loads(line) for line in said.splitlines() if line.startswith('{"name"')]
