"""Pinned memory through which rows of a few layers at a time pass from host memory to a device's buffers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flexkv.adapters.torch_tensors.device import TorchEvent
from flexkv.observe import get_logger
from flexkv.transfer.layerwise.base import RowSource

logger = get_logger(__name__)

PAGEABLE = "pageable memory"
"""The pinned buffer through which rows pass instead. A copy out of it is as right, but the host waits in it until the
device takes it."""


@dataclass(slots=True)
class Room:
    """Host memory for the rows of one chunk in one layer, on their way to a device's buffers.

    Attributes:
        memory: [planes, tokens, heads, head_width].
        copied: the end of the last copy out of it.
    """

    memory: torch.Tensor
    copied: TorchEvent | None = None


class PinnedMemory:
    """Host memory for the rooms of all loads of a device: PAGEABLE once memory could not be pinned.

    Args:
        pins: whether the device copies from pinned memory without the host; None: true unless the device is a CPU.

    Attributes:
        device: as given.
    """

    def __init__(self, device: torch.device, pins: bool | None = None) -> None:
        self.device = device
        self._pins = device.type != "cpu" if pins is None else pins

    def take(self, rows: torch.Tensor) -> torch.Tensor:
        """Memory of the size of `rows`."""
        if self._pins:
            try:
                return torch.empty(rows.shape, dtype=rows.dtype, device="cpu", pin_memory=True)
            except RuntimeError as error:
                self._pins = False
                logger.warning("cached rows pass through %s, none is pinned: %s", PAGEABLE, error)
        return pageable(rows)


class PinnedRooms:
    """One load's rooms: each chunk has one room for each of `layers` layers, which later layers reuse.

    If memory cannot be pinned, or a room's last copy has not ended after `deadline_s`, rows pass through PAGEABLE
    memory. After such a wait the load waits for no other room.

    Args:
        memory: memory for the device that the buffers are on.
        layers: how many layers have separate rooms.
        deadline_s: how long a layer waits for its rooms, in seconds. This includes the caller's own work on the device,
            for which the copy out of the room may wait; so a timeout leads to the fallback and never to an error.
    """

    def __init__(self, memory: PinnedMemory, layers: int, deadline_s: float) -> None:
        self._module: Any = torch.get_device_module(memory.device)
        self._memory, self._layers, self._wait_s = memory, layers, deadline_s
        self._rooms: dict[tuple[int, int], Room] = {}
        self._is_late = False
        """Whether a room's last copy has not ended in time."""

    def __call__(self, layer: int, sources: Sequence[RowSource]) -> list[RowSource]:
        """Sources of a layer's chunks for the device, from sources that fill host memory."""
        slot = layer % self._layers
        return [PinnedRows(self, (slot, number), source) for number, source in enumerate(sources)]

    def copy(self, key: tuple[int, int], source: RowSource, rows: torch.Tensor) -> None:
        """Copies a source's rows to `rows`, in the current stream, without waiting for the copy."""
        room = self._free_room(key, rows)
        memory = pageable(rows) if room is None else room.memory
        source.copy_to(memory)
        # Contiguous on both sides, because torch would copy others through memory that is not pinned.
        for to, plane in zip(rows, memory, strict=True):
            to.copy_(plane, non_blocking=True)
        if room is not None:
            native = self._module.Event()
            native.record(self._module.current_stream())
            room.copied = TorchEvent(native, "")

    def _free_room(self, key: tuple[int, int], rows: torch.Tensor) -> Room | None:
        """The chunk's room once no copy out of it is under way; None if that takes too long."""
        room = self._rooms.get(key)
        if room is None:
            room = self._rooms[key] = Room(self._memory.take(rows))
        if room.copied is None or room.copied.wait(self._wait_s):
            return room
        if not self._is_late:
            self._is_late = True
            logger.warning(
                "cached rows pass through %s: the copy before is not over after %g s", PAGEABLE, self._wait_s
            )
            self._wait_s = 0.0  # the device lags behind: each room would take as long again
        return None


def pageable(rows: torch.Tensor) -> torch.Tensor:
    """Memory of the size of `rows` that is not pinned."""
    return torch.empty(rows.shape, dtype=rows.dtype, device="cpu")


@dataclass(frozen=True, slots=True)
class PinnedRows:
    """One chunk's rows of one layer: a `RowSource`."""

    rooms: PinnedRooms
    key: tuple[int, int]
    source: RowSource

    def copy_to(self, rows: torch.Tensor) -> None:
        self.rooms.copy(self.key, self.source, rows)
