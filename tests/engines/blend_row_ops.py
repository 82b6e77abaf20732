"""Operations on an engine that blends: the rows that it captures and keeps, and the steps in which it blends."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import numpy as np

from demo.engine_child import Operation, RequestTracker, drain

from .blend_ops import know, step_tokens
from .blend_watch import ask_engine, blend_worker, rank_oracle, replaced


def blend_captured(
    llm: Any, full: dict[str, Any], store: dict[str, Any], chunk: int, wrong: str = ""
) -> dict[str, Any]:
    """Computes a prompt in one step, and computes it again in steps of so many tokens to keep it as a segment.

    Args:
        wrong: for a control, which rows are captured in place of the right ones: the "row before" in chunks after the
            first, "values" as keys, or the rows of "another layer".

    Returns the largest distance of the segment's keys and values from the computed ones, over ranks, layers and rows.
    """
    know(llm, full)
    llm.collective_rpc(rank_oracle, args=("break_captures", wrong))
    before = step_tokens(llm, chunk)["before"]
    try:
        ask_engine(llm, store)
    finally:
        step_tokens(llm, before)
        llm.collective_rpc(rank_oracle, args=("mend",))
    assert drain(llm)["drained"]
    found = llm.collective_rpc(rank_oracle, args=("kept_apart", store["ids"]))
    return {name: max(rank[name] for rank in found) for name in ("keys", "values")}


def blend_kept(llm: Any, request: dict[str, Any], alone: bool = False) -> dict[str, Any]:
    """Blends a prompt; returns the positions of the rows that each rank computed in later layers.

    Args:
        alone: for a control, each rank chooses the rows by its own heads.
    """
    llm.collective_rpc(rank_oracle, args=("begin_kept", alone))
    ask_engine(llm, request)
    return {"ranks": llm.collective_rpc(rank_oracle, args=("end_kept",))}


_watch = contextlib.ExitStack()
_steps: list[dict[str, list[int]]] = []


def blend_watch_steps(llm: Any, misplaced: bool = False) -> dict[str, Any]:
    """Records the blended steps until `blend_watched_steps`. Which rows are kept depends only on their positions, not
    on the chunks of a prompt.

    Args:
        misplaced: a control: in steps of several requests the cached rows are put one row too early.
    """
    forward = blend_worker().forward
    run = forward.run
    _steps.clear()

    def by_position(batch: Any, reused: Any, difference: Any) -> Any:
        keep = np.ones(batch.rows, np.bool_)
        for rows, _ in reused:
            keep[rows] = batch.positions[rows] % 7 == 3
        return keep

    def noted(ids: Any, positions: Any, batch: Any, reused: Any, taken: Any = ()) -> Any:
        blended = {int(np.searchsorted(batch.starts, each.rows[0], side="right")) - 1 for each in reused}
        _steps.append({"rows": np.diff(batch.starts).tolist(), "blended": sorted(blended)})
        if misplaced and len(batch.starts) > 2:
            own = [each.rows[0] not in batch.starts for each in reused]  # the row before is the request's
            reused = [
                type(each)(each.rows - here, each.source, each.ratio)
                for each, here in zip(reused, own, strict=True)
            ]
        return run(ids, positions, batch, reused, taken)

    _watch.enter_context(replaced(forward, run=noted, choose=by_position))
    return {}


def blend_watched_steps(llm: Any) -> dict[str, Any]:
    """Ends `blend_watch_steps`. Returns for each blended step the number of rows of each request and which requests are
    blended, both in the batch's order.
    """
    _watch.close()
    return {"steps": list(_steps)}


def blend_preempted(
    llm: Any, requests: list[dict[str, Any]], tokens: int, rolled: bool = False, deadline_s: float = 60.0
) -> dict[str, Any]:
    """Runs requests, and takes all their blocks away once each has answered so many tokens.

    Args:
        rolled: a control: afterwards each cached row is given as the one after it.
    """
    tracker, pages = RequestTracker(llm), blend_worker()._pages
    for number, request in enumerate(requests):
        tracker.add(f"p{number}-{time.monotonic_ns()}", request)
    ends_s = time.monotonic() + deadline_s

    def step() -> bool:
        if time.monotonic() > ends_s:
            raise TimeoutError(f"requests still unfinished after {deadline_s:g} s")
        return tracker.step()

    while any(len(result["tokens"]) < tokens for result in tracker.results()):
        assert step()
    done = llm.llm_engine.engine_core.engine_core.scheduler.reset_prefix_cache(reset_running_requests=True)
    of_rows = pages.rows

    def rows(*given: Any) -> Any:
        source = of_rows(*given)
        source._rows.in_buffer = np.roll(source._rows.in_buffer, -1)
        return source

    with replaced(pages, rows=rows if rolled else of_rows):
        while step():
            pass
    return {"done": bool(done), "requests": tracker.results()}


def blend_flip_page(llm: Any, segment: list[int], page: int) -> dict[str, Any]:
    """Flips a bit in a full page of a segment in host memory. The load that finds the damage drops the page."""
    from flexkv.blend.keys import GROUP

    cache = blend_worker()._pages.cache
    index = cache.unit.live.manager.hub.index
    keys = cache.scheme.keys(np.asarray(segment, np.int64)).whole
    slots = index.slots_of(index.find(GROUP, keys[page : page + 1]))
    cache.pool.slot(int(slots[0]))[5] ^= 1
    return {}


def blend_stored(llm: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Control: blends a request whatever its salt is, and stores its pages as those of an ordinary request."""
    from flexkv.adapters.vllm.blend import requests as module
    from flexkv.cache.stores.kept_out import KeptOut

    side = llm.llm_engine.engine_core.engine_core.scheduler.connector.scheduler.blend
    with (
        replaced(module, refusal=lambda request: None, replace=lambda settings, **more: settings),
        replaced(KeptOut, ask=lambda self, *given: None),
        replaced(side, _remember=lambda salt: True),
    ):
        answer = ask_engine(llm, request)
        assert drain(llm)["drained"]
    del side._remember
    return {"requests": [answer]}


OPERATIONS: dict[str, Operation] = {
    "blend_captured": blend_captured,
    "blend_kept": blend_kept,
    "blend_watch_steps": blend_watch_steps,
    "blend_watched_steps": blend_watched_steps,
    "blend_preempted": blend_preempted,
    "blend_flip_page": blend_flip_page,
    "blend_stored": blend_stored,
}
