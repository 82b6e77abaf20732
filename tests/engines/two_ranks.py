"""Helpers for tests in which two ranks have the same KV, so that flexkv stores one stripe for both."""

from __future__ import annotations

import json
from typing import Any

from .conftest import FAULTY, Engines, connector
from .session import EngineSession, Prompt, Reference
from .test_parallel import TWO_RANKS

DAMAGED_STORE = [{"action": "corrupt", "kind": "store", "nth_op": 0}]


def start_two_ranks(engines: Engines, **engine: Any) -> EngineSession:
    """Starts an engine with two ranks, whose first store is damaged in transit. Also starts an engine without a
    connector, for comparison.
    """
    alone = engines.another(None, **engine)
    environment = {**TWO_RANKS, "FAULT_RULES": json.dumps(DAMAGED_STORE)}
    ours = engines.another(connector(FAULTY), environment, tensor_parallel_size=2, **engine)
    return EngineSession(ours.process, Reference(alone.process))


def check_stored_once(session: EngineSession, stream: int, block_tokens: int, token_bytes: int) -> Prompt:
    """Checks that pages are stored once for the two ranks and serve both. Returns a stored prompt.

    Args:
        token_bytes: bytes that are stored per token, for both ranks together.
    """

    def served(prompt: Prompt) -> int:
        # The engine always computes the last token itself.
        return (len(prompt.ids) - 1) // block_tokens * block_tokens

    # The engine's first store is damaged. This prompt is the control: no digest is checked, and the output must change.
    damaged = Prompt.of(300, stream + 1)
    session.check_one(damaged)
    session.forget()
    [answer] = session.ask(damaged)
    assert answer.cached == served(damaged)
    assert answer.tokens != session.reference.tokens(damaged)
    session.forget()

    prompt, moved = Prompt.of(405, stream), "vllm:flexkv_moved_pages_total{direction=store}"
    stored_before = session.metric(moved)
    session.check_one(prompt)
    session.forget()
    stored = session.metric(moved) - stored_before
    assert stored == (len(prompt.ids) + prompt.max_tokens - 1) // block_tokens, "not once for both ranks"
    bytes_moved = session.metric("vllm:flexkv_moved_bytes_total{direction=store}")
    assert bytes_moved == block_tokens * token_bytes * session.metric(moved)
    assert session.check_one(prompt).cached == served(prompt)
    return prompt
