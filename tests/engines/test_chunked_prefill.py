"""Prompts that the engine computes in several steps."""

from __future__ import annotations

import pytest

from .conftest import Engines, connector
from .session import Prompt


@pytest.mark.parametrize("load_mode", ["async", "sync"])
def test_chunks_are_stored_and_served(engines: Engines, stream: int, load_mode: str) -> None:
    session = engines.get(connector(load__mode=load_mode), max_num_batched_tokens=160, max_num_seqs=4)
    prompt = Prompt.of(1000, stream)
    assert session.check_one(prompt).cached == 0
    session.forget()
    assert session.check_one(prompt).cached == prompt.whole_blocks
    # Half of the longer prompt is cached. The engine loads it, then computes the rest in chunks, beside another chunked
    # prompt.
    session.forget()
    longer = prompt.then(Prompt.of(700, stream + 1).ids)
    other = Prompt.of(810, stream + 2)
    known, fresh = session.check(longer, other)
    assert known.cached >= prompt.whole_blocks
    assert fresh.cached == 0
    session.forget()
    assert [answer.cached for answer in session.check(longer, other)] == [
        longer.whole_blocks,
        other.whole_blocks,
    ]
