"""Operations on an engine that blends: they look into its forwards, and break them on purpose."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from demo.engine_child import Operation, RequestTracker

POISON = 7.0


def _worker() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group().worker.blend


def _ask(llm: Any, request: dict[str, Any]) -> dict[str, Any]:
    tracker = RequestTracker(llm)
    tracker.add(f"b{time.monotonic_ns()}", request)
    while tracker.step():
        pass
    (result,) = tracker.results()
    return result


@contextlib.contextmanager
def _set(owner: Any, **values: Any) -> Iterator[None]:
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


class Watch:
    """Keys and values that each layer's attention is given, and the positions that they belong to."""

    def __init__(self, forward: Any) -> None:
        self.keys: list[list[Any]] = [[] for _ in forward.layers]
        self.values: list[list[Any]] = [[] for _ in forward.layers]
        self.kept: list[Any] = []
        self.runs: list[int] = []
        self._forward = forward
        self._of_runs = forward.runs

    def __enter__(self) -> Watch:
        def look(layer: int) -> Any:
            def hook(attention: Any, arguments: Any) -> None:
                rows = arguments[1].shape[0]
                self.keys[layer].append(arguments[1].reshape(rows, attention.num_kv_heads, -1).clone())
                self.values[layer].append(arguments[2].reshape(rows, attention.num_kv_heads, -1).clone())

            return hook

        self._hooks = [
            attention.register_forward_pre_hook(look(layer))
            for layer, attention in enumerate(self._forward.attentions)
        ]
        self._forward.runs = self._note
        return self

    def _note(self, batch: Any, kept: Any) -> Any:
        runs = self._of_runs(batch, kept)
        self.kept.append(batch.positions[kept])
        self.runs.append(len(runs.lengths))
        return runs

    def __exit__(self, *error: object) -> None:
        self._forward.runs = self._of_runs
        for hook in self._hooks:
            hook.remove()

    def planes(self) -> list[tuple[Any, Any]]:
        """Keys and values of each layer, of all forwards."""
        import torch

        return [
            (torch.cat(keys), torch.cat(values)) for keys, values in zip(self.keys, self.values, strict=True)
        ]


def _one_sequence(runs: Any) -> Any:
    """Control: makes one causal sequence of the kept rows of each request."""
    from flexkv.adapters.vllm.blend.rows import Runs

    def broken(batch: Any, kept: Any) -> Runs:
        found = runs(batch, kept)
        begin = np.flatnonzero(np.concatenate(([True], np.diff(found.sequences) != 0)))
        ends = np.append(begin[1:], len(found.sequences)) - 1
        starts = np.append(found.starts[begin], found.starts[-1]).astype(np.int32)
        return Runs(starts, found.lengths[ends], found.sequences[begin])

    return broken


def blend_oracle(
    llm: Any, full: dict[str, Any], blended: dict[str, Any], share: float, one_sequence: bool = False
) -> dict[str, Any]:
    """Blends a prompt with the rows that a full computation of it gives, and keeps rows at random.

    Returns how far the keys of any kept row in any later layer are off, and the log probabilities of the answer.
    """
    from flexkv.adapters.vllm.blend.selftest import KnownRows

    worker = _worker()
    forward, pages = worker.forward, worker._pages
    with Watch(forward) as whole:
        _ask(llm, full | {"max_tokens": 1})
    planes = whole.planes()
    random = np.random.default_rng(3)

    def rows(request: str, spans: Any, first: int, end: int) -> KnownRows:
        from flexkv.adapters.vllm.blend.pages import segment_rows

        return KnownRows(planes, first + segment_rows(spans, first, end))

    def choose(batch: Any, reused: Any, difference: Any) -> Any:
        keep = np.ones(batch.rows, np.bool_)
        for covered, _ in reused:
            keep[covered] = random.random(len(covered)) < share
        keep[batch.last] = True
        return keep

    runs = _one_sequence(forward.runs) if one_sequence else forward.runs
    with _set(pages, rows=rows), _set(forward, choose=choose, runs=runs), Watch(forward) as some:
        answer = _ask(llm, blended)
    kept = np.concatenate(some.kept)
    worst = 0.0
    for layer in range(forward._check + 1, len(forward.layers)):
        fresh = np.concatenate([keys.numpy() for keys in some.keys[layer][: len(some.kept)]])
        wanted = planes[layer][0].numpy()[kept]
        worst = max(worst, float(np.abs(fresh - wanted).max()))
    return {"worst": worst, "kept": len(kept), "runs": sum(some.runs), "answer": answer}


def blend_poison(
    llm: Any, request: dict[str, Any], other: dict[str, Any], first: int, end: int
) -> dict[str, Any]:
    """Blends a prompt twice, the second time with garbage in the reused rows from position `first` to `end`.

    Returns how many kept rows before, and after, have other keys in the last layer.
    """
    worker = _worker()
    pages, forward = worker._pages, worker.forward
    of_rows = pages.rows

    class Poisoned:
        def __init__(self, source: Any, bad: Any) -> None:
            self.source, self.bad = source, bad

        def only(self, chosen: Any) -> Poisoned:
            return Poisoned(self.source.only(chosen), self.bad[chosen])

        def layer(self, layer: int) -> Any:
            import torch

            keys, values = self.source.layer(layer)
            if layer > forward._check:  # the same rows are kept
                bad = torch.from_numpy(self.bad)
                keys[bad], values[bad] = POISON, POISON
            return keys, values

    def rows(name: str, spans: Any, low: int, high: int) -> Poisoned:
        from flexkv.adapters.vllm.blend.pages import segment_rows

        at = low + segment_rows(spans, low, high)
        return Poisoned(of_rows(name, spans, low, high), (at >= first) & (at < end))

    with Watch(forward) as clean:
        _ask(llm, request)
    with _set(pages, rows=rows), Watch(forward) as bad:
        _ask(llm, other)
    kept = np.concatenate(clean.kept)
    assert np.array_equal(kept, np.concatenate(bad.kept))
    last = [watch.keys[-1][: len(watch.kept)] for watch in (clean, bad)]
    differs = np.concatenate([(a.numpy() != b.numpy()).any(axis=(1, 2)) for a, b in zip(*last, strict=True)])
    return {
        "before": int(differs[kept < first].sum()),
        "of_before": int((kept < first).sum()),
        "after": int(differs[kept >= end].sum()),
    }


def blend_reference(llm: Any, request: dict[str, Any], seen_ahead: int = 0) -> dict[str, Any]:
    """Blends a prompt in one chunk; compares what the kept rows' attention gives in each later layer with plain torch
    on the same queries, over the keys and values that the plan has at each position: cached ones, or fresh ones.

    Args:
        seen_ahead: for a control, how many positions too far the reference's rows see.
    """
    import torch

    from flexkv.adapters.vllm.blend.pages import segment_rows

    worker = _worker()
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

    later = range(forward._check + 1, len(forward.layers))
    hooks = [forward.attentions[layer].register_forward_hook(look(layer)) for layer in later]
    wanted: dict[int, Any] = {}

    def attend(layer: int, kept: Any) -> Any:
        attention = forward.attentions[layer]
        heads, size = attention.num_kv_heads, attention.head_size
        query, key, value, _ = calls[layer]
        planes = torch.zeros(2, len(request["ids"]), heads, size)
        at, source = sources[0]
        planes[0, at], planes[1, at] = source.layer(layer)
        planes[0, kept], planes[1, kept] = key.view(-1, heads, size), value.view(-1, heads, size)
        keys, values = planes.repeat_interleave(attention.num_heads // heads, dim=2).transpose(1, 2)
        scores = query.view(len(kept), -1, size).transpose(0, 1) @ keys.transpose(1, 2) * size**-0.5
        ahead = torch.arange(keys.shape[1]) > kept[:, None] + seen_ahead
        return (scores.masked_fill(ahead, -torch.inf).softmax(-1) @ values).transpose(0, 1).flatten(1)

    of_release = pages.release

    def release(name: str) -> None:
        # Here the loaded rows are still there. Earlier requests are released before the prompt is computed.
        if watch.kept and not wanted:
            wanted.update({layer: attend(layer, torch.from_numpy(watch.kept[0])) for layer in later})
        of_release(name)

    try:
        with _set(pages, rows=rows, release=release), Watch(forward) as watch:
            _ask(llm, request | {"max_tokens": 2})
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
    worker = _worker()
    rotation, forward, sums = worker._pages.rotation, worker.forward, []
    table, choose = rotation.table, forward.choose

    def watching(batch: Any, reused: Any, difference: Any) -> Any:
        sums.append(float(difference.sum()))
        return choose(batch, reused, difference)

    def not_turned(old: Any, new: Any, zero: Any = None) -> Any:
        return table(old, new if turned else old, zero)

    with _set(rotation, table=not_turned), _set(forward, choose=watching):
        _ask(llm, request)
    return {"sum": sum(sums)}


def blend_trusting(llm: Any, requests: list[dict[str, Any]]) -> dict[str, Any]:
    """Control: blends requests whatever their salt."""
    from flexkv.adapters.vllm.blend import requests as module

    with _set(module, refusal=lambda request: None):
        side = llm.llm_engine.engine_core.engine_core.scheduler.connector.scheduler.blend
        side._remember = lambda salt: True
        try:
            return {"requests": [_ask(llm, request) for request in requests]}
        finally:
            del side._remember


def blend_selftest(llm: Any, broken: str = "") -> dict[str, Any]:
    """Runs the test of the engine's start again; the engine's own blocks must be free and unnamed.

    Args:
        broken: for a control, what is wrong: "mask" or "rows" of later layers that nobody writes.
    """
    from flexkv.adapters.vllm.blend.selftest import SelfTest

    worker = _worker()
    forward = worker.forward
    wrong: dict[str, Any] = {"mask": {"runs": _one_sequence(forward.runs)}, "rows": {"_put": lambda *a: None}}
    with _set(forward, **wrong.get(broken, {})):
        test = SelfTest(worker._model, forward, worker._model.blend_config, 129)
        return {"refusal": test.refusal()}


def blend_flip(llm: Any, pages: int) -> dict[str, Any]:
    """Flips a bit in the first so many pages of segments in host memory, and flips it back at the next call."""
    pool = _worker()._pages.cache.pool
    flipped = 0
    for slot in range(pool.ready_slots):
        if flipped < pages and pool.slot(slot).any():
            pool.slot(slot)[5] ^= 1
            flipped += 1
    return {"flipped": flipped}


def blend_held(llm: Any) -> dict[str, Any]:
    """What is held for requests: on the scheduler's side and on the worker's."""
    side = llm.llm_engine.engine_core.engine_core.scheduler.connector.scheduler.blend
    pages = _worker()._pages
    staging = pages.cache.staging
    return {
        "live": len(side._live),
        "pages": side._held_pages,
        "loads": len(pages._loads) + len(pages._captures) + len(pages._coming),
        "staged": staging.rows.shape[1] - len(staging.free),
    }


def blend_forget_salts(llm: Any) -> dict[str, Any]:
    """Forgets the salts, as a full table does with its oldest."""
    llm.llm_engine.engine_core.engine_core.scheduler.connector.scheduler.blend._salts.clear()
    return {}


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
    "blend_selftest": blend_selftest,
    "blend_held": blend_held,
    "blend_forget_salts": blend_forget_salts,
    "step_tokens": step_tokens,
}
