"""A blended forward pass reads its segments from disk in ranges of layers. The pass begins when the first layers are in
memory. If a later range of a segment is damaged or missing, the pass begins again without that segment.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from flexkv.adapters.vllm.blend import forward
from flexkv.adapters.vllm.blend import worker as module
from flexkv.adapters.vllm.blend.forward import BlendForward
from flexkv.adapters.vllm.blend.orders import Arrival, ChunkOrder, Reuse, SegmentOrder
from flexkv.adapters.vllm.blend.pages import BlendPages
from flexkv.adapters.vllm.blend.rows import BatchRows
from flexkv.adapters.vllm.blend.worker import BlendStep
from flexkv.blend.segment_load import SegmentLoad
from flexkv.observe import BlendResult, Counters
from tests import testing_ext
from tests.unit.blend.loaded_world import ROTATION, SHAPE
from tests.unit.blend.streamed_world import (
    FIRST,
    RANGES,
    SECOND,
    WITHIN_S,
    end,
    flip,
    open_cache,
    store_both,
    wait_for,
    with_hanging,
)

CHECK, LAST = 1, RANGES[-1]
FIRST_LAYERS = CHECK + 2
ROWS = 340
SPANS = (40, len(FIRST)), (200, len(SECOND))
WAIT_S = 0.5
LONG_WAIT_S = 10.0
AT_ONCE_S = 0.3
LOST = "flexkv_blend_lost_segments_total"
MISSED = "flexkv_blend_missed_pages_total"


class Attention(torch.nn.Module):
    """An attention layer that records the content of its slots: zeros for rows that the layer computed, else the cached
    rows that were written to them.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer_name, self.kv_cache = f"layer{number}", None
        self.pool = torch.full((2, ROWS, SHAPE.heads, SHAPE.head_dim), torch.nan)
        self.impl = SimpleNamespace(do_kv_cache_update=self.write)

    def write(self, attention: Any, keys: Any, values: Any, pool: Any, slots: Any) -> None:
        self.pool[0, slots], self.pool[1, slots] = keys, values

    def forward(self, query: Any, keys: Any, values: Any) -> Any:
        return query


class Layer:
    def __init__(self, number: int, world: World) -> None:
        self.self_attn = SimpleNamespace(attn=Attention(number))
        self._number, self._world = number, world

    def __call__(self, positions: Any, hidden: Any, residual: Any) -> tuple[Any, Any]:
        fresh = torch.zeros(len(hidden), SHAPE.heads, SHAPE.head_dim)
        self.self_attn.attn(hidden, fresh, fresh)
        self.self_attn.attn.pool[:, positions] = 0
        self._world.ran.append(self._number)
        self._world.runs(self._number)
        return hidden, hidden


class World:
    """One rank, whose model computes zeros. The slot of a row equals its position.

    Attributes:
        ran: the model's layers in the order in which they ran.
        runs: called with the layer's number when a layer ends.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        context = SimpleNamespace(slot_mapping={"layer0": torch.arange(ROWS)})
        group = SimpleNamespace(world_size=1)
        patch.setattr(forward, "get_forward_context", lambda: context)
        patch.setattr(forward, "override_forward_context", lambda context: contextlib.nullcontext())
        patch.setattr(forward, "get_tp_group", lambda: group)
        patch.setattr(module, "get_tp_group", lambda: group)
        patch.setattr(BlendForward, "_context", lambda self, context, batch, kept: context)
        at = np.arange(ROWS, dtype=np.int64)
        batch = BatchRows(np.array([0, ROWS], np.int64), at, at)
        patch.setattr(BlendForward, "batch", lambda self, positions: batch)
        self.ran: list[int] = []
        self.runs: Callable[[int], None] = lambda layer: None
        self.counters = Counters()

    def open(self, cache: Any, first_layers: int | None = FIRST_LAYERS) -> BlendPages:
        self.pages = BlendPages(cache, ROTATION, torch.float32, "cpu", self.counters, first_layers)
        self.pages.begin_load(SegmentOrder("r", 1, (FIRST, SECOND), ""))
        return self.pages

    def arrived(self, within_s: float = WITHIN_S) -> Arrival:
        found: dict[str, Arrival] = {}

        def has_arrived() -> bool:
            found.update(self.pages.take_arrived())
            return "r" in found

        wait_for(has_arrived, within_s)
        return found["r"]

    def blend(self, tokens: tuple[int, ...]) -> np.ndarray:
        """Runs the step's forward pass. Returns the content of the slots in all layers: [layers, 2, rows, heads,
        head_dim].
        """
        self.ran.clear()
        decoder = SimpleNamespace(
            embed_input_ids=lambda ids: ids[:, None].expand(-1, 8).float(),
            layers=[Layer(number, self) for number in range(SHAPE.layers)],
            norm=lambda hidden, residual: (hidden, residual),
        )
        blended = BlendForward(SimpleNamespace(model=decoder), None, CHECK)
        reuse = Reuse(tuple((first, count) for (first, _), count in zip(SPANS, tokens, strict=True)), 0.0)
        order = ChunkOrder("r", 0, np.arange(ROWS, dtype=np.int64), reuse)
        step = BlendStep(blended, self.pages, [order], self.counters)
        assert step.forward(torch.arange(ROWS), torch.arange(ROWS)) is not None
        return np.stack([attention.pool.numpy() for attention in blended.attentions])

    def count(self, name: str, label: str = "") -> float:
        return self.counters.data.get(name, {}).get(label, 0)

    def close(self) -> None:
        self.pages.release("r")
        cache = self.pages.cache

        def is_idle() -> bool:
            cache.poll()
            return not cache.busy

        wait_for(is_idle)
        device: Any = self.pages._rows_on.device
        assert device.close(WITHIN_S)
        end(cache)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    made = World(monkeypatch)
    yield made
    made.close()


@pytest.fixture
def at(tmp_path: Path) -> dict[tuple[int, int], int]:
    return store_both(tmp_path)


BOTH = len(FIRST), len(SECOND)


@pytest.fixture
def wanted(
    tmp_path: Path, at: object, monkeypatch: pytest.MonkeyPatch
) -> Callable[[tuple[int, ...]], np.ndarray]:
    """Returns a function that gives the correct result of a forward pass, computed by a rank that reads all layers
    first. `tokens` gives the number of tokens to use of each segment; 0 leaves the segment out.
    """

    def compute(tokens: tuple[int, ...] = BOTH) -> np.ndarray:
        alone = World(monkeypatch)
        alone.open(open_cache(tmp_path), None)
        assert alone.arrived().tokens == BOTH
        found = alone.blend(tokens)
        alone.close()
        return found

    return compute


def stalled(
    patch: pytest.MonkeyPatch, folder: Path, page: int, layer: int, wait_s: float = WITHIN_S
) -> tuple[Any, testing_ext.IoFaults]:
    return with_hanging(patch, page, layer, lambda: open_cache(folder, wait_s))


@pytest.mark.parametrize("first_layers", [FIRST_LAYERS, SHAPE.layers], ids=["", "control"])
def test_the_first_layers_are_used_while_the_last_range_is_being_read(
    world: World, at: Any, wanted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first_layers: int
) -> None:
    """The forward pass uses the first layers of a segment while the last range of layers is still being read. In the
    control, the pass begins only when all layers are in memory.
    """
    right = wanted()
    cache, faults = stalled(monkeypatch, tmp_path, at[1, 2], LAST)
    world.open(cache, first_layers)
    if first_layers == SHAPE.layers:
        with pytest.raises(AssertionError):
            world.arrived(AT_ONCE_S)
        faults.release()
        assert world.arrived().tokens == BOTH
        return
    assert world.arrived() == Arrival(1, BOTH)
    assert faults.wait_stalled(1, WITHIN_S)

    def runs(layer: int) -> None:
        if layer == LAST - 1:
            assert world.pages._loads["r"].moves, "the last range is still being read"
            faults.release()

    world.runs = runs
    assert np.array_equal(world.blend(BOTH), right)
    assert world.ran == list(range(SHAPE.layers))
    assert world.count(LOST) == 0


@pytest.mark.parametrize("layer", [0, 2, 3, 5])
def test_a_damaged_range_loses_its_segment_alone_and_leaves_no_wrong_row(
    world: World, at: Any, wanted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layer: int
) -> None:
    """If one range of layers is damaged, only its segment is lost, and no wrong row is left. The last range is read
    only after the first layers of the model have run.
    """
    without = wanted((len(FIRST), 0))
    assert not np.array_equal(without, wanted()), "the segment's rows are seen"
    flip(tmp_path, at[1, 1], layer)
    cache, faults = stalled(monkeypatch, tmp_path, at[1, 1], max(each for each in RANGES if each <= layer))
    world.open(cache)
    if layer < LAST:
        # A read that fails before the load begins makes the segment shorter, which is another case.
        wait_for(lambda: not world.pages.take_arrived() and "r" in world.pages._loads)
        faults.release()
    found = world.arrived()
    assert found.tokens == (BOTH if layer >= LAST else (len(FIRST), 0))
    assert layer >= LAST or found.missing is BlendResult.LOST
    world.runs = lambda ended: faults.release() if ended == LAST - 1 else None
    assert np.array_equal(world.blend(found.tokens), without)
    twice = list(range(LAST)) if layer >= LAST else []
    assert world.ran == [*twice, *range(SHAPE.layers)]
    assert world.count(LOST) == 1
    assert world.count(MISSED, "unreadable") == 3
    assert world.count("flexkv_blend_rows_total", "lost") == (len(SECOND) if layer >= LAST else 0)
    # In its next chunk or step, the request continues without the segment.
    assert np.array_equal(world.blend(found.tokens), without)
    assert world.ran == list(range(SHAPE.layers))


def test_control_a_forward_that_does_not_wait_for_its_layers_has_wrong_rows(
    world: World, at: Any, wanted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both, without = wanted(), wanted((len(FIRST), 0))
    flip(tmp_path, at[1, 1], LAST)
    cache, faults = stalled(monkeypatch, tmp_path, at[1, 1], LAST)
    world.open(cache)
    monkeypatch.setattr(SegmentLoad, "drop_lost", lambda *given: [])
    monkeypatch.setattr(SegmentLoad, "wait_layer", lambda *given: None)
    assert world.arrived().tokens == BOTH
    faults.release()
    wait_for(lambda: not world.pages._loads["r"].moves)
    found = world.blend(BOTH)
    assert not np.array_equal(found, both)
    assert not np.array_equal(found, without)


@pytest.mark.parametrize("layer", RANGES)
def test_a_read_that_hangs_ends_at_a_deadline_as_a_miss(
    world: World, at: Any, wanted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layer: int
) -> None:
    without = wanted((len(FIRST), 0))
    cache, faults = stalled(monkeypatch, tmp_path, at[1, 0], layer, WAIT_S)
    begun_s = time.monotonic()
    world.open(cache)
    found = world.arrived()
    if layer < LAST:
        assert (found.tokens, found.missing) == ((len(FIRST), 0), BlendResult.LATE)
    assert np.array_equal(world.blend(found.tokens), without)
    assert WAIT_S <= time.monotonic() - begun_s < WITHIN_S / 2
    assert world.count(MISSED, "late") == 3
    faults.release()


def test_what_fails_while_the_request_waits_for_its_turn_is_lost_before_its_forward(
    world: World, at: Any, wanted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = wanted((len(FIRST), 0))
    flip(tmp_path, at[1, 1], LAST)
    cache, faults = stalled(monkeypatch, tmp_path, at[1, 1], LAST)
    world.open(cache)
    assert world.arrived().tokens == BOTH
    faults.release()
    wait_for(lambda: not world.pages._loads["r"].moves)
    assert np.array_equal(world.blend(BOTH), without)
    assert world.ran == list(range(SHAPE.layers)), "it need not begin again"
