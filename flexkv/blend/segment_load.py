"""Segments of one prompt on their way from the host pool, layer by layer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from flexkv.errors import TransferError
from flexkv.transfer.base import Ticket
from flexkv.transfer.layerwise.base import Array, LostRows

if TYPE_CHECKING:
    from flexkv.blend.cache import SegmentCache


@dataclass(frozen=True, slots=True, eq=False)
class Hit:
    """The leading `tokens` of a segment that are on their way to the staging pool.

    Attributes:
        segment: number of the segment in the lookup.
        tickets: of its whole blocks, and of the tokens after them.
        requests: of the manager, one a ticket.
    """

    segment: int
    tokens: int
    blocks: NDArray[np.int32]
    tickets: tuple[Ticket, ...]
    requests: tuple[str, ...]


class StagedRows:
    """One hit's rows of one layer: a `RowSource` of the layerwise pipeline."""

    def __init__(self, load: SegmentLoad, hit: Hit, layer: int) -> None:
        self._load, self._hit, self._layer = load, hit, layer

    def copy_to(self, rows: Array) -> None:
        """
        Raises:
            LostRows: the pages did not come, not in time, or not as they were stored.
        """
        self._load.copy_layer(self._hit, self._layer, rows)


class SegmentLoad:
    """Segments of one prompt on their way from the host pool. To be closed."""

    def __init__(self, cache: SegmentCache, hits: Sequence[Hit]) -> None:
        self._cache = cache
        self.hits = list(hits)
        self.lost: dict[int, str] = {}
        """Segment -> why pages of it did not come; known once this is closed."""

    def rows(self, layer: int) -> list[StagedRows]:
        """Of each hit, the rows of a layer; the layers arrive in order."""
        return [StagedRows(self, hit, layer) for hit in self.hits]

    def copy_layer(self, hit: Hit, layer: int, rows: Array) -> None:
        cache = self._cache
        ends_s = time.monotonic() + cache.deadline_s
        for ticket in hit.tickets:
            found = cache.engine.wait_layer(ticket, layer, max(0.0, ends_s - time.monotonic()))
            if not found.ok:
                raise LostRows(f"pages {'did not verify' if found.in_time else 'did not come in time'}")
        block_tokens = cache.block_tokens
        for number, block in enumerate(hit.blocks.tolist()):
            at = number * block_tokens
            end = min(at + block_tokens, hit.tokens)
            rows[:, at:end] = cache.staging.rows[layer, block, :, : end - at]

    def close(self) -> None:
        """Waits for what still moves and frees the staging blocks, each once however often this is called.

        Raises:
            TransferError: some of it did not end before the deadline. The cache frees its blocks once it has.
        """
        ends_s = time.monotonic() + self._cache.deadline_s
        hits, self.hits = self.hits, []
        late = [hit for hit in hits if not self._cache.finish(hit, max(0.0, ends_s - time.monotonic()))]
        for hit in hits:
            if hit not in late and (reason := self._cache.why_failed(hit)):
                self.lost[hit.segment] = reason
        if late:
            raise TransferError(
                f"{len(late)} segments of {len(hits)} still move after {self._cache.deadline_s:g} s"
            )
