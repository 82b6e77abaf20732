"""SGLang's own pool classes, stored and loaded byte for byte; those of other forms are refused."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest

from build_support.sglang_environment import FOLDER
from demo.sglang_process import ENVIRONMENT, ROOT

DEADLINE_S = 900.0


@pytest.fixture(scope="module")
def pools() -> dict[str, dict[str, Any]]:
    command = [str(FOLDER / "bin" / "python"), "-W", "ignore", "-m", "tests.engines_sglang.pool_child"]
    environ = {**os.environ, **ENVIRONMENT}
    environ.pop("PYTHONPATH", None)
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line.pop("pool"): line for line in lines}


@pytest.mark.parametrize(
    ("name", "stored_as"),
    [
        ("mha fp16", "torch.float16"),
        ("mha fp8", "torch.uint8"),
        ("mha other v", "torch.bfloat16"),
        ("mla bf16", "torch.bfloat16"),
        ("mla fp8", "torch.uint8"),
    ],
)
def test_pages_come_back_byte_for_byte(pools: dict[str, dict[str, Any]], name: str, stored_as: str) -> None:
    result = pools[name]
    assert result["arrived"]
    assert result["same"]
    assert result["others untouched"]
    assert result["stored as"] == stored_as


def test_k_and_v_lie_in_one_allocation_where_their_shapes_match(pools: dict[str, dict[str, Any]]) -> None:
    assert [name for name, result in pools.items() if result.get("shared")] == ["mha fp16", "mha fp8"]


def test_another_kind_of_pool_is_refused(pools: dict[str, dict[str, Any]]) -> None:
    assert "MHATokenToKVPoolFP4" in pools["fp4"]["refused"]
