"""A real model with several KV groups: a Gemma 3 with five sliding layers and one full layer, which vLLM serves as six
groups of one layer each. A hit needs all pages of the full group, and the pages of the last window in each sliding
group.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from demo.hybrid import WINDOW

from .conftest import BLOCKS_OF_ALL_GROUPS, GROUPS, HOST_BYTES, Engines
from .session import BLOCK_TOKENS, EngineSession, Prompt, Reference
from .test_disk import start as start_on_disk
from .test_disk import wait_durable
from .test_parallel import TWO_RANKS

WINDOW_PAGES = -(-(WINDOW - 1) // BLOCK_TOKENS)
CHECKPOINT = 8 * BLOCK_TOKENS
CLOSE = 1e-4
STORED = "vllm:flexkv_moved_pages_total{direction=store}"
FAILED = "vllm:flexkv_failed_pages_total{direction=load,reason=failed}"


def test_a_hit_equals_cold(hybrid: Any, stream: int) -> None:
    session = hybrid()
    prompt = Prompt.of(405, stream)
    session.check_one(prompt)
    session.settle()
    assert session.metric(STORED) < GROUPS * prompt.whole_blocks // BLOCK_TOKENS, "windows were stored whole"
    session.forget()
    assert session.check_one(prompt).cached == prompt.whole_blocks
    session.forget(seed=2)
    turn = Prompt((*prompt.ids, *session.reference.tokens(prompt), *Prompt.of(80, stream + 1).ids))
    assert session.check_one(turn).cached >= prompt.whole_blocks
    session.forget(seed=3)
    branch = prompt.then(Prompt.of(300, stream + 2).ids)
    assert session.check_one(branch).cached >= prompt.whole_blocks


def test_a_hit_gives_the_log_probabilities_of_a_cold_answer(hybrid: Any, stream: int) -> None:
    """A hit gives the same log probabilities as an answer that is computed in full. In float32 they are equal up to
    rounding, however the prompt is split for computation."""
    session = hybrid()
    prompt = Prompt.of(405, stream, log_probabilities=True)
    alone = session.reference.log_probabilities(prompt)
    cold = session.check_one(prompt)
    session.forget()
    hit = session.check_one(prompt)
    assert (cold.cached, hit.cached) == (0, prompt.whole_blocks)
    assert farthest(cold.log_probabilities, alone) < CLOSE
    assert farthest(hit.log_probabilities, alone) < CLOSE


def farthest(one: Sequence[float], other: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def test_bytes_stored_are_those_of_the_full_group_and_of_windows(hybrid: Any, stream: int) -> None:
    session = hybrid(store__tokens="prompt")
    before = session.metric(STORED)
    prompt = Prompt.of(2000, stream, max_tokens=1)
    session.check_one(prompt)
    session.settle()
    pages = prompt.whole_blocks // BLOCK_TOKENS
    assert session.metric(STORED) - before == pages + (GROUPS - 1) * WINDOW_PAGES


def test_a_long_prompt_is_hit_as_far_as_a_boundary(hybrid: Any, stream: int) -> None:
    """A long prompt that matches a stored one up to some token is a hit up to the last checkpoint before this token.
    Two prompts share a beginning that does not end at a boundary.
    """
    session = hybrid(store__checkpoint_tokens=CHECKPOINT)
    prompt = Prompt.of(700, stream)
    session.check_one(prompt)
    session.forget()
    sibling = prompt.first(500).then(Prompt.of(200, stream + 1).ids)
    assert session.check_one(sibling).cached == 500 // CHECKPOINT * CHECKPOINT
    # A third prompt diverges at the same token. Its hit is longer, because the second prompt has stored a boundary
    # there.
    session.forget(seed=2)
    third = prompt.first(500).then(Prompt.of(150, stream + 2).ids)
    assert session.check_one(third).cached == 500 // BLOCK_TOKENS * BLOCK_TOKENS


def test_control_every_group_is_needed(hybrid: Any, stream: int) -> None:
    """A control: every KV group is needed for a right answer. In each load the pages of a different group are damaged,
    and no digest is checked. The answer changes each time.
    """
    session = hybrid([{"action": "corrupt", "kind": "load", "nth_op": GROUPS * g + g} for g in range(GROUPS)])
    prompt = Prompt.of(405, stream, log_probabilities=True)
    cold = session.check_one(prompt)
    for group in range(GROUPS):
        session.forget(seed=group)
        [answer] = session.ask(prompt)
        assert answer.cached == prompt.whole_blocks
        assert farthest(answer.log_probabilities, cold.log_probabilities) > CLOSE
        assert answer.tokens != session.reference.tokens(prompt), f"group {group} is of no use"
    session.forget()
    assert session.check_one(prompt).cached == prompt.whole_blocks


@pytest.mark.parametrize("group", [0, GROUPS - 1])
def test_a_page_of_a_group_fails_and_the_next_shorter_boundary_serves(
    hybrid: Any, stream: int, group: int
) -> None:
    rules = [{"action": "fail", "kind": "load", "nth_op": group, "page": 1}]
    session = hybrid(rules, store__checkpoint_tokens=CHECKPOINT)
    prompt = Prompt.of(700, stream)
    session.check_one(prompt)
    session.forget()
    answer = session.check_one(prompt)
    assert session.metric(FAILED) == 1
    assert answer.cached == (0 if group == 0 else 512)
    session.forget()
    assert session.check_one(prompt).cached == prompt.whole_blocks, "what was computed again was not stored"


def test_damaged_pages_of_any_group_are_found(hybrid: Any, stream: int) -> None:
    rules = [{"action": "corrupt", "kind": "store", "nth_op": op, "corrupt_bytes": 1} for op in range(GROUPS)]
    session = hybrid(rules, host__verify=True)
    prompt = Prompt.of(600, stream)
    session.check_one(prompt)
    session.forget()
    session.check_one(prompt)
    assert session.metric(FAILED) >= 1
    session.forget()
    assert session.check_one(prompt).cached == prompt.whole_blocks


@pytest.mark.long
def test_pages_of_all_groups_on_disk_serve_the_next_engine(
    engines: Engines, gemma_3: Path, gemma_3_alone: Reference, tmp_path: Path, stream: int
) -> None:
    """Pages of all KV groups on disk serve the next engine. It has two ranks, and each rank has a stripe of every
    page."""
    more: dict[str, Any] = {"model": str(gemma_3), "num_gpu_blocks_override": BLOCKS_OF_ALL_GROUPS}
    prompt = Prompt.of(700, stream)
    for start in range(2):
        ours = start_on_disk(
            engines,
            tmp_path / "disk",
            TWO_RANKS,
            2,
            engine=more,
            host__bytes=HOST_BYTES,
            store__checkpoint_tokens=CHECKPOINT,
        )
        session = EngineSession(ours.process, gemma_3_alone)
        answer = session.check_one(prompt)
        assert answer.cached == (prompt.whole_blocks if start else 0)
        session.settle()
        wait_durable(session)
    sibling = prompt.first(500).then(Prompt.of(200, stream + 1).ids)
    assert session.check_one(sibling).cached == 500 // CHECKPOINT * CHECKPOINT
