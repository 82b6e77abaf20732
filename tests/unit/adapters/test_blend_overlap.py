"""While the model's layers run, the layerwise pipeline copies the cached rows of a blended forward pass."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from flexkv.adapters.torch_tensors.device import TorchDevice
from flexkv.adapters.torch_tensors.pinned_rooms import PinnedMemory, PinnedRooms
from flexkv.adapters.vllm.blend import forward
from flexkv.adapters.vllm.blend.forward import BlendForward
from flexkv.adapters.vllm.blend.forward_rows import ReusedRows
from flexkv.adapters.vllm.blend.loaded_rows import LoadedLayers, LoadedRows, device_of
from flexkv.adapters.vllm.blend.rows import BatchRows
from flexkv.blend.cache import SegmentCache
from flexkv.blend.segment_load import SegmentLoad
from flexkv.blend.turned_rows import RowDevice, TurnedRows
from flexkv.transfer.layerwise.base import Event, PipelineError, RowSource
from flexkv.transfer.layerwise.host_device import HostDevice, HostEvent
from flexkv.transfer.layerwise.load import LoadPipeline
from tests.unit.blend.loaded_world import (
    ROTATION,
    SHAPE,
    load_all,
    make_cache,
    store_all,
    stretches_of,
    wanted,
)
from tests.unit.transfer.layerwise.layer_world import GENEROUS_S, ReorderingDevice

CHECK = 1
ROWS = 340
"""Number of the prompt's rows, all in one chunk. The cached stretches are at rows 40 to 59 and 300 to 319."""

CPU = torch.device("cpu")


class Attention(torch.nn.Module):
    """An attention layer whose fresh keys are zeros. It records the rows that are written to the slots."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer_name, self.kv_cache = f"layer{number}", None
        self.written = torch.full((2, ROWS, SHAPE.heads, SHAPE.head_dim), torch.nan)
        self.impl = SimpleNamespace(do_kv_cache_update=self.write)

    def write(self, attention: Any, keys: Any, values: Any, pool: Any, slots: Any) -> None:
        assert attention is self
        self.written[0, slots], self.written[1, slots] = keys, values

    def forward(self, query: Any, keys: Any, values: Any) -> Any:
        return query


class Layer:
    def __init__(self, number: int, runs: Callable[[int], None]) -> None:
        self.self_attn = SimpleNamespace(attn=Attention(number))
        self._number, self._runs = number, runs

    def __call__(self, positions: Any, hidden: Any, residual: Any) -> tuple[Any, Any]:
        fresh = torch.zeros(len(hidden), SHAPE.heads, SHAPE.head_dim)
        self.self_attn.attn(hidden, fresh, fresh)
        self._runs(self._number)
        return hidden, hidden


class Copies(TurnedRows):
    """Cached rows that record which layers' copies have begun.

    Attributes:
        shown: returns, for a layer, the layer whose rows are copied in its place. By default, it returns the same
            layer.
        before: called with the layer in the copying stream, before the layer is copied.
    """

    shown: Callable[[int], int] = staticmethod(lambda layer: layer)
    before: Callable[[int], None] = staticmethod(lambda layer: None)

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.begun = [threading.Event() for _ in range(SHAPE.layers)]

    def sources(self, layer: int) -> list[RowSource]:
        rows = self

        class Noted:
            def __init__(self, source: RowSource) -> None:
                self.source = source

            def copy_to(self, to: Any) -> None:
                rows.begun[layer].set()
                rows.before(layer)
                self.source.copy_to(to)

        return [Noted(source) for source in super().sources(self.shown(layer))]


@pytest.fixture
def cache() -> Iterator[SegmentCache]:
    made = make_cache()
    store_all(made)
    yield made
    made.close()


@pytest.fixture
def load(cache: SegmentCache) -> Iterator[SegmentLoad]:
    found = load_all(cache)
    yield found
    found.close()


@pytest.fixture
def copies(cache: SegmentCache, load: SegmentLoad) -> Copies:
    return Copies(cache, ROTATION, load, stretches_of(load))


@pytest.fixture
def host() -> Iterator[RowDevice]:
    found = device_of(CPU, torch.float32)
    assert isinstance(found.device, HostDevice)
    yield found
    assert found.device.close(GENEROUS_S)


@pytest.fixture
def blending(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], None]], BlendForward]:
    """Returns a function that makes a forward pass. The function's argument is called after the attention of each
    layer, with the layer's number.
    """
    slots = torch.arange(ROWS)
    context = SimpleNamespace(slot_mapping={"layer0": slots})
    monkeypatch.setattr(forward, "get_forward_context", lambda: context)
    monkeypatch.setattr(forward, "override_forward_context", lambda context: contextlib.nullcontext())
    monkeypatch.setattr(forward, "get_tp_group", lambda: SimpleNamespace(world_size=1))
    monkeypatch.setattr(BlendForward, "_context", lambda self, context, batch, kept: context)

    def make(runs: Callable[[int], None]) -> BlendForward:
        decoder = SimpleNamespace(
            embed_input_ids=lambda ids: ids[:, None].expand(-1, 8).float(),
            layers=[Layer(number, runs) for number in range(SHAPE.layers)],
            norm=lambda hidden, residual: (hidden, residual),
        )
        return BlendForward(SimpleNamespace(model=decoder), None, CHECK)

    return make


def run(blended: BlendForward, rows: TurnedRows, on: RowDevice, ratio: float = 0.0, requests: int = 1) -> Any:
    """Runs the forward pass. Returns, for each row of the batch, whether the pass computed the row in all layers."""
    at = np.arange(ROWS, dtype=np.int64)
    batch = BatchRows(np.array([0, ROWS], np.int64), at, at)
    covered = rows.in_buffer + 40
    source = LoadedRows(rows, on, torch.float32, CPU)
    reused = [ReusedRows(covered, source, ratio) for _ in range(requests)]
    _, keep = blended.run(torch.arange(ROWS), torch.arange(ROWS), batch, reused)
    return keep


def written(blended: BlendForward, layer: int) -> Any:
    return blended.attentions[layer].written.numpy()


def nothing(layer: int) -> None:
    pass


def off_by(blended: BlendForward, rows: TurnedRows, skipped: Any) -> float:
    """Returns the largest difference between the pool's content and the expected keys and values of the skipped
    rows.
    """
    worst = 0.0
    for layer in range(CHECK + 1, SHAPE.layers):
        slots = rows.in_buffer[skipped] + 40
        others = np.setdiff1d(np.arange(ROWS), slots)
        assert np.isnan(written(blended, layer)[:, others]).all(), "kept rows are the layer's"
        for plane, found in zip(wanted(layer), written(blended, layer)[:, slots], strict=True):
            worst = max(worst, float(np.abs(found - plane[skipped]).max()))
    return worst


@pytest.mark.parametrize("on", ["host", "torch"])
@pytest.mark.parametrize("ratio", [0.0, 0.4])
def test_the_pool_gets_each_layers_skipped_rows(
    blending: Any, copies: Copies, host: RowDevice, ratio: float, on: str
) -> None:
    blended = blending(nothing)
    device = (
        host
        if on == "host"
        else RowDevice(TorchDevice("cpu"), torch.float32, partial(PinnedRooms, PinnedMemory(CPU)))
    )
    keep = run(blended, copies, device, ratio)
    skipped = np.flatnonzero(~keep[copies.in_buffer + 40])
    assert len(skipped) == round((1 - ratio) * len(copies.in_buffer))
    assert off_by(blended, copies, skipped) < 1e-5
    assert all(np.isnan(written(blended, layer)).all() for layer in range(CHECK + 1))
    assert not copies.begun[0].is_set(), "layers before the check layer compute all rows"


def test_control_a_pipeline_that_gives_another_layers_rows_is_seen(
    blending: Any, copies: Copies, host: RowDevice
) -> None:
    copies.shown = lambda layer: max(CHECK, layer - 1)  # type: ignore[method-assign]
    blended = blending(nothing)
    run(blended, copies, host)
    assert off_by(blended, copies, np.arange(len(copies.in_buffer))) > 0.1


def test_control_a_layer_that_is_left_before_its_rows_are_taken_is_seen(
    blending: Any, copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a control, the forward pass releases a layer's buffer before it has copied the layer's rows from the buffer,
    so the pipeline fills the buffer with rows of a later layer. The check of the pool must notice this.
    """

    def too_early(self: LoadedLayers, layer: int) -> Any:
        buffer = self._tensor(self._layers.layer(layer))
        self._layers.leave()
        assert self._layers._pipeline.quiet(GENEROUS_S)
        keys, values = buffer.index_select(1, self._at)
        return keys, values

    monkeypatch.setattr(LoadedLayers, "take", too_early)
    blended = blending(nothing)
    device = HostDevice()
    run(blended, copies, RowDevice(device, SHAPE.carrier))
    assert device.close(GENEROUS_S)
    assert off_by(blended, copies, np.arange(len(copies.in_buffer))) > 0.1


def seen_in(layer: int) -> list[int]:
    """Returns the layers whose copies have begun by the time the given layer of the model ends."""
    return [each for each in range(max(layer, CHECK), layer + 3) if each < SHAPE.layers]


def test_the_next_layers_are_copied_while_a_layer_of_the_model_runs(
    blending: Any, copies: Copies, host: RowDevice
) -> None:
    """When a layer of the model ends, the copies of the next two layers have already begun, although nothing has waited
    for them.
    """

    def runs(layer: int) -> None:
        if layer > CHECK:
            assert all(copies.begun[each].wait(GENEROUS_S) for each in seen_in(layer))

    run(blending(runs), copies, host)
    assert all(each.is_set() for each in copies.begun[CHECK:])


def test_the_check_layer_is_copied_while_layers_before_it_run(
    blending: Any, copies: Copies, host: RowDevice
) -> None:
    def runs(layer: int) -> None:
        if layer <= CHECK:
            assert copies.begun[CHECK].wait(GENEROUS_S)
            assert copies.begun[CHECK + 1].wait(GENEROUS_S)

    run(blending(runs), copies, host)


def test_control_a_device_that_works_only_when_awaited_copies_nothing_ahead(
    blending: Any, copies: Copies
) -> None:
    ahead: list[bool] = []
    blended = blending(
        lambda layer: ahead.append(layer + 2 < SHAPE.layers and copies.begun[layer + 2].is_set())
    )
    device = ReorderingDevice(0)
    run(blended, copies, RowDevice(device, SHAPE.carrier))
    assert off_by(blended, copies, np.arange(len(copies.in_buffer))) < 1e-5
    assert not all(ahead[CHECK:-2])


def test_a_source_that_fails_at_the_check_layer_has_all_rows_computed(
    blending: Any, copies: Copies, host: RowDevice, caplog: pytest.LogCaptureFixture
) -> None:
    """If the source fails at the check layer, the forward pass computes all rows. This is still possible, because all
    layers up to the check layer have computed all rows.
    """

    def fail(layer: int) -> None:
        raise OSError("gone")

    copies.before = fail  # type: ignore[method-assign]
    blended = blending(nothing)
    assert run(blended, copies, host, requests=2).all()
    assert all(np.isnan(written(blended, layer)).all() for layer in range(SHAPE.layers))
    assert caplog.text.count("all rows of a step are computed: cached rows of the model's layer 1") == 1
    copies.before = lambda layer: None  # type: ignore[method-assign]
    again = blending(nothing)
    run(again, copies, host)
    assert off_by(again, copies, np.arange(len(copies.in_buffer))) < 1e-5


@pytest.mark.parametrize("layer_of_fault", [CHECK + 2, SHAPE.layers - 1])
def test_a_source_that_fails_ends_the_forward_and_leaves_nothing_open(
    blending: Any, copies: Copies, host: RowDevice, layer_of_fault: int
) -> None:
    def fail(layer: int) -> None:
        if layer == layer_of_fault:
            raise OSError("gone")

    copies.before = fail  # type: ignore[method-assign]
    ran: list[int] = []
    with pytest.raises(
        PipelineError, match=f"cached rows of the model's layer {layer_of_fault}: .*OSError: gone"
    ):
        run(blending(ran.append), copies, host, requests=2)
    assert max(ran) == layer_of_fault - 1, "no layer of the model ran without its rows"
    copies.before = lambda layer: None  # type: ignore[method-assign]
    again = blending(nothing)
    run(again, copies, host)
    assert off_by(again, copies, np.arange(len(copies.in_buffer))) < 1e-5, (
        "the device serves the next forward"
    )


def note_quiet(patch: pytest.MonkeyPatch, waits: list[float]) -> None:
    """Makes each close of a pipeline append to `waits` the longest time that the close may wait."""
    of_pipeline = LoadPipeline.precede_caller

    def precede_caller(self: LoadPipeline, deadline_s: float) -> bool:
        waits.append(deadline_s)
        return of_pipeline(self, deadline_s)

    patch.setattr(LoadPipeline, "precede_caller", precede_caller)


def test_a_source_that_hangs_holds_a_forward_up_for_two_deadlines_at_most(
    blending: Any, copies: Copies, cache: SegmentCache, host: RowDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A source that hangs delays a forward pass by at most two deadlines. The pass waits once for the layer, and once
    to close all pipelines. After the first pipeline's close has used up the deadline, the close of the second does not
    wait.
    """
    go_on = threading.Event()
    waits: list[float] = []

    def hang(layer: int) -> None:
        assert layer <= CHECK + 1 or go_on.wait(GENEROUS_S)

    note_quiet(monkeypatch, waits)
    copies.before = hang  # type: ignore[method-assign]
    with monkeypatch.context() as short:
        short.setattr(cache, "deadline_s", 0.05)
        with pytest.raises(PipelineError, match=r"still moves bytes after 0\.05 s"):
            run(blending(nothing), copies, host, requests=2)
    assert waits == [0.05, 0.0]
    go_on.set()


class BusyGpu(HostDevice):
    """A device with streams, for which the host does not wait. The caller's own work on the device ends only when a
    test ends it.

    Attributes:
        before_caller: the events for which the caller's next work waits.
    """

    def __init__(self) -> None:
        super().__init__(one_thread=False)
        self.before_caller: list[Event] = []
        self.ends = HostEvent()

    def caller_event(self) -> Event:
        return self.ends

    def caller_waits(self, event: Event, deadline_s: float) -> bool:
        self.before_caller.append(event)
        return True


@pytest.mark.parametrize("on_the_host", [False, True], ids=["on its stream", "control"])
def test_the_engines_own_work_on_a_gpu_does_not_count_as_a_late_copy(
    blending: Any, copies: Copies, cache: SegmentCache, monkeypatch: pytest.MonkeyPatch, on_the_host: bool
) -> None:
    """On a GPU, the engine's own unfinished work does not count as a late copy. The last copies wait for buffers that
    earlier layers of the model still read. When the pipeline is closed, those layers are enqueued but have not run yet.
    """
    device = BusyGpu()
    monkeypatch.setattr(cache, "deadline_s", 0.05)
    if on_the_host:
        monkeypatch.setattr(LoadPipeline, "precede_caller", LoadPipeline.quiet)
    try:
        with pytest.raises(PipelineError, match="still moves") if on_the_host else contextlib.nullcontext():
            run(blending(nothing), copies, RowDevice(device, SHAPE.carrier))
        if not on_the_host:
            ended = [event for event in device.before_caller if event.wait(0.0)]
            assert len(ended) < len(device.before_caller), "the engine's next work comes after all of it"
            last = [event for event in device.before_caller[-SHAPE.layers :] if not event.wait(0.0)]
            assert last, "the stages of the last layers among it"
    finally:
        device.ends.reach("")
        assert device.close(GENEROUS_S)
    assert all(event.wait(0.0) for event in device.before_caller)
