"""Many prompts of a model with several KV groups run in turn, and host memory has slots for the pages of only a few of
them. There is no disk, or a disk that is also too small. The tests do not require that particular pages stay cached.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from .session import BLOCK_TOKENS, EngineSession, Prompt
from .test_disk import DISK_READS, FAILED_READS

PROMPTS = 9
CHECKPOINT = 8 * BLOCK_TOKENS
SMALL: dict[str, Any] = {
    "host__bytes": 8 << 20,
    "host__extent_bytes": 2 << 20,
    "store__checkpoint_tokens": CHECKPOINT,
}
"""Settings for a host memory with a quarter of the slots that all pages of the prompts need."""
DISK_BYTES = 16 << 20
EVICTIONS = "vllm:flexkv_evictions_total"
DISK_EVICTIONS = "vllm:flexkv_disk_evictions_total"


def play_in_turn(session: EngineSession, pairs: Iterable[tuple[Prompt, Prompt]]) -> list[int]:
    """For each pair, drops the engine's own cache and sends the two prompts together, so that their loads compete for
    slots. Returns how many tokens of each prompt were hits.
    """
    cached: list[int] = []
    for pair in pairs:
        session.forget(seed=len(cached))
        cached += [answer.cached for answer in session.check(*pair)]
    return cached


@pytest.mark.parametrize("on_disk", [False, True], ids=["host", "disk"])
def test_evicted_pages_are_missed_and_no_byte_is_wrong(
    hybrid: Any, stream: int, tmp_path: Path, on_disk: bool
) -> None:
    disk: dict[str, Any] = {
        "disk__folders": str(tmp_path / "disk"),
        "disk__bytes_per_folder": DISK_BYTES,
        "disk__compute_if_faster": False,
    }
    session = hybrid(**SMALL, **(disk if on_disk else {}))
    prompts = [Prompt.of(330 + 47 * n, stream + n, max_tokens=6) for n in range(PROMPTS)]
    branches = [
        prompt.first(CHECKPOINT + 40).then(Prompt.of(100, stream + 100 + n).ids)
        for n, prompt in enumerate(prompts)
    ]
    # Each prompt runs beside a prompt that diverges from the previous one. Then the pairs run in reverse order, because
    # the pages of the pairs that ran last are still cached.
    pairs = [(prompt, branches[n - 1]) for n, prompt in enumerate(prompts)]
    first, again = play_in_turn(session, pairs), play_in_turn(session, reversed(pairs))
    session.settle()
    assert session.metric("vllm:flexkv_host_slots_used") <= session.metric("vllm:flexkv_host_slots")
    assert session.metric(EVICTIONS) > 0
    assert CHECKPOINT in first, "no branch was served from what lay before it"
    assert again[0] == prompts[-1].whole_blocks, "the last prompt was evicted"
    assert again[-2] < prompts[0].whole_blocks, "there was room for everything"
    assert not on_disk or session.metric(DISK_READS) > 0
    assert not on_disk or session.metric(DISK_EVICTIONS) > 0
    assert session.metric(FAILED_READS) == 0

    recent = prompts[0]
    session.check_one(recent)
    session.forget()
    assert session.check_one(recent).cached == recent.whole_blocks
    session.forget()
    session.call("exchange_pages")
    [answer] = session.ask(recent)
    assert answer.cached == recent.whole_blocks
    assert answer.tokens != session.reference.tokens(recent), "control: wrong bytes would go unnoticed"
