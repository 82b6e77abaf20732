"""Rotates cached keys from the positions at which they were computed to the positions at which they are needed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from flexkv.blend.rope import Frequencies, RopeSpec
from flexkv.c_ext import check_rotation, rotate_rows
from flexkv.errors import GeometryError
from flexkv.transfer.layerwise.base import Array, LayerDevice
from flexkv.transfer.stream import StreamLike, stream_address

ZERO_ROW = -1
"""Value of `TurnTable.of_row` for a row that becomes zeros."""
COPY_ROW = -2
"""Value of `TurnTable.of_row` for a row that is copied unchanged."""

NO_TURNS: NDArray[np.float32] = np.empty((0,), np.float32)


@dataclass(frozen=True, slots=True)
class RowPlaces:
    """The byte positions of rows in a contiguous tensor. A row consists of heads.

    Attributes:
        offsets: bytes from the tensor's start to each row, int64 [rows]. For `KeyRotation.apply`, this array must be in
            the same memory as the tensor (host or GPU).
        head_stride: bytes from one head of a row to the next.
    """

    offsets: Array
    head_stride: int

    def on(self, device: LayerDevice) -> RowPlaces:
        """Returns a copy of this object whose offsets are in the memory of `device`."""
        return RowPlaces(device.index(self.offsets), self.head_stride)


@dataclass(frozen=True, slots=True)
class TurnTable:
    """The rotation of each row of a batch of rows.

    Attributes:
        of_row: for each row its rotation, an index into `turns`, or ZERO_ROW or COPY_ROW; int32 [rows].
        turns: cosines and sines of each distinct rotation, float32 [rotations, 2, rotary_dim / 2].
    """

    of_row: Array
    turns: Array

    @classmethod
    def copies(cls, rows: int) -> TurnTable:
        """Returns a table that copies all rows unchanged, as needed for values."""
        return cls(np.full(rows, COPY_ROW, np.int32), NO_TURNS)

    def on(self, device: LayerDevice) -> TurnTable:
        """Returns a copy of this object whose arrays are in the memory of `device`."""
        return TurnTable(device.index(self.of_row), device.index(self.turns))


class KeyRotation:
    """The rotation of one model's keys.

    Each key is rotated once, by the angle between its old and its new position. This equals undoing the old rotation
    and applying the new one, but rounds once instead of twice. All rows of a segment move by the same distance, so a
    batch has few distinct rotations and a small table.

    Args:
        heads: number of KV heads.
        dtype: dtype of the keys: float32, bfloat16 or float16.
        frequencies: the model's own radians per position, [rotary_dim / 2]; None to compute them from `spec`.

    Raises:
        GeometryError: `frequencies` has a different shape.
    """

    def __init__(
        self, spec: RopeSpec, heads: int, dtype: str, frequencies: Frequencies | None = None
    ) -> None:
        self.spec = spec
        self.heads = heads
        self.dtype = dtype
        self.element_bytes = 4 if dtype == "float32" else 2
        self.frequencies = spec.frequencies() if frequencies is None else np.asarray(frequencies, np.float64)
        if self.frequencies.shape != (spec.rotary_dim // 2,):
            raise GeometryError(
                f"frequencies of shape {self.frequencies.shape}: expected is ({spec.rotary_dim // 2},)"
            )

    @property
    def row_bytes(self) -> int:
        """Bytes of a row without gaps between its heads."""
        return self.heads * self.spec.head_dim * self.element_bytes

    def table(
        self,
        old_positions: NDArray[np.int64],
        new_positions: NDArray[np.int64],
        zero: NDArray[np.bool_] | None = None,
    ) -> TurnTable:
        """Returns the table that rotates rows from old to new positions. A row whose position does not change is
        copied, bit for bit.

        Args:
            old_positions: the position at which each row was computed, int64 [rows].
            new_positions: the position at which each row is needed, int64 [rows].
            zero: whether each row becomes zeros instead, bool [rows]; None for no row.
        """
        distances, of_row = np.unique(new_positions - old_positions, return_inverse=True)
        angles = distances[:, None].astype(np.float64) * self.frequencies
        turns = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
        chosen = np.where(distances[of_row] == 0, COPY_ROW, of_row).astype(np.int32)
        if zero is not None:
            chosen[zero] = ZERO_ROW
        return TurnTable(chosen, np.ascontiguousarray(turns))

    def apply(
        self,
        source: object,
        source_places: RowPlaces,
        target: object,
        target_places: RowPlaces,
        table: TurnTable,
        *,
        stream: StreamLike = 0,
    ) -> None:
        """Rotates rows of `source` and writes them to `target` in one pass; see `flexkv.c_ext.rotate_rows`.

        The tensors must be contiguous and may be of any library; if both are the same tensor, rows are rotated in
        place. Values are copied by the same call with `TurnTable.copies`. All tensors and tables must be in host
        memory, or all on one GPU. On a GPU, the kernel is enqueued on `stream`, and the tables must have passed `check`
        before.
        """
        rotate_rows(
            *_arguments(source, source_places, target, target_places, table),
            **self._geometry(source_places, target_places),
            stream=stream_address(stream),
        )

    def check(
        self,
        source: object,
        source_places: RowPlaces,
        target: object,
        target_places: RowPlaces,
        table: TurnTable,
    ) -> None:
        """Checks arguments for `apply` without copying anything. For this check, the tables must be in host memory.

        Raises:
            GeometryError: dimensions, strides or dtypes are impossible, or source and target overlap.
            BlockRangeError: a row is outside its tensor, or its index in `of_row` is outside `turns`.
        """
        check_rotation(
            *_arguments(source, source_places, target, target_places, table),
            **self._geometry(source_places, target_places),
        )

    def _geometry(self, source: RowPlaces, target: RowPlaces) -> Geometry:
        return {
            "dtype": self.dtype,
            "pairing": self.spec.pairing,
            "heads": self.heads,
            "head_dim": self.spec.head_dim,
            "rotary_dim": self.spec.rotary_dim,
            "src_head_stride": source.head_stride,
            "dst_head_stride": target.head_stride,
        }


class Geometry(TypedDict):
    """The geometry of the rows of a rotation, as keyword arguments for the kernels."""

    dtype: str
    pairing: str
    heads: int
    head_dim: int
    rotary_dim: int
    src_head_stride: int
    dst_head_stride: int


def _arguments(
    source: object, source_places: RowPlaces, target: object, target_places: RowPlaces, table: TurnTable
) -> tuple[object, object, object, object, object, object]:
    return source, target, source_places.offsets, target_places.offsets, table.of_row, table.turns
