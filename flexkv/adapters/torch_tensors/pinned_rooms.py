"""Pinned staging buffers ("rooms") through which rows of a few layers at a time are copied from host memory to a
device's buffers."""

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
"""Name, for log lines, of the small pinned buffer that the CUDA driver uses to copy from memory that is not pinned.
Copies through this buffer are correct too, but the host waits in them until the device has read the data."""


@dataclass(slots=True)
class Room:
    """A staging buffer in host memory for the rows of one chunk in one layer.

    Attributes:
        memory: the buffer, a tensor [planes, tokens, heads, head_width].
        copied: recorded after the last copy from the buffer to the device; None before the first copy.
    """

    memory: torch.Tensor
    copied: TorchEvent | None = None


class PinnedMemory:
    """Allocates the staging buffers for all loads to a device. After the first failure to pin memory, all further
    buffers are in pageable memory.

    Args:
        device: the device that the loads copy to.
        pins: whether to pin the buffers; None to pin them unless the device is a CPU.

    Attributes:
        device: the device that the loads copy to.
    """

    def __init__(self, device: torch.device, pins: bool | None = None) -> None:
        self.device = device
        self._pins = device.type != "cpu" if pins is None else pins

    def take(self, rows: torch.Tensor) -> torch.Tensor:
        """Allocates host memory with the shape and dtype of `rows`, pinned if possible."""
        if self._pins:
            try:
                return torch.empty(rows.shape, dtype=rows.dtype, device="cpu", pin_memory=True)
            except RuntimeError as error:
                self._pins = False
                logger.warning("cached rows pass through %s, none is pinned: %s", PAGEABLE, error)
        return pageable(rows)


class PinnedRooms:
    """One load's staging buffers ("rooms"). Each chunk has `layers` rooms, which the layers use in turn.

    If memory cannot be pinned, or a room's last copy has not finished after `deadline_s`, rows are copied from pageable
    memory. After one such timeout, this load no longer waits for rooms.

    Args:
        memory: allocates the rooms.
        layers: number of layers that have separate rooms.
        deadline_s: largest number of seconds that a layer waits for a room. The copy from the room may have to wait for
            the caller's own work on the device, so a timeout is not an error: the rows are then copied from pageable
            memory.
    """

    def __init__(self, memory: PinnedMemory, layers: int, deadline_s: float) -> None:
        self._module: Any = torch.get_device_module(memory.device)
        self._memory, self._layers, self._wait_s = memory, layers, deadline_s
        self._rooms: dict[tuple[int, int], Room] = {}
        self._is_late = False
        """Whether a wait for a room has timed out."""

    def __call__(self, layer: int, sources: Sequence[RowSource]) -> list[RowSource]:
        """Wraps a layer's row sources, one per chunk, which fill host memory. The returned row sources fill the
        device's memory."""
        slot = layer % self._layers
        return [PinnedRows(self, (slot, number), source) for number, source in enumerate(sources)]

    def copy(self, key: tuple[int, int], source: RowSource, rows: torch.Tensor) -> None:
        """Enqueues a copy of a source's rows to `rows` on the current stream. `source` has filled host memory when this
        returns, but the copy to the device may still be in flight.

        Args:
            key: identifies the room: number of the layer's slot, and number of the chunk.
            source: fills host memory with the rows.
            rows: the target on the device.
        """
        room = self._free_room(key, rows)
        memory = pageable(rows) if room is None else room.memory
        source.copy_to(memory)
        # Each plane is copied separately, because a plane is contiguous in both memories. torch would copy tensors that
        # are not contiguous through memory that is not pinned.
        for to, plane in zip(rows, memory, strict=True):
            to.copy_(plane, non_blocking=True)
        if room is not None:
            native = self._module.Event()
            native.record(self._module.current_stream())
            room.copied = TorchEvent(native, "")

    def _free_room(self, key: tuple[int, int], rows: torch.Tensor) -> Room | None:
        """Waits until no copy from the room is in flight, and returns the room; None if that takes too long."""
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
            self._wait_s = 0.0  # the device lags behind, so every other room would take as long
        return None


def pageable(rows: torch.Tensor) -> torch.Tensor:
    """Allocates host memory with the shape and dtype of `rows` that is not pinned."""
    return torch.empty(rows.shape, dtype=rows.dtype, device="cpu")


@dataclass(frozen=True, slots=True)
class PinnedRows:
    """One chunk's rows of one layer. A `RowSource` that copies through a room."""

    rooms: PinnedRooms
    key: tuple[int, int]
    source: RowSource

    def copy_to(self, rows: torch.Tensor) -> None:
        self.rooms.copy(self.key, self.source, rows)
