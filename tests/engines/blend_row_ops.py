"""Operations on an engine that blends. They inspect the rows that the engine captures for segments, the rows that it
keeps, and the steps in which it blends.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import numpy as np

from demo.engine_child import Operation, RequestTracker, drain

from .blend_ops import know, step_tokens
from .blend_watch import ask_engine, blend_worker, rank_oracle, replaced
from .worker_calls import call_workers


def blend_captured(
    llm: Any, full: dict[str, Any], store: dict[str, Any], chunk: int, wrong: str = ""
) -> dict[str, Any]:
    """Computes a prompt in one step. Then computes it again, `chunk` tokens per step, and stores it as a segment.

    Args:
        wrong: for a control, what is wrong with the captured rows: "row before" (in chunks after the first they are
            stored one row too early), "values" (values are stored as keys), "another layer" (each layer's rows are
            stored for the next layer).

    Returns two numbers: the largest distance between the segment's keys and those of the first computation, over all
    ranks, layers and rows; and the same for values.
    """
    know(llm, full)
    call_workers(llm, rank_oracle, "break_captures", wrong)
    before = step_tokens(llm, chunk)["before"]
    try:
        ask_engine(llm, store)
    finally:
        step_tokens(llm, before)
        call_workers(llm, rank_oracle, "mend")
    assert drain(llm)["drained"]
    found = call_workers(llm, rank_oracle, "kept_apart", store["ids"])
    return {name: max(rank[name] for rank in found) for name in ("keys", "values")}


def blend_kept(llm: Any, request: dict[str, Any], alone: bool = False) -> dict[str, Any]:
    """Blends a prompt. Returns, for each rank, the positions of the rows that it computed after the check layer.

    Args:
        alone: for a control, each rank chooses the rows by its own heads only.
    """
    call_workers(llm, rank_oracle, "begin_kept", alone)
    ask_engine(llm, request)
    return {"ranks": call_workers(llm, rank_oracle, "end_kept")}


_watch = contextlib.ExitStack()
_steps: list[dict[str, list[int]]] = []


def blend_watch_steps(llm: Any, misplaced: bool = False) -> dict[str, Any]:
    """Records the blended steps until `blend_watched_steps` is called. Until then, the engine chooses the kept rows by
    their positions alone, so that the choice does not depend on the chunks of a prompt.

    Args:
        misplaced: for a control, puts cached rows one row too early in steps with several requests.
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
            # The first row of a request cannot be moved, because the row before it belongs to another request.
            own = [each.rows[0] not in batch.starts for each in reused]
            reused = [
                type(each)(each.rows - here, each.source, each.ratio)
                for each, here in zip(reused, own, strict=True)
            ]
        return run(ids, positions, batch, reused, taken)

    _watch.enter_context(replaced(forward, run=noted, choose=by_position))
    return {}


def blend_watched_steps(llm: Any) -> dict[str, Any]:
    """Ends `blend_watch_steps`. For each blended step, returns the number of rows of each request in the batch, and the
    indexes of the requests that are blended.
    """
    _watch.close()
    return {"steps": list(_steps)}


def blend_preempted(
    llm: Any, requests: list[dict[str, Any]], tokens: int, rolled: bool = False, deadline_s: float = 60.0
) -> dict[str, Any]:
    """Runs requests. When each has generated `tokens` tokens, preempts all of them by resetting the prefix cache, and
    runs them to their end.

    Args:
        rolled: for a control, whether each cached row is replaced by the row after it when the requests run again.
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
    """Flips a bit in a full page of a segment in host memory. A load that detects the damage drops the page."""
    from flexkv.blend.keys import GROUP

    cache = blend_worker()._pages.cache
    index = cache.unit.live.manager.hub.index
    keys = cache.scheme.keys(np.asarray(segment, np.int64)).whole
    slots = index.slots_of(index.find(GROUP, keys[page : page + 1]))
    cache.pool.slot(int(slots[0]))[5] ^= 1
    return {}


def blend_stored(llm: Any, request: dict[str, Any]) -> dict[str, Any]:
    """A control: blends a request without checking its salt, and stores its pages like those of an ordinary request."""
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
