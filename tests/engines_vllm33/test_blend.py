"""Blending on vLLM 0.33: with its model runner, its order of hooks, and the attention backends of a GPU.

FLASH_ATTN is vLLM's own code around a kernel in torch. TRITON_ATTN runs vLLM's own kernels in Triton's interpreter.
When the engine starts, its self-test compares every kept row with a full computation (`selftest.py`), and blending is
on only if they agree.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.engines_vllm33.conftest import Cases, Found, flexkv, tokens

BLEND: dict[str, Any] = {"blend__enabled": True, "blend__bytes": 16 << 20, "blend__min_tokens": 32}
SIZES, SHORT = [96, 75, 128], [48, 33, 35]
"""Numbers of tokens of the documents in a prompt: SIZES for longer documents, SHORT for shorter ones."""

INTERPRETED_S = 1500.0
"""Time limit, in seconds, for a case that runs in Triton's interpreter. Such a case takes minutes."""


def blend(cases: Cases, backend: str, sizes: list[int], broken: bool = False) -> Found:
    arguments: dict[str, Any] = {"attention_backend": backend, "sizes": sizes, "broken": broken}
    found = cases.run("blended", flexkv(**BLEND), deadline_s=INTERPRETED_S, **arguments)
    assert found["v2"]
    assert found["device"] == "cuda"
    return found


@pytest.mark.timeout(INTERPRETED_S)
@pytest.mark.parametrize(
    ("backend", "sizes"),
    [("FLASH_ATTN", SIZES), pytest.param("TRITON_ATTN", SHORT, marks=pytest.mark.long)],
)
def test_documents_in_another_order_are_blended(cases: Cases, backend: str, sizes: list[int]) -> None:
    found = blend(cases, backend, sizes)
    assert "blending is off" not in found["log"]
    assert found["results"]["blended"] == 2
    assert found["results"]["stored"] == len(sizes)
    assert tokens(found, "one") == tokens(found, "full")
    assert found["rows"]["one"] == {"reused": 0, "computed": sum(sizes), "unplaced": 0, "lost": 0}
    assert found["rows"]["third"]["reused"] > sum(sizes) / 2
    assert found["rows"]["third"]["reused"] + found["rows"]["third"]["computed"] == sum(sizes)


def test_control_a_wrong_mask_turns_it_off(cases: Cases) -> None:
    found = blend(cases, "FLASH_ATTN", SHORT, broken=True)
    assert "blending is off" in found["log"]
    assert "its test at the start fails: the oracle is off by" in found["log"]
    assert found["results"]["blended"] == 0
    assert tokens(found, "third") == tokens(found, "full")
