"""A scatter for layerwise loads: rotates the loaded keys to their positions in the prompt and writes them to their
slots, in one pass."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from flexkv.blend.rotation import ZERO_ROW, KeyRotation, RowPlaces, TurnTable
from flexkv.errors import GeometryError
from flexkv.transfer.layerwise.base import Array, LayerDevice, RowNumbers, RowPositions
from flexkv.transfer.layerwise.paged import PagedLayers


class TurnedScatter:
    """A `LayerScatter` of the layerwise pipeline that runs the rotation's fused kernel, on the CPU or a GPU.

    The constructor makes and checks all tables, and copies them to the device.

    Args:
        device: the device with the pipeline's buffers and the paged memory.
        positions: old and new position of each row, equal in every layer.
        paged: the planes of K and V of each layer; the elements of a head must be adjacent.
        slots: the slot in paged memory of each row, int64 [rows].

    Raises:
        GeometryError: the planes' strides are not supported, or the planes do not fit the rotation.
        BlockRangeError: a slot is outside the pool.
    """

    def __init__(
        self,
        device: LayerDevice,
        rotation: KeyRotation,
        positions: RowPositions,
        paged: PagedLayers,
        slots: RowNumbers,
    ) -> None:
        self._device, self._rotation = device, rotation
        rows = len(positions.new)
        head_bytes = rotation.row_bytes // rotation.heads
        if (paged.heads, paged.head_width) != (rotation.heads, rotation.spec.head_dim):
            raise GeometryError(
                f"paged memory has {paged.heads} heads of {paged.head_width}, the rotation {rotation.heads} of "
                f"{rotation.spec.head_dim}"
            )
        in_order = RowPlaces(np.arange(rows, dtype=np.int64) * rotation.row_bytes, head_bytes)
        tables = [rotation.table(positions.old, positions.new)]
        tables += [TurnTable.copies(rows)] * (paged.planes - 1)
        blocks, tokens = paged.split(slots)
        # This memory has the size of a plane in the pipeline's buffers, and serves only to check the tables.
        room = device.buffer((rows, paged.heads, paged.head_width), paged.dtype)
        self._targets: list[list[tuple[Array, RowPlaces]]] = []
        moved: dict[tuple[int, ...], RowPlaces] = {}
        for planes in paged.layers:
            self._targets.append([])
            for plane, table in zip(planes, tables, strict=True):
                strides = _byte_strides(plane)
                places = RowPlaces(blocks * strides[0] + tokens * strides[1], strides[2])
                window = _window(plane, strides)
                rotation.check(room, in_order, window, places, table)
                if strides not in moved:
                    moved[strides] = places.on(device)
                self._targets[-1].append((window, moved[strides]))
        self._in_order = in_order.on(device)
        self._tables = [table.on(device) for table in tables]

    def __call__(self, layer: int, rows: Array, gaps: Array) -> None:
        stream = self._device.current_stream()
        for number, (window, places) in enumerate(self._targets[layer]):
            table = _with_gaps(self._tables[number], gaps)
            self._rotation.apply(rows[number], self._in_order, window, places, table, stream=stream)


def _with_gaps(table: TurnTable, gaps: Array) -> TurnTable:
    """Returns the table, changed so that the rows `gaps` become zeros. On a GPU, the changed copy is made on the
    current stream.
    """
    if not len(gaps):
        return table
    of_row = table.of_row.copy() if isinstance(table.of_row, np.ndarray) else table.of_row.clone()
    of_row[gaps] = ZERO_ROW
    return TurnTable(of_row, table.turns)


def _byte_strides(plane: Array) -> tuple[int, ...]:
    """Returns the plane's strides in bytes: between blocks, tokens, heads and elements."""
    if isinstance(plane, np.ndarray):
        return plane.strides
    return tuple(stride * int(plane.itemsize) for stride in plane.stride())


def _window(plane: Array, strides: tuple[int, ...]) -> Any:
    """Returns a one-dimensional view of the plane's memory, from its first element to its last.

    Raises:
        GeometryError: the strides are negative or not multiples of an element, or a head's elements are not adjacent.
    """
    element = int(plane.itemsize)
    if min(strides) < 0 or strides[-1] != element or any(stride % element for stride in strides):
        raise GeometryError(
            f"a plane with strides of {strides} bytes: multiples of an element upwards, its heads in one piece"
        )
    last = sum((size - 1) * stride for size, stride in zip(plane.shape, strides, strict=True))
    count = last // element + 1 if math.prod(plane.shape) else 0
    if isinstance(plane, np.ndarray):
        return np.lib.stride_tricks.as_strided(plane, (count,), (element,))
    return plane.as_strided((count,), (1,))
