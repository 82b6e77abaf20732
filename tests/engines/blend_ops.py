"""Operations on an engine that blends: they inspect its forward passes, and break them on purpose."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from demo.engine_child import Operation
from flexkv.simulation.world import DISK

from .blend_watch import Watch, ask_engine, blend_worker, rank_oracle, replaced
from .broken_mask import one_sequence_of
from .disk_ops import LateReads

POISON = 7.0


def know(llm: Any, full: dict[str, Any]) -> None:
    """Runs a full computation of a prompt and gives every rank's oracle the result."""
    llm.collective_rpc(rank_oracle, args=("begin",))
    ask_engine(llm, full | {"max_tokens": 1})
    llm.collective_rpc(rank_oracle, args=("end_full",))


def blend_store_true(llm: Any, full: dict[str, Any], spans: list[list[int]]) -> dict[str, Any]:
    """Keeps as segments, on every rank, the rows that a full computation of a prompt gives."""
    know(llm, full)
    llm.collective_rpc(rank_oracle, args=("store", full["ids"], spans))
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
    """Blends a prompt with the rows of its own full computation, and chooses the kept rows at random.

    Args:
        loaded: the rows are those that the engine loads, for segments of `blend_store_true`.
        one_sequence, another_layer: controls; see `Oracle.begin_blend`.
        check_layer: another one than the engine's.

    Returns how far the keys of any kept row in any later layer are off, and the log probabilities of the answer.
    """
    know(llm, full)
    llm.collective_rpc(
        rank_oracle, args=("begin_blend", share, one_sequence, loaded, another_layer, check_layer)
    )
    answer = ask_engine(llm, blended)
    ranks = llm.collective_rpc(rank_oracle, args=("end_blend",))
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

    Returns how many kept rows before, and after, have other keys in the last layer.
    """
    worker = blend_worker()
    pages, forward = worker._pages, worker.forward
    of_rows = pages.rows

    class Poisoned:
        """Rows with garbage in `bad` ones in the layers after the check layer, so that the same rows are kept."""

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
    """Blends a prompt in one chunk. In each later layer, compares the attention output of the kept rows with plain
    torch on the same queries, over the keys and values that the plan has at each position (cached or fresh).

    Args:
        seen_ahead: for a control, how many positions too far ahead the reference's rows attend.
        check_layer: another one than the engine's.
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
        # The loaded rows still exist here. Earlier requests are released before the prompt is computed.
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
    """Blends a prompt; returns the sum of all squared differences between cached and fresh keys in the check layer.

    Args:
        turned: False for a control whose keys are not turned to their positions.
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
    """Control: blends requests whatever their salt is."""
    from flexkv.adapters.vllm.blend import requests as module

    with replaced(module, refusal=lambda request: None):
        side = llm.llm_engine.engine_core.engine_core.scheduler.connector.scheduler.blend
        side._remember = lambda salt: True
        try:
            return {"requests": [ask_engine(llm, request) for request in requests]}
        finally:
            del side._remember


def blend_skipping(llm: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Sends a request whose caller wants no block of the engine's prefix cache."""
    from vllm.v1.request import Request

    with replaced(Request, get_skip_reading_prefix_cache=lambda self: True):
        return {"requests": [ask_engine(llm, request)]}


def blend_selftest(llm: Any, broken: str = "") -> dict[str, Any]:
    """Runs the test of the engine's start again; the engine's own blocks must be free and unnamed.

    Args:
        broken: for a control, what is wrong: "mask", "rows" of later layers that nobody writes, a single "row" of one
            layer, or the "builder" of the attention backend.
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
    """Flips a bit in each of the first pages of segments in host memory, and flips it back at the next call."""
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
    """Runs in each rank."""
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
    """Evicts every segment from host memory, once its pages are on disk. Returns how many pages are left."""
    return {"left": sum(llm.collective_rpc(_drop_host))}


def blend_hold_reads(llm: Any) -> dict[str, Any]:
    """From now on withholds the results of the disk's reads of segments, until `blend_let_reads_go`. Meanwhile the
    engine counts as having work.
    """
    planes = _segment_unit().driver._planes
    planes[DISK] = LateReads(planes[DISK])
    return {}


def blend_let_reads_go(llm: Any) -> dict[str, Any]:
    """Releases the withheld results. Returns the number of their reads."""
    unit = _segment_unit()
    late = unit.driver._planes[DISK]
    ends_s = time.monotonic() + 30.0
    while len(late.ended) < len(late.under_way):
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
    """What the scheduler's side and the worker's side hold for requests."""
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
    """Forgets the salts, as a full table forgets its oldest ones."""
    llm.llm_engine.engine_core.engine_core.scheduler.connector.scheduler.blend._salts.clear()
    return {}


def blend_erase(llm: Any, name: str) -> dict[str, Any]:
    """Erases a namespace, as a call of a plugin does."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler.connector.scheduler
    return {"pages": scheduler.unit.manager.erase_namespace(name)}


def step_tokens(llm: Any, tokens: int) -> dict[str, Any]:
    """Sets how many tokens the engine computes in a step. Returns the number before."""
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
