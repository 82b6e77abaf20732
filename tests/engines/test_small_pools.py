"""An engine whose pool is little larger than one prompt. Every prompt that fits into host memory is stored
completely."""

from __future__ import annotations

from typing import Any

import pytest

from demo.model import PRESETS

from .conftest import Engines, connector
from .session import BLOCK_TOKENS, EngineSession, Prompt

PAGES = 34
POOL_BLOCKS = int(1.2 * PAGES) + 2
"""Number of blocks in the engine's pool: 1.2 times those of a large prompt, one for the answer, and the null block."""
OTHERS = 7
PAGE_BYTES = BLOCK_TOKENS * PRESETS["tiny"].kv_bytes_per_token
ENGINE: dict[str, Any] = {
    "num_gpu_blocks_override": POOL_BLOCKS,
    "max_model_len": (PAGES + 2) * BLOCK_TOKENS,
    "max_num_seqs": OTHERS + 1,
}
FEW_IN_FLIGHT = 5
DROPPED = "vllm:flexkv_dropped_store_pages_total"


def large(stream: int, max_tokens: int = 2) -> Prompt:
    """Makes a prompt of `PAGES` full blocks and one more token, which the engine computes."""
    return Prompt.of(PAGES * BLOCK_TOKENS + 1, stream, max_tokens=max_tokens)


def small(stream: int) -> list[Prompt]:
    """Makes seven prompts. Each of them needs one block and does not fill it."""
    return [Prompt.of(20 + n, stream + 1 + n, max_tokens=5) for n in range(OTHERS)]


def start(engines: Engines, **settings: Any) -> EngineSession:
    """Starts an engine whose host memory has slots for two large prompts and a few more pages."""
    return engines.get(connector(host__bytes=(2 * PAGES + 8) * PAGE_BYTES, **settings), **ENGINE)


def check_stored_whole(session: EngineSession, prompt: Prompt) -> None:
    session.forget()
    assert session.check_one(prompt).cached == prompt.whole_blocks == PAGES * BLOCK_TOKENS


def test_a_prompt_is_stored_whole(engines: Engines, stream: int) -> None:
    """A prompt is stored completely, whether it runs alone or beside others. Few pages may be in flight, so most pages
    are stored after the request has ended.
    """
    session = start(engines, store__inflight_pages=FEW_IN_FLIGHT)
    alone, beside = large(stream), large(stream + 100)
    session.check_one(alone)
    check_stored_whole(session, alone)
    session.forget()
    session.check(*small(stream + 200), beside)
    check_stored_whole(session, beside)
    assert session.metric(DROPPED) == 0


def test_what_the_next_prompt_needs_is_not_waited_for(engines: Engines, stream: int) -> None:
    """If the next prompt needs blocks that are not stored yet, the engine does not wait for the store. Each large
    prompt takes the blocks of the previous one. Every answer is right, and the pages that were not stored are counted.
    """
    session = start(engines, store__inflight_pages=FEW_IN_FLIGHT)
    before = session.metric(DROPPED)
    prompts = [large(stream + 100 * n) for n in range(3)]
    session.check(*prompts)
    session.settle()
    lost = session.metric(DROPPED) - before
    assert lost == session.metric(f"{DROPPED}{{reason=reused}}"), "the only reason"
    kept = [answer.cached for answer in session.check(*reversed(prompts))]
    session.settle()
    assert sum(kept) <= len(prompts) * PAGES * BLOCK_TOKENS - lost * BLOCK_TOKENS


def test_an_aborted_request_and_a_reset_leave_nothing_held(engines: Engines, stream: int) -> None:
    session = start(engines, store__inflight_pages=FEW_IN_FLIGHT)
    prompt = large(stream, max_tokens=20)
    reply = session.call(
        "abort", requests=[prompt.wire()], victim=0, status="RUNNING", later=[small(stream)[0].wire()]
    )
    assert reply["aborted"], reply
    assert session.call("reset")["done"], "a reset right after the end of a request"
    session.settle()
    session.forget()
    session.check_one(prompt)
    check_stored_whole(session, prompt)


def test_lazy_stores_lose_nothing(engines: Engines, stream: int) -> None:
    """Lazy stores lose no page. Several large prompts are sent at once, and each gets the blocks of the previous one.
    Afterwards every page is in the engine's own prefix cache, or stored by flexkv.
    """
    session = engines.get(
        connector(host__bytes=4 * PAGES * PAGE_BYTES, store__mode="lazy"),
        max_num_batched_tokens=2048,
        **ENGINE,
    )
    prompts = [large(stream + 100 * n) for n in range(3)]
    session.check(*prompts)
    session.settle()
    assert session.metric("vllm:flexkv_lazy_missed_pages_total") == session.metric(DROPPED) == 0
    assert [answer.cached for answer in session.check(*prompts)] == [PAGES * BLOCK_TOKENS] * len(prompts)


MODES = [(store, load) for store in ("eager", "layerwise") for load in ("async", "sync", "layerwise")]


def check_alone_and_beside(session: EngineSession, stream: int) -> None:
    """Checks that a prompt is stored completely if it runs alone, and also if it runs beside seven others."""
    alone, beside = large(stream), large(stream + 100)
    session.check_one(alone)
    check_stored_whole(session, alone)
    session.forget()
    session.check(beside, *small(stream + 200))
    check_stored_whole(session, beside)


@pytest.mark.long
@pytest.mark.parametrize("in_flight", [FEW_IN_FLIGHT, 65_536])
@pytest.mark.parametrize(("store", "load"), MODES)
def test_every_mode_stores_a_prompt_whole(
    engines: Engines, stream: int, store: str, load: str, in_flight: int
) -> None:
    session = start(engines, store__mode=store, load__mode=load, store__inflight_pages=in_flight)
    check_alone_and_beside(session, stream)
    assert session.metric(DROPPED) == 0


@pytest.mark.long
def test_every_mode_is_right_with_async_scheduling(engines: Engines, stream: int) -> None:
    """In every mode, answers are right with async scheduling. Two batches are then in flight, so vLLM finds the end of
    a request one step late."""
    session = engines.get(
        connector(host__bytes=(2 * PAGES + 8) * PAGE_BYTES, store__inflight_pages=FEW_IN_FLIGHT),
        async_scheduling=True,
        **ENGINE,
    )
    check_alone_and_beside(session, stream)
