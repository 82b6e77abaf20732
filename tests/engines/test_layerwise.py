"""Loads within the forward pass, layer by layer. The engine's output is right even if layers come late or fail."""

from __future__ import annotations

from typing import Any

import pytest

from .conftest import FAULTY, Engines, connector
from .session import BLOCK_TOKENS, EngineSession, Prompt
from .test_failures import CARELESS, FAILED_LOADS, acted, compute_from_a_failed_load, faulty
from .test_parallel import TWO_RANKS

LAYERWISE: dict[str, Any] = {"load__mode": "layerwise"}
LATE_LAYER = {"action": "delay", "kind": "load", "layer": 2, "delay_s": 0.3, "times": 1}
IMPATIENT = FAULTY | {"kv_connector": "ImpatientConnector"}


def test_hits_of_every_shape(engines: Engines, stream: int) -> None:
    session = engines.get(connector(**LAYERWISE))
    prompt = Prompt.of(601, stream)
    session.check_one(prompt)
    for seed in (1, 2):
        session.forget(seed)
        assert session.check_one(prompt).cached == prompt.whole_blocks
    # The engine's own cache contains the first blocks of the prompt, and two prompts with the same beginning run
    # together.
    session.forget()
    session.check_one(prompt.first(4 * BLOCK_TOKENS))
    others = [prompt.then(Prompt.of(60 + n, stream + n).ids) for n in (1, 2)]
    for answer in session.check(*others):
        assert answer.cached >= prompt.whole_blocks - BLOCK_TOKENS


def test_chunks_of_a_prefill(engines: Engines, stream: int) -> None:
    session = engines.get(connector(**LAYERWISE), max_num_batched_tokens=160, max_num_seqs=4)
    prompt = Prompt.of(900, stream)
    session.check_one(prompt.first(500))
    session.forget()
    session.check(prompt, Prompt.of(300, stream + 1))
    session.forget()
    assert session.check_one(prompt).cached == prompt.whole_blocks


def late(engines: Engines, stream: int, kind: dict[str, Any]) -> tuple[EngineSession, Prompt]:
    session = faulty(engines, [LATE_LAYER], kind, **LAYERWISE)
    prompt = Prompt.of(600, stream)
    session.check_one(prompt)
    session.forget()
    return session, prompt


def test_a_layer_that_comes_late_is_waited_for(engines: Engines, stream: int) -> None:
    session, prompt = late(engines, stream, FAULTY)
    assert session.check_one(prompt).cached == prompt.whole_blocks
    assert acted(session) == 1


def test_control_without_the_wait_the_output_is_another(engines: Engines, stream: int) -> None:
    session, prompt = late(engines, stream, IMPATIENT)
    [answer] = session.ask(prompt)
    assert answer.cached == prompt.whole_blocks
    assert answer.tokens != session.reference.tokens(prompt)


@pytest.mark.parametrize("kind", ["FaultyConnector", "LayeredTailsConnector"], ids=["tail", "control"])
def test_a_partial_tail_does_not_overwrite_what_the_forward_writes(
    engines: Engines, stream: int, kind: str
) -> None:
    """Loading a partial tail does not overwrite KV that the forward pass writes. The tokens after the tail are in the
    tail's block, and vLLM writes them before it waits for the layer. In this test every copy comes late.
    """
    slow = {"action": "delay", "kind": "load", "delay_s": 0.02, "times": -1}
    tails: dict[str, Any] = {"store__partial_blocks": True, "store__tokens": "prompt"}
    session = faulty(engines, [slow], FAULTY | {"kv_connector": kind}, **LAYERWISE, **tails)
    prompt = Prompt.of(170, stream)
    longer = prompt.then(Prompt.of(40, stream + 1).ids)
    session.check_one(prompt)
    session.forget()
    [answer] = session.ask(longer)
    assert answer.cached == 170
    assert acted(session) > 0
    assert (answer.tokens == session.reference.tokens(longer)) is (kind == "FaultyConnector")
    if kind == "FaultyConnector":
        session.forget()
        # The KV that was computed after the tail was stored, and it is right.
        assert session.check_one(longer).cached == 209


ONE_PAGE: dict[str, Any] = {"action": "fail", "kind": "load", "nth_op": 0, "layer": 2, "page": 3}
ALL_PAGES: dict[str, Any] = {"action": "fail", "kind": "load", "nth_op": 0, "layer": 0}


@pytest.mark.parametrize(
    ("rule", "pages"), [(ONE_PAGE, 1), pytest.param(ALL_PAGES, 12, marks=pytest.mark.long)]
)
def test_what_a_failed_layer_led_to_is_not_published(
    engines: Engines, stream: int, rule: dict[str, Any], pages: int
) -> None:
    session = faulty(engines, [dict(rule)], **LAYERWISE)
    longer = compute_from_a_failed_load(session, stream)
    session.check_one(longer)
    session.settle()
    assert session.metric(FAILED_LOADS) == pages
    session.forget()
    assert session.check_one(longer).cached == longer.whole_blocks


def test_control_a_careless_connector_serves_it(engines: Engines, stream: int) -> None:
    # All pages fail. If a single page lacked two of its four layers, the output might not change.
    session = faulty(engines, [dict(ALL_PAGES)], CARELESS, **LAYERWISE)
    longer = compute_from_a_failed_load(session, stream)
    [answer] = session.ask(longer)
    assert answer.cached == longer.whole_blocks
    assert answer.tokens != session.reference.tokens(longer)


def test_damaged_pages_are_found_layer_by_layer(engines: Engines, stream: int) -> None:
    rules = [{"action": "corrupt", "kind": "store", "page": 2, "corrupt_bytes": 1}]
    session = faulty(engines, rules, host__verify=True, **LAYERWISE)
    prompt = Prompt.of(600, stream)
    session.check_one(prompt)
    session.forget()
    session.check_one(prompt)
    assert session.metric(FAILED_LOADS) >= 1


def test_two_ranks(engines: Engines, stream: int) -> None:
    """Layerwise loads and stores give the right output on two ranks. Each rank runs in its own process."""
    session = engines.get(connector(store__mode="layerwise", **LAYERWISE), TWO_RANKS, tensor_parallel_size=2)
    prompt = Prompt.of(400, stream)
    session.check_one(prompt)
    session.forget()
    assert session.check_one(prompt).cached == prompt.whole_blocks
