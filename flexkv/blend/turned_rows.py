"""Loaded rows of segments, turned to their positions in a prompt, one layer at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flexkv.blend.base import PLANES, Hit
from flexkv.blend.cache import SegmentCache
from flexkv.blend.rotation import KeyRotation, RowPlaces, TurnTable


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive rows of a hit.

    Attributes:
        first: number of the first row in its segment.
        rows: number of rows.
        position: position in the prompt of the first row.
    """

    hit: Hit
    first: int
    rows: int
    position: int


class TurnedRows:
    """Rows of hits whose pages have all arrived in the staging pool. Valid until their load is closed.

    Args:
        places: number of each row in a layer's part of the staging pool, int64 [rows].
        turns: what to do with each row's key.
    """

    def __init__(
        self, cache: SegmentCache, rotation: KeyRotation, places: NDArray[np.int64], turns: TurnTable
    ) -> None:
        self._cache, self._rotation = cache, rotation
        self._places, self._turns = places, turns

    @classmethod
    def of(cls, cache: SegmentCache, rotation: KeyRotation, stretches: Sequence[Stretch]) -> TurnedRows:
        """The rows of all stretches, in their order."""
        old = np.concatenate([np.arange(each.first, each.first + each.rows) for each in stretches])
        new = np.concatenate([np.arange(each.position, each.position + each.rows) for each in stretches])
        tokens = cache.block_tokens
        blocks = [
            each.hit.blocks.astype(np.int64)[np.arange(each.first, each.first + each.rows) // tokens]
            for each in stretches
        ]
        places = np.concatenate(blocks) * (PLANES * tokens) + old % tokens
        return cls(cache, rotation, places, rotation.table(old, new))

    def only(self, chosen: NDArray[np.int64]) -> TurnedRows:
        """The chosen ones of these rows."""
        turns = TurnTable(np.asarray(self._turns.of_row)[chosen], self._turns.turns)
        return TurnedRows(self._cache, self._rotation, self._places[chosen], turns)

    def layer(self, layer: int) -> tuple[NDArray[np.integer], NDArray[np.integer]]:
        """Keys and values of a layer, each [rows, heads, head_dim] of integers that carry the bits."""
        shape, rows = self._cache.shape, len(self._places)
        staging = self._cache.staging.rows[layer]
        carrier = np.dtype(f"i{shape.element_bytes}")  # torch has no unsigned ones
        head_bytes = shape.row_bytes // shape.heads
        target = RowPlaces(np.arange(rows, dtype=np.int64) * shape.row_bytes, head_bytes)
        found = []
        for plane, table in enumerate((self._turns, TurnTable.copies(rows))):
            places = self._places + plane * self._cache.block_tokens
            out = np.empty((rows, shape.heads, shape.head_dim), carrier)
            if rows:
                self._rotation.apply(
                    staging,
                    RowPlaces(places * shape.row_bytes, head_bytes),
                    out.view(shape.carrier),
                    target,
                    table,
                )
            found.append(out)
        return found[0], found[1]
