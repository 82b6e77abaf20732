"""An engine gets the rows of loaded segments rotated, layer by layer. The rows stay available until the load is
closed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from flexkv.blend.cache import SegmentCache
from flexkv.blend.turned_rows import RowDevice, TurnedLayers, TurnedRows
from flexkv.transfer.layerwise.base import PipelineError, RowSource
from flexkv.transfer.layerwise.host_device import HostDevice
from tests.unit.blend.loaded_world import (
    ROTATION,
    SHAPE,
    TOKENS,
    Rows,
    load_all,
    make_cache,
    planes_of,
    store_all,
    stretches_of,
    wanted,
)
from tests.unit.transfer.layerwise.layer_world import GENEROUS_S, ReorderingDevice


@pytest.fixture
def cache() -> Iterator[SegmentCache]:
    made = make_cache()
    yield made
    made.close()


@pytest.fixture(params=[True, False], ids=["one thread", "a thread for each stream"])
def host(request: pytest.FixtureRequest) -> Iterator[RowDevice]:
    device = HostDevice(one_thread=request.param)
    yield RowDevice(device, SHAPE.carrier)
    assert device.close(GENEROUS_S)


def take_rest(layers: TurnedLayers, first: int) -> None:
    for layer in range(first, SHAPE.layers):
        layers.leave()
        layers.layer(layer)


def taken(rows: TurnedRows, on: RowDevice, first: int = 0) -> list[Rows]:
    """Opens the rows and takes all layers from `first` on. Returns the keys and values of each layer."""
    layers, found = rows.open(on, first), []
    for layer in range(first, SHAPE.layers):
        keys, values = layers.layer(layer).view(np.float32)[:, rows.in_buffer]
        found.append((keys, values))
        layers.leave()
    layers.close()
    return found


def are_right(found: list[Rows], first: int = 0) -> bool:
    pairs = [(rows, wanted(first + number)) for number, rows in enumerate(found)]
    return all(np.abs(a[0] - b[0]).max() < 1e-5 and np.array_equal(a[1], b[1]) for a, b in pairs)


@pytest.mark.parametrize("first", range(SHAPE.layers))
def test_rows_are_turned_to_their_positions(cache: SegmentCache, host: RowDevice, first: int) -> None:
    store_all(cache)
    with closing(load_all(cache)) as load:
        found = taken(TurnedRows(cache, ROTATION, load, stretches_of(load)), host, first)
        assert len(found) == SHAPE.layers - first
        assert are_right(found, first)


def test_control_another_layers_rows_are_wrong(cache: SegmentCache, host: RowDevice) -> None:
    class Shifted(TurnedRows):
        def sources(self, layer: int) -> list[RowSource]:
            return super().sources(min(layer + 1, SHAPE.layers - 1))

    store_all(cache)
    with closing(load_all(cache)) as load:
        assert not are_right(taken(Shifted(cache, ROTATION, load, stretches_of(load)), host))


def test_control_a_layer_that_is_left_before_it_was_read_is_another_one(cache: SegmentCache) -> None:
    """The control: after `leave`, a layer's buffer is reused for a later layer, so a caller that still reads the buffer
    finds the later layer's rows.
    """
    device = HostDevice(one_thread=True)
    store_all(cache)
    with closing(load_all(cache)) as load:
        rows = TurnedRows(cache, ROTATION, load, stretches_of(load))
        layers = rows.open(RowDevice(device, SHAPE.carrier), 0)
        buffer = layers.layer(0)
        layers.leave()
        layers.layer(1)
        layers.close()
        assert np.array_equal(buffer.view(np.float32)[1, rows.in_buffer], wanted(2)[1])
    assert device.close(GENEROUS_S)


def test_a_released_load_is_an_error_and_no_row(cache: SegmentCache, host: RowDevice) -> None:
    store_all(cache)
    load = load_all(cache)
    rows = TurnedRows(cache, ROTATION, load, stretches_of(load))
    layers = rows.open(host, 0)
    layers.layer(0)
    load.close()
    with pytest.raises(PipelineError, match=r"cached rows of the model's layer [12]: .*was released"):
        take_rest(layers, 1)
    layers.close()


class Gate:
    """Makes TurnedRows with sources that wait: the sources for layer `layer` wait until `go_on` is set or, if `error`
    is given, raise it.
    """

    def __init__(self, layer: int, error: Exception | None = None) -> None:
        self.layer, self.error, self.go_on = layer, error, threading.Event()

    def rows(self, *given: Any) -> TurnedRows:
        gate = self

        class Gated(TurnedRows):
            def sources(self, layer: int) -> list[RowSource]:
                found = super().sources(layer)
                return [gate.pass_through(each) for each in found] if layer == gate.layer else found

        return Gated(*given)

    def pass_through(self, source: RowSource) -> RowSource:
        gate = self

        class Waiting:
            def copy_to(self, rows: Any) -> None:
                if gate.error is not None:
                    raise gate.error
                assert gate.go_on.wait(GENEROUS_S)
                source.copy_to(rows)

        return Waiting()


def test_a_source_that_fails_half_way_is_an_error(cache: SegmentCache, host: RowDevice) -> None:
    store_all(cache)
    with closing(load_all(cache)) as load:
        layers = Gate(2, OSError("gone")).rows(cache, ROTATION, load, stretches_of(load)).open(host, 0)
        for layer in (0, 1):
            layers.layer(layer)
            layers.leave()
        with pytest.raises(PipelineError, match="load of layer 2: OSError: gone"):
            layers.layer(2)
        layers.close()


def test_a_slow_source_is_waited_for(cache: SegmentCache, host: RowDevice) -> None:
    store_all(cache)
    gate = Gate(1)
    with closing(load_all(cache)) as load:
        threading.Timer(0.05, gate.go_on.set).start()
        assert are_right(taken(gate.rows(cache, ROTATION, load, stretches_of(load)), host))


def test_a_source_that_hangs_ends_the_wait_at_the_deadline(
    cache: SegmentCache, host: RowDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_all(cache)
    gate = Gate(1)
    with closing(load_all(cache)) as load:
        monkeypatch.setattr(cache, "deadline_s", 0.05)
        layers = gate.rows(cache, ROTATION, load, stretches_of(load)).open(host, 0)
        monkeypatch.undo()
        layers.layer(0)
        layers.leave()
        with pytest.raises(PipelineError, match=r"layer 1 was not there after 0\.05 s"):
            layers.layer(1)
        with pytest.raises(PipelineError, match="still moves"):
            layers.close()
        gate.go_on.set()


def test_a_close_that_does_not_wait(cache: SegmentCache, host: RowDevice) -> None:
    store_all(cache)
    gate = Gate(0)
    with closing(load_all(cache)) as load:
        layers = gate.rows(cache, ROTATION, load, stretches_of(load)).open(host, 0)
        with pytest.raises(PipelineError, match="still moves bytes after 0 s"):
            layers.close(wait=False)  # a close that waits would block until the test sets `go_on`
        gate.go_on.set()


def test_memory_is_that_of_two_layers(cache: SegmentCache) -> None:
    store_all(cache)
    device = ReorderingDevice(0)
    with closing(load_all(cache)) as load:
        rows = TurnedRows(cache, ROTATION, load, stretches_of(load))
        layers = rows.open(RowDevice(device, SHAPE.carrier), 0)
        layers.close()
    row, count = (
        (SHAPE.heads, SHAPE.head_dim),
        280,
    )  # rows for positions 40 to 319, including the gap between the ranges
    # The first buffer was for the check of the tables, and is free again. The other two hold one layer each.
    assert [buffer.shape for buffer in device.buffers] == [(count, *row), (2, count, *row), (2, count, *row)]


def test_a_damaged_page_loses_its_segment_alone(cache: SegmentCache) -> None:
    store_all(cache)
    free = len(cache.staging.free)
    cache.pool.slot(0)[3] ^= 1
    load = load_all(cache)
    cache.pool.slot(0)[3] ^= 1
    assert len(load.lost) == 1
    assert len(load.hits) == len(TOKENS) - 1
    (lost,) = load.lost
    assert lost not in [hit.segment for hit in load.hits]
    load.abandon()
    load.abandon()
    assert len(cache.staging.free) == free
    cache.manager.check_integrity()


def test_an_abandoned_load_gives_its_blocks_back_when_it_has_ended(
    cache: SegmentCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_all(cache)
    free = len(cache.staging.free)
    load = cache.begin_load(TOKENS)
    with monkeypatch.context() as late:
        late.setattr(cache.engine, "wait", lambda ticket, deadline_s: False)
        assert load.moves
        load.abandon()
        assert len(cache.staging.free) < free
    ends_s = time.monotonic() + 20.0
    while len(cache.staging.free) < free:
        assert time.monotonic() < ends_s
        cache.begin_load([None]).close()
        time.sleep(0.001)


def test_callers_share_no_segment(cache: SegmentCache) -> None:
    planes = planes_of(TOKENS[0])

    def layers(layer: int) -> tuple[np.ndarray, np.ndarray]:
        return planes[layer, 0], planes[layer, 1]

    cache.store(TOKENS[0], layers, ROTATION, caller="a")
    assert [len(cache.begin_load(TOKENS[:1], caller).hits) for caller in ("a", "b", "")] == [1, 0, 0]
    assert cache.scheme.keys(TOKENS[0], "a").whole.tolist() != cache.scheme.keys(TOKENS[0]).whole.tolist()


def test_what_is_forgotten_is_a_miss(cache: SegmentCache) -> None:
    store_all(cache)
    assert cache.cached_tokens(TOKENS[0]) == len(TOKENS[0])
    cache.forget()
    assert cache.cached_tokens(TOKENS[0]) == 0
    assert load_all(cache).hits == []
