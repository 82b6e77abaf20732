"""Inspects an engine's blended forward passes. It records each layer's keys and values, and on each rank compares them
with those of a full computation.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

from demo.engine_child import RequestTracker

from .broken_mask import one_sequence_of


def blend_worker() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group().worker.blend


def ask_engine(llm: Any, request: dict[str, Any]) -> dict[str, Any]:
    tracker = RequestTracker(llm)
    tracker.add(f"b{time.monotonic_ns()}", request)
    while tracker.step():
        pass
    (result,) = tracker.results()
    return result


@contextlib.contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


class Watch:
    """Records the keys and values that each layer's attention gets, the positions of the kept rows, and the number of
    runs in which attention processes these rows.
    """

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
        """Returns the keys and values of each layer. Joins those of all forward passes since the recording began."""
        import torch

        return [
            (torch.cat(keys), torch.cat(values)) for keys, values in zip(self.keys, self.values, strict=True)
        ]


class Oracle:
    """Keeps one rank's keys and values of a full computation. Then measures how far the kept rows' keys of a blended
    computation are from these.
    """

    def __init__(self) -> None:
        self._blend = blend_worker()
        self._forward = self._blend.forward
        self._watch = Watch(self._forward)
        self._broken = contextlib.ExitStack()
        self._planes: list[tuple[Any, Any]] = []

    def begin(self) -> None:
        self._watch.__enter__()

    def end_full(self) -> None:
        """Ends the recording of the full computation. Keeps the recorded keys and values."""
        self._watch.__exit__()
        self._planes = self._watch.planes()

    def store(self, ids: list[int], spans: list[list[int]]) -> None:
        """Stores the rows of the full computation as segments. Blending the prompt with these segments gives the exact
        result."""
        cache, rotation = self._blend._pages.cache, self._blend._pages.rotation
        for first, end in spans:

            def rows(layer: int, at: slice = slice(first, end)) -> tuple[Any, Any]:
                keys, values = (plane[at].transpose(0, 1).contiguous() for plane in self._planes[layer])
                return keys, values

            stored = cache.store(np.asarray(ids[first:end], np.int64), rows, rotation, first)
            assert stored == end - first

    def begin_blend(
        self, share: float, one_sequence: bool, loaded: bool, another_layer: bool, check_layer: int | None
    ) -> None:
        """Begins to record a blended computation. Its kept rows are chosen at random, the same rows on every rank.

        Args:
            share: the probability with which a reused row is kept.
            one_sequence: for a control, see `one_sequence_of`.
            loaded: whether the cached rows are those that the rank loads; otherwise those of the full computation.
            another_layer: for a control, gives each layer after the check layer the loaded rows of the layer before it.
            check_layer: the layer up to which all rows are computed; None for the engine's own.
        """
        from flexkv.adapters.vllm.blend.pages import segment_rows
        from flexkv.adapters.vllm.blend.selftest import KnownRows
        from flexkv.blend.turned_rows import TurnedRows

        random = np.random.default_rng(3)

        def rows(request: str, spans: Any, first: int, end: int) -> KnownRows:
            return KnownRows(self._planes, first + segment_rows(spans, first, end))

        def choose(batch: Any, reused: Any, difference: Any) -> Any:
            keep = np.ones(batch.rows, np.bool_)
            for covered, _ in reused:
                keep[covered] = random.random(len(covered)) < share
            keep[batch.last] = True
            return keep

        forward, pages = self._forward, self._blend._pages
        runs = one_sequence_of(forward.runs) if one_sequence else forward.runs
        self._broken.enter_context(replaced(pages, rows=pages.rows if loaded else rows))
        self._broken.enter_context(replaced(forward, choose=choose, runs=runs))
        if check_layer is not None:
            self._broken.enter_context(replaced(forward, check_layer=check_layer))
        self._check_layer = forward.check_layer
        if another_layer:
            of_layer = TurnedRows.sources

            def sources(rows: TurnedRows, layer: int) -> Any:
                return of_layer(rows, max(layer - 1, forward.check_layer))

            self._broken.enter_context(replaced(TurnedRows, sources=sources))
        self._watch = Watch(forward)
        self.begin()

    def end_blend(self) -> dict[str, Any]:
        """Ends the recording of the blended computation. Returns three results: the largest error in the keys of its
        kept rows, over all layers after the check layer; the positions of these rows; and facts that differ between
        ranks.
        """
        self._watch.__exit__()
        self._broken.close()
        some, forward = self._watch, self._forward
        kept = np.concatenate(some.kept)
        worst = 0.0
        for layer in range(self._check_layer + 1, len(forward.layers)):
            fresh = np.concatenate([keys.numpy() for keys in some.keys[layer][: len(some.kept)]])
            wanted = self._planes[layer][0].numpy()[kept]
            worst = max(worst, float(np.abs(fresh - wanted).max()))
        return {
            "worst": worst,
            "kept": kept.tolist(),
            "runs": sum(some.runs),
            "heads": int(self._planes[0][0].shape[1]),
            "sum": float(self._planes[-1][0].sum()),
        }

    # --- rows that the engine captures for segments ---

    def break_captures(self, wrong: str) -> None:
        """A control: from this call on, captures rows wrongly; see `blend_captured`."""
        pages, layers = self._blend._pages, len(self._forward.layers)
        of_capture = pages.capture

        def capture(request: str, layer: int, first: int, planes: Any) -> None:
            if wrong == "row before" and first:
                first -= 1
            elif wrong == "values":
                planes = planes[1], planes[1]
            elif wrong == "another layer":
                layer = (layer + 1) % layers
            of_capture(request, layer, first, planes)

        self._broken.enter_context(replaced(pages, capture=capture))

    def mend(self) -> None:
        self._broken.close()

    def kept_apart(self, ids: list[int]) -> dict[str, float]:
        """Loads a cached segment. Returns the largest distance of its keys from those of the full computation, and the
        same for its values.
        """
        from flexkv.adapters.vllm.blend.orders import SegmentOrder

        pages, name = self._blend._pages, "the oracle's own"
        pages.begin_load(SegmentOrder(name, 0, (np.asarray(ids, np.int64),), ""))
        ends_s = time.monotonic() + 30.0
        while name not in (arrived := pages.take_arrived()):
            if time.monotonic() > ends_s:
                raise TimeoutError("the segment's pages are still on their way")
            time.sleep(0.001)
        assert arrived[name].tokens == (len(ids),)
        layers = pages.rows(name, [(0, len(ids))], 0, len(ids)).open(0)
        worst = [0.0, 0.0]
        try:
            for layer, wanted in enumerate(self._planes):
                for plane, found in enumerate(layers.take(layer)):
                    apart = float((found - wanted[plane]).abs().max())
                    worst[plane] = apart if not apart <= worst[plane] else worst[plane]
        finally:
            layers.close()
            pages.release(name)
        return {"keys": worst[0], "values": worst[1]}

    # --- rows that the engine keeps when it blends ---

    def begin_kept(self, alone: bool) -> None:
        """Begins to record the kept rows; see `blend_kept`."""
        from flexkv.adapters.vllm.blend import forward as module

        forward = self._forward
        of_keep = forward._keep

        def keep(*given: Any) -> Any:
            with replaced(module, get_tp_group=lambda: SimpleNamespace(world_size=1)):
                return of_keep(*given)

        if alone:
            self._broken.enter_context(replaced(forward, _keep=keep))
        self._watch = Watch(forward)
        self.begin()

    def end_kept(self) -> list[int]:
        self._watch.__exit__()
        self._broken.close()
        return np.concatenate(self._watch.kept).tolist()


_oracles: list[Oracle] = []
"""The oracle of this rank's process, in a list; the list is empty until the oracle is made."""


def rank_oracle(worker: Any, step: str, *given: Any) -> Any:
    """Runs in each rank: calls one method of the rank's oracle.

    Args:
        worker: vLLM's worker; vLLM passes it, and this function does not use it.
        step: the method's name. "begin" and "begin_kept" make a new oracle first.
    """
    if step in ("begin", "begin_kept"):
        _oracles[:] = [Oracle()]
    return getattr(_oracles[0], step)(*given)
