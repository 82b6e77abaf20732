"""On their way from host memory to a device, rows are first copied to pinned buffers. There are buffers for a few
layers, which are reused.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from flexkv.adapters.torch_tensors.device import TorchDevice, TorchEvent
from flexkv.adapters.torch_tensors.pinned_rooms import PAGEABLE, PinnedMemory, PinnedRooms
from flexkv.blend.turned_rows import RowDevice, TurnedRows
from tests.unit.blend.loaded_world import ROTATION, SHAPE, load_all, make_cache, store_all, stretches_of

CPU = torch.device("cpu")
LAYERS, CHUNKS = 8, 3
SHORT_S, GENEROUS_S = 0.05, 60.0


class Source:
    """A source of rows that all hold one number. It records the buffers into which its rows are copied."""

    def __init__(self, value: float, seen: list[torch.Tensor], before: Callable[[], None]) -> None:
        self._value, self._seen, self._before = value, seen, before

    def copy_to(self, rows: torch.Tensor) -> None:
        self._before()
        self._seen.append(rows)
        rows.fill_(self._value)


class Copy:
    """An event that marks the end of a copy. The event counts as reached from its second query on."""

    def __init__(self, never: bool) -> None:
        self._never, self._asked = never, 0

    def record(self, stream: None) -> None:
        """Does nothing, because there is only one stream."""

    @property
    def ended(self) -> bool:
        return self._asked > 1 and not self._never

    def query(self) -> bool:
        self._asked += 1
        return self.ended


class Events:
    """Stands for torch's module for the device, and makes events.

    Args:
        never: whether no copy ever ends.
    """

    def __init__(self, never: bool = False) -> None:
        self._never = never
        self.made: list[Copy] = []

    def Event(self) -> Copy:
        self.made.append(Copy(self._never))
        return self.made[-1]

    def current_stream(self) -> None:
        """Returns nothing, because there is only one stream."""


def pass_layers(
    rooms: PinnedRooms, seen: list[torch.Tensor], before: Callable[[int], None] = lambda layer: None
) -> list[torch.Tensor]:
    """Passes the chunks of all layers through the buffers. Returns the device's rows in the order of layers and
    chunks.
    """
    out = []
    for layer in range(LAYERS):
        sources = [Source(10 * layer + n, seen, lambda layer=layer: before(layer)) for n in range(CHUNKS)]  # type: ignore[misc]
        for source in rooms(layer, sources):
            out.append(torch.empty(2, 5, 1, 4))
            source.copy_to(out[-1])
    return out


@pytest.mark.parametrize(
    ("layers", "rooms_used"), [(2, 2 * CHUNKS), (LAYERS, LAYERS * CHUNKS)], ids=["2", "control"]
)
def test_memory_is_that_of_so_many_layers(layers: int, rooms_used: int) -> None:
    seen: list[torch.Tensor] = []
    found = pass_layers(PinnedRooms(PinnedMemory(CPU), layers, SHORT_S), seen)
    assert len({rows.data_ptr() for rows in seen}) == rooms_used
    for number, rows in enumerate(found):
        assert (rows == 10 * (number // CHUNKS) + number % CHUNKS).all()


def early_fills(rooms: PinnedRooms) -> int:
    """Returns how many buffers are filled while the copy out of them is still in flight."""
    events, early, seen = Events(), [], list[torch.Tensor]()
    rooms._module = events

    def before(layer: int) -> None:
        last = len(events.made) - 2 * CHUNKS
        early.append(last >= 0 and not events.made[last].ended)

    pass_layers(rooms, seen, before)
    assert len({rows.data_ptr() for rows in seen}) == 2 * CHUNKS, "a fallback would be other memory"
    return sum(early)


def test_a_room_is_filled_again_once_its_copy_has_ended() -> None:
    assert early_fills(PinnedRooms(PinnedMemory(CPU), 2, GENEROUS_S)) == 0


def test_control_without_the_wait_it_is_filled_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TorchEvent, "wait", lambda event, deadline_s: True)
    assert early_fills(PinnedRooms(PinnedMemory(CPU), 2, GENEROUS_S)) == (LAYERS - 2) * CHUNKS


def test_rows_pass_through_pageable_memory_where_a_copy_does_not_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If a copy does not end, rows pass through pageable memory instead of pinned buffers. For all chunks of all
    layers, there is only one wait and only one warning.
    """
    wait, waits = TorchEvent.wait, list[float]()

    def note(event: TorchEvent, deadline_s: float) -> bool:
        waits.append(deadline_s)
        return wait(event, deadline_s)

    monkeypatch.setattr(TorchEvent, "wait", note)
    rooms, seen = PinnedRooms(PinnedMemory(CPU), 2, SHORT_S), list[torch.Tensor]()
    rooms._module = Events(never=True)
    found = pass_layers(rooms, seen)
    first = {rows.data_ptr() for rows in seen[: 2 * CHUNKS]}
    assert not first & {rows.data_ptr() for rows in seen[2 * CHUNKS :]}, "a copy out of it is in flight"
    for number, rows in enumerate(found):
        assert (rows == 10 * (number // CHUNKS) + number % CHUNKS).all()
    warning = f"cached rows pass through {PAGEABLE}: the copy before is not over after {SHORT_S:g} s"
    assert caplog.text.count(warning) == len(caplog.records) == 1
    assert waits == [SHORT_S] + [0.0] * ((LAYERS - 2) * CHUNKS - 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="memory can be pinned here")
@pytest.mark.parametrize("memories", [1, 2], ids=["of one device", "control"])
def test_rows_pass_through_pageable_memory_where_none_can_be_pinned(
    caplog: pytest.LogCaptureFixture, memories: int
) -> None:
    """If no memory can be pinned, rows pass through pageable memory. Two loads that share a `PinnedMemory` log one
    warning; in the control each load has its own, and there are two warnings.
    """
    made = [PinnedMemory(CPU, pins=True) for _ in range(memories)]
    for memory in (made[0], made[-1]):
        seen: list[torch.Tensor] = []
        found = pass_layers(PinnedRooms(memory, 2, SHORT_S), seen)
        assert len({rows.data_ptr() for rows in seen}) == 2 * CHUNKS, "as bounded"
        assert (found[-1] == 10 * (LAYERS - 1) + CHUNKS - 1).all()
    assert caplog.text.count(f"cached rows pass through {PAGEABLE}, none is pinned: ") == memories


def test_a_load_has_rooms_for_as_many_layers_as_it_prefetches() -> None:
    """A load has pinned buffers for as many layers as it prefetches. It prefetches fewer layers than it loads."""
    cache = make_cache()
    store_all(cache)
    made: list[PinnedRooms] = []

    def rooms(layers: int, deadline_s: float) -> PinnedRooms:
        assert (layers, deadline_s) == (cache.prefetch_layers, cache.deadline_s)
        made.append(PinnedRooms(PinnedMemory(CPU), layers, deadline_s))
        return made[-1]

    load = load_all(cache)
    stretches = stretches_of(load)
    layers = TurnedRows(cache, ROTATION, load, stretches).open(
        RowDevice(TorchDevice(CPU), torch.float32, rooms), 0
    )
    for layer in range(SHAPE.layers):
        layers.layer(layer)
        layers.leave()
    layers.close()
    load.close()
    cache.close()
    assert len(made[0]._rooms) == 2 * len(stretches) < SHAPE.layers * len(stretches)
