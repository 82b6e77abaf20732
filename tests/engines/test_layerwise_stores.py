"""Stores within the forward pass, layer by layer. The pages equal those of stores of complete pages, and no page lacks
a layer.
"""

from __future__ import annotations

from typing import Any

from .conftest import FAULTY, Engines, connector
from .session import BLOCK_TOKENS, Prompt
from .test_failures import FAILED_LOADS, faulty

BY_LAYER: dict[str, Any] = {"store__mode": "layerwise"}


def test_pages_are_those_that_whole_pages_would_have_been(engines: Engines, stream: int) -> None:
    """Layerwise stores write the same pages as stores of complete pages. Two prompts run together in chunks, and one of
    them generates more blocks. Every block in the engine's own cache has an equal page in host memory.
    """
    session = engines.get(connector(**BY_LAYER), max_num_batched_tokens=160, max_num_seqs=4)
    prompts = [Prompt.of(500, stream), Prompt.of(230, stream + 1, max_tokens=70)]
    session.check(*prompts)
    session.settle()
    kept = session.call("compare_pages")
    assert kept["blocks"] >= 15 + 9
    assert kept["missing"] == 0, f"blocks whose bytes no page holds: {kept}"
    session.call("spoil_cached", blocks=3)
    assert session.call("compare_pages")["missing"] >= 3, "the control: blocks that changed are seen"
    session.forget()
    for prompt, answer in zip(prompts, session.check(*prompts), strict=True):
        assert answer.cached == prompt.whole_blocks


def test_layers_that_fail_or_come_late(engines: Engines, stream: int) -> None:
    """flexkv publishes no page that lacks a layer, and no page that was computed from such a page. Loads and stores are
    layerwise, and layers fail or come late."""
    rules = [
        {"action": "fail", "kind": "store", "nth_op": 0, "layer": 2, "page": 4},
        {"action": "delay", "kind": "store", "layer": 1, "page": 0, "delay_s": 0.05},
        {"action": "fail", "kind": "load", "nth_op": 2, "layer": 0},
    ]
    session = faulty(engines, rules, load__mode="layerwise", **BY_LAYER)
    prompt = Prompt.of(600, stream)
    longer = prompt.then(Prompt.of(300, stream + 1).ids)
    session.check_one(prompt)
    session.forget()
    assert session.check_one(prompt).cached == 4 * BLOCK_TOKENS, "the pages before the one that lacks a layer"
    session.forget()
    assert session.check_one(prompt).cached == prompt.whole_blocks, "offered again, and stored"
    session.forget()
    # The complete load fails. Layers that the engine computed from it are in host memory before the failure is
    # reported.
    session.check_one(longer)
    session.settle()
    assert session.metric(FAILED_LOADS) == prompt.whole_blocks // BLOCK_TOKENS
    session.forget()
    session.check_one(longer)
    session.forget()
    assert session.check_one(longer).cached == longer.whole_blocks


def test_control_layers_that_are_copied_too_early_change_the_output(engines: Engines, stream: int) -> None:
    session = faulty(engines, [], FAULTY | {"kv_connector": "HastyConnector"}, **BY_LAYER)
    prompt = Prompt.of(600, stream)
    session.check_one(prompt)
    session.forget()
    [answer] = session.ask(prompt)
    assert answer.cached == prompt.whole_blocks
    assert answer.tokens != session.reference.tokens(prompt)
