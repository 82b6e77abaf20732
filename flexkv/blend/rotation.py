"""Turns cached keys from the positions at which they were computed to those at which they are needed."""

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
"""A value of `of_row` that writes zeros instead of turning the row."""
COPY_ROW = -2
"""A value of `of_row` that copies the row unchanged."""

NO_TURNS: NDArray[np.float32] = np.empty((0,), np.float32)


@dataclass(frozen=True, slots=True)
class RowPlaces:
    """Where rows of heads lie in a contiguous tensor.

    Attributes:
        offsets: bytes from the tensor's start to each row, int64 [rows]; in the tensor's memory.
        head_stride: bytes from one head of a row to the next.
    """

    offsets: Array
    head_stride: int

    def on(self, device: LayerDevice) -> RowPlaces:
        """Copies the table to the memory of `device`."""
        return RowPlaces(device.index(self.offsets), self.head_stride)


@dataclass(frozen=True, slots=True)
class TurnTable:
    """What to do with each row of a batch.

    Attributes:
        of_row: int32 [rows]: a row of `turns`, ZERO_ROW or COPY_ROW.
        turns: float32 [turns, 2, rotary_dim / 2]: cosines and sines of each distance.
    """

    of_row: Array
    turns: Array

    @classmethod
    def copies(cls, rows: int) -> TurnTable:
        """A table that copies all rows, for values."""
        return cls(np.full(rows, COPY_ROW, np.int32), NO_TURNS)

    def on(self, device: LayerDevice) -> TurnTable:
        """Copies both tables to the memory of `device`."""
        return TurnTable(device.index(self.of_row), device.index(self.turns))


class KeyRotation:
    """The rotation of one model's keys.

    A key turns once, by the angle between its positions, which equals undoing the old turn and applying the new one
    with one rounding instead of two. Segments move as a whole, so a batch has few distinct distances and a small table.

    Args:
        dtype: dtype of the keys: float32, bfloat16 or float16.
        frequencies: radians per position as the model has them, [rotary_dim / 2]; None: those of `spec`.

    Raises:
        GeometryError: frequencies of another shape.
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
        """The turns of rows from old to new positions, each int64 [rows]; rows in `zero` become zeros.

        A row whose position does not change is copied, bit for bit.
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
        """Turns rows of `source` and writes them to `target` in one pass; see `flexkv.c_ext.rotate_rows`.

        The tensors are contiguous, of any library; if both are the same tensor, rows turn in place. Values go through
        the same call with `TurnTable.copies`. Tensors and tables must all lie in host memory or all on one GPU. On a
        GPU the launch is enqueued on `stream`, and the tables must have passed `check` before.
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
        """Checks the arguments of `apply`. The tables lie in host memory; no byte moves.

        Raises:
            GeometryError: impossible dimensions, strides or dtypes, or memory that source and target share.
            BlockRangeError: a row outside its memory, or a turn that does not exist.
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
    """The geometry of a rotation's rows."""

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
