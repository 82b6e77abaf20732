"""A transform for layerwise loads: rotates the loaded keys, in the load's buffers, to their positions in the prompt."""

from __future__ import annotations

from typing import Any

import numpy as np

from flexkv.blend.rotation import KeyRotation, RowPlaces
from flexkv.transfer.layerwise.base import Array, LayerDevice, RowPositions
from flexkv.transfer.layerwise.chunks import ChunkSet


class TurnedKeys:
    """A `LayerTransform` of the layerwise pipeline that runs the rotation's kernel, on the CPU or a GPU.

    The constructor makes and checks all tables, and copies them to the device.

    Args:
        device: the device with the load's buffers.
        chunks: the load's chunks. Rows that no chunk covers are not changed.
        dtype: the dtype of the load's buffers on the device.

    Raises:
        GeometryError: the rotation does not fit the buffers' dtype.
    """

    def __init__(self, device: LayerDevice, rotation: KeyRotation, chunks: ChunkSet, dtype: Any) -> None:
        self._device, self._rotation = device, rotation
        positions = chunks.positions()
        new = positions.new.copy()
        # Rows in gaps keep their positions, so that they need no rotation. Otherwise each of them might need a
        # different rotation.
        new[chunks.gaps] = positions.old[chunks.gaps]
        table = rotation.table(positions.old, new)
        head_bytes = rotation.row_bytes // rotation.heads
        places = RowPlaces(np.arange(chunks.rows, dtype=np.int64) * rotation.row_bytes, head_bytes)
        # This memory has the size of a buffer's keys, and serves only to check the tables.
        room = device.buffer((chunks.rows, rotation.heads, rotation.spec.head_dim), dtype)
        rotation.check(room, places, room, places, table)
        self._places, self._table = places.on(device), table.on(device)

    def __call__(self, layer: int, keys: Array, positions: RowPositions) -> None:
        stream = self._device.current_stream()
        self._rotation.apply(keys, self._places, keys, self._places, self._table, stream=stream)
