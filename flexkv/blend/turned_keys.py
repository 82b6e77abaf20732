"""The transform of a load whose keys move to other positions: rotates keys in the load's buffers."""

from __future__ import annotations

from typing import Any

import numpy as np

from flexkv.blend.rotation import KeyRotation, RowPlaces
from flexkv.transfer.layerwise.base import Array, LayerDevice, RowPositions
from flexkv.transfer.layerwise.chunks import ChunkSet


class TurnedKeys:
    """A `LayerTransform` of the layerwise pipeline that uses the rotation's kernel, on the CPU or a GPU.

    All tables are made and checked here, once, and are on the device from then on.

    Args:
        chunks: the load's chunks. Rows that no chunk covers are not changed.
        dtype: the dtype of the load's buffers on the device.

    Raises:
        GeometryError: the rotation has other dimensions or another dtype.
    """

    def __init__(self, device: LayerDevice, rotation: KeyRotation, chunks: ChunkSet, dtype: Any) -> None:
        self._device, self._rotation = device, rotation
        positions = chunks.positions()
        new = positions.new.copy()
        # Otherwise each position would be a separate rotation.
        new[chunks.gaps] = positions.old[chunks.gaps]
        table = rotation.table(positions.old, new)
        head_bytes = rotation.row_bytes // rotation.heads
        places = RowPlaces(np.arange(chunks.rows, dtype=np.int64) * rotation.row_bytes, head_bytes)
        # Memory of the size of a buffer's keys, on which the tables are checked.
        room = device.buffer((chunks.rows, rotation.heads, rotation.spec.head_dim), dtype)
        rotation.check(room, places, room, places, table)
        self._places, self._table = places.on(device), table.on(device)

    def __call__(self, layer: int, keys: Array, positions: RowPositions) -> None:
        stream = self._device.current_stream()
        self._rotation.apply(keys, self._places, keys, self._places, self._table, stream=stream)
