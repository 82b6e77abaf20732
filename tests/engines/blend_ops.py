"""Operations on an engine that blends. They inspect its forward passes, and break them on purpose for controls."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from demo.engine_child import Operation
from flexkv.simulation.world import DISK

from .blend_watch import Watch, ask_engine, blend_worker, rank_oracle, replaced
from .broken_mask import one_sequence_of
from .disk_ops import LateReads
from .worker_calls import call_workers

POISON = 7.0


def know(llm: Any, full: dict[str, Any]) -> None:
    """Computes a prompt in full. On every rank, the oracle (`blend_watch.Oracle`) keeps the computed keys and
    values."""
    call_workers(llm, rank_oracle, "begin")
    ask_engine(llm, full | {"max_tokens": 1})
    call_workers(llm, rank_oracle, "end_full")


def blend_store_true(llm: Any, full: dict[str, Any], spans: list[list[int]]) -> dict[str, Any]:
    """Computes a prompt in full, and stores the rows of its spans as segments on every rank."""
    know(llm, full)
    call_workers(llm, rank_oracle, "store", full["ids"], spans)
    return {}


def blend_oracle(
    llm: Any,
    full: dict[str, Any],
    blended: dict[str, Any],
    share: float,
    one_sequence: bool = False,
    loaded: bool = False,
    another_layer: bool = False,
    check_layer: int | None = None,
) -> dict[str, Any]:
    """Blends a prompt with cached rows that come from a full computation of the same prompt. Chooses the kept rows at
    random. (A kept row is one that the engine computes anew after the check layer.)

    Args:
        share: the probability with which a reused row is kept.
        loaded: whether the engine loads the rows, from segments that `blend_store_true` has stored.
        one_sequence, another_layer: controls; see `Oracle.begin_blend`.
        check_layer: a check layer to use instead of the engine's; None for the engine's.

    Returns the largest error in the keys of the kept rows in the layers after the check layer, and the answer.
    """
    know(llm, full)
    call_workers(llm, rank_oracle, "begin_blend", share, one_sequence, loaded, another_layer, check_layer)
    answer = ask_engine(llm, blended)
    ranks = call_workers(llm, rank_oracle, "end_blend")
    return {
        "worst": max(rank["worst"] for rank in ranks),
        "kept": len(ranks[0]["kept"]),
        "runs": ranks[0]["runs"],
        "answer": answer,
        "ranks": ranks,
    }


def blend_poison(
    llm: Any, request: dict[str, Any], other: dict[str, Any], first: int, end: int
) -> dict[str, Any]:
    """Blends a prompt twice, the second time with garbage in the reused rows from position `first` to `end`.

    Args:
        other: the request for the second time, with the same prompt.

    Returns how many kept rows before these positions, and how many after them, get different keys in the last layer.
    """
    worker = blend_worker()
    pages, forward = worker._pages, worker.forward
    of_rows = pages.rows

    class Poisoned:
        """Cached rows of which the rows `bad` are replaced by garbage. The check layer gets no garbage, so that it
        chooses the same rows to keep."""

        def __init__(self, source: Any, bad: Any) -> None:
            self.source, self.bad = source, bad

        def open(self, layer: int) -> Poisoned:
            return Poisoned(self.source.open(layer), self.bad)

        def choose(self, chosen: Any) -> None:
            self.source.choose(chosen)
            self.bad = self.bad[chosen]

        def take(self, layer: int) -> Any:
            import torch

            keys, values = self.source.take(layer)
            if layer > forward.check_layer:
                bad = torch.from_numpy(self.bad)
                keys[bad], values[bad] = POISON, POISON
            return keys, values

        def close(self, wait: bool = True) -> None:
            self.source.close(wait)

    def rows(name: str, spans: Any, low: int, high: int) -> Poisoned:
        from flexkv.adapters.vllm.blend.pages import segment_rows

        at = low + segment_rows(spans, low, high)
        return Poisoned(of_rows(name, spans, low, high), (at >= first) & (at < end))

    with Watch(forward) as clean:
        ask_engine(llm, request)
    with replaced(pages, rows=rows), Watch(forward) as bad:
        ask_engine(llm, other)
    kept = np.concatenate(clean.kept)
    assert np.array_equal(kept, np.concatenate(bad.kept))
    last = [watch.keys[-1][: len(watch.kept)] for watch in (clean, bad)]
    differs = np.concatenate([(a.numpy() != b.numpy()).any(axis=(1, 2)) for a, b in zip(*last, strict=True)])
    return {
        "before": int(differs[kept < first].sum()),
        "of_before": int((kept < first).sum()),
        "after": int(differs[kept >= end].sum()),
    }


def blend_reference(
    llm: Any, request: dict[str, Any], seen_ahead: int = 0, check_layer: int | None = None
) -> dict[str, Any]:
    """Blends a prompt in one chunk. In each layer after the check layer, compares the attention output of the kept rows
    with a reference in plain torch.

    The reference uses the same queries. For each position it uses the cached keys and values, or the newly computed
    ones if the row is kept.

    Args:
        seen_ahead: for a control, how many positions too far ahead the reference's rows attend.
        check_layer: a check layer to use instead of the engine's; None for the engine's.
    """
    if check_layer is not None:
        with replaced(blend_worker().forward, check_layer=check_layer):
            return blend_reference(llm, request, seen_ahead)
    import torch

    from flexkv.adapters.vllm.blend.pages import segment_rows

    worker = blend_worker()
    forward, pages, of_rows = worker.forward, worker._pages, worker._pages.rows
    sources: list[tuple[Any, Any]] = []
    calls: dict[int, tuple[Any, ...]] = {}

    def rows(name: str, spans: Any, first: int, end: int) -> Any:
        source = of_rows(name, spans, first, end)
        sources.append((torch.from_numpy(first + segment_rows(spans, first, end)), source))
        return source

    def look(layer: int) -> Any:
        def hook(attention: Any, given: Any, out: Any) -> None:
            calls.setdefault(layer, (*given[:3], out.clone()))

        return hook

    later = range(forward.check_layer + 1, len(forward.layers))
    hooks = [forward.attentions[layer].register_forward_hook(look(layer)) for layer in later]
    wanted: dict[int, Any] = {}

    def attend(layer: int, kept: Any, cached: Any) -> Any:
        attention = forward.attentions[layer]
        heads, size = attention.num_kv_heads, attention.head_size
        query, key, value, _ = calls[layer]
        planes = torch.zeros(2, len(request["ids"]), heads, size)
        at, _ = sources[0]
        planes[0, at], planes[1, at] = cached.take(layer)
        planes[0, kept], planes[1, kept] = key.view(-1, heads, size), value.view(-1, heads, size)
        keys, values = planes.repeat_interleave(attention.num_heads // heads, dim=2).transpose(1, 2)
        scores = query.view(len(kept), -1, size).transpose(0, 1) @ keys.transpose(1, 2) * size**-0.5
        ahead = torch.arange(keys.shape[1]) > kept[:, None] + seen_ahead
        return (scores.masked_fill(ahead, -torch.inf).softmax(-1) @ values).transpose(0, 1).flatten(1)

    of_release = pages.release

    def release(name: str) -> None:
        # At this point the loaded rows of this prompt still exist. While `watch.kept` is empty, the prompt has not been
        # computed, and the calls release only older requests.
        if watch.kept and not wanted:
            cached = sources[0][1].open(later[0])
            wanted.update({layer: attend(layer, torch.from_numpy(watch.kept[0]), cached) for layer in later})
            cached.close()
        of_release(name)

    try:
        with replaced(pages, rows=rows, release=release), Watch(forward) as watch:
            ask_engine(llm, request | {"max_tokens": 2})
    finally:
        for hook in hooks:
            hook.remove()
    worst = max(float((wanted[layer] - calls[layer][3]).abs().max()) for layer in later)
    return {"worst": worst, "kept": len(watch.kept[0]), "layers": len(wanted)}


def blend_differences(llm: Any, request: dict[str, Any], turned: bool = True) -> dict[str, Any]:
    """Blends a prompt. Returns the sum of all squared differences between cached and fresh keys in the check layer.

    Args:
        turned: whether the cached keys are rotated to their positions in the prompt; False for a control.
    """
    worker = blend_worker()
    rotation, forward, sums = worker._pages.rotation, worker.forward, []
    table, choose = rotation.table, forward.choose

    def watching(batch: Any, reused: Any, difference: Any) -> Any:
        sums.append(float(difference.sum()))
        return choose(batch, reused, difference)

    def not_turned(old: Any, new: Any, zero: Any = None) -> Any:
        return table(old, new if turned else old, zero)

    with replaced(rotation, table=not_turned), replaced(forward, choose=watching):
        ask_engine(llm, request)
    return {"sum": sum(sums)}


def blend_trusting(llm: Any, requests: list[dict[str, Any]]) -> dict[str, Any]:
    """A control: blends requests even if their salt is missing or was used before."""
    from flexkv.adapters.vllm.blend import requests as module

    with replaced(module, refusal=lambda request: None):
        side = llm.llm_engine.engine_core.engine_core.scheduler.connector.scheduler.blend
        side._remember = lambda salt: True
        try:
            return {"requests": [ask_engine(llm, request) for request in requests]}
        finally:
            del side._remember


def blend_skipping(llm: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Sends a request that does not use the engine's prefix cache."""
    from vllm.v1.request import Request

    with replaced(Request, get_skip_reading_prefix_cache=lambda self: True):
        return {"requests": [ask_engine(llm, request)]}


def blend_selftest(llm: Any, broken: str = "") -> dict[str, Any]:
    """Repeats the self-test that the engine runs when it starts. All blocks of the engine must be free, and its prefix
    cache empty, because the self-test overwrites blocks.

    Args:
        broken: for a control, what is wrong: "mask" (kept rows see later positions), "rows" (no cached row is written
            in the layers after the check layer), "row" (one cached row of one layer is not written), or "builder" (the
            attention backend's metadata builder is useless).
    """
    from flexkv.adapters.vllm.blend.selftest import SelfTest

    worker = blend_worker()
    forward = worker.forward

    def all_but_one(layer: int, cached: Any, slots: Any) -> None:
        attention, some = (
            forward.attentions[layer],
            slice(None, -1 if layer == forward.check_layer + 1 else None),
        )
        keys, values = cached.take(layer)
        attention.impl.do_kv_cache_update(
            attention, keys[some].contiguous(), values[some].contiguous(), attention.kv_cache, slots[some]
        )

    wrong: dict[str, Any] = {
        "mask": {"runs": one_sequence_of(forward.runs)},
        "rows": {"_put": lambda *a: None},
        "row": {"_put": all_but_one},
        "builder": {"_builder": object()},
    }
    with replaced(forward, **wrong.get(broken, {})):
        test = SelfTest(worker._model, forward, worker._model.blend_config, 129)
        return {"refusal": test.refusal()}


def blend_flip(llm: Any, pages: int) -> dict[str, Any]:
    """Flips a bit in each of the first `pages` pages of segments in host memory. A second call restores the bits."""
    pool = blend_worker()._pages.cache.pool
    flipped = 0
    for slot in range(pool.ready_slots):
        if flipped < pages and pool.slot(slot).any():
            pool.slot(slot)[5] ^= 1
            flipped += 1
    return {"flipped": flipped}


def _segment_unit() -> Any:
    return blend_worker()._pages.cache.unit.live


def _drop_host(worker: Any) -> int:
    """Runs in each rank: waits until the segments are on disk, then evicts them from host memory."""
    unit = _segment_unit()
    ends_s = time.monotonic() + 30.0
    while unit.busy:
        if time.monotonic() > ends_s:
            raise TimeoutError("the disk still writes segments")
        unit.poll()
        time.sleep(0.002)
    hub = unit.manager.hub
    hub.evict(0, len(hub.index))
    return len(hub.index)


def blend_drop_host(llm: Any) -> dict[str, Any]:
    """Waits until all segments are on disk, then evicts them from host memory. Returns how many pages remain in host
    memory."""
    return {"left": sum(call_workers(llm, _drop_host))}


def blend_hold_reads(llm: Any) -> dict[str, Any]:
    """Withholds the results of reads of segments from disk until `blend_let_reads_go` is called. Requests that need
    these segments wait.
    """
    planes = _segment_unit().driver._planes
    planes[DISK] = LateReads(planes[DISK])
    return {}


def blend_let_reads_go(llm: Any) -> dict[str, Any]:
    """Waits until the withheld reads are done, and releases their results. Returns the number of these reads."""
    unit = _segment_unit()
    late = unit.driver._planes[DISK]
    ends_s = time.monotonic() + 30.0
    while len(late.ended) < len(late.in_flight):
        if time.monotonic() > ends_s:
            raise TimeoutError("the disk has not ended its reads")
        unit.poll()
        time.sleep(0.002)
    unit.driver._planes[DISK] = late.plane
    for result in late.ended:
        unit.manager.work.complete(result)
    unit.manager.check_integrity()
    return {"reads": len(late.ended)}


def blend_held(llm: Any) -> dict[str, Any]:
    """Counts the resources that blending holds for requests. In the scheduler: live requests and pages. In the worker:
    loads, captures, and rows of the staging buffer.
    """
    side = llm.llm_engine.engine_core.engine_core.scheduler.connector.scheduler.blend
    pages = blend_worker()._pages
    staging = pages.cache.staging
    return {
        "live": len(side._live),
        "pages": side._held_pages,
        "loads": len(pages._fetches) + len(pages._loads) + len(pages._captures) + len(pages._coming),
        "staged": staging.rows.shape[1] - len(staging.free),
    }


def blend_forget_salts(llm: Any) -> dict[str, Any]:
    """Empties the table of used salts, so that salts can be used again. In service, only a full table drops salts, the
    oldest first."""
    llm.llm_engine.engine_core.engine_core.scheduler.connector.scheduler.blend._salts.clear()
    return {}


def blend_erase(llm: Any, name: str) -> dict[str, Any]:
    """Erases the pages of the namespace `name`, as a plugin can do. Returns their number."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler.connector.scheduler
    return {"pages": scheduler.unit.manager.erase_namespace(name)}


def step_tokens(llm: Any, tokens: int) -> dict[str, Any]:
    """Sets how many tokens the engine computes per step. Returns the previous number."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    before, scheduler.max_num_scheduled_tokens = scheduler.max_num_scheduled_tokens, tokens
    return {"before": before}


OPERATIONS: dict[str, Operation] = {
    "blend_oracle": blend_oracle,
    "blend_poison": blend_poison,
    "blend_differences": blend_differences,
    "blend_reference": blend_reference,
    "blend_trusting": blend_trusting,
    "blend_flip": blend_flip,
    "blend_store_true": blend_store_true,
    "blend_drop_host": blend_drop_host,
    "blend_hold_reads": blend_hold_reads,
    "blend_let_reads_go": blend_let_reads_go,
    "blend_skipping": blend_skipping,
    "blend_selftest": blend_selftest,
    "blend_held": blend_held,
    "blend_forget_salts": blend_forget_salts,
    "blend_erase": blend_erase,
    "step_tokens": step_tokens,
}
