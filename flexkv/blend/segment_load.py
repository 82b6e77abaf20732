"""Loads segments of one prompt from the host pool, layer by layer."""

from __future__ import annotations

import time
from collections.abc import Sequence

from flexkv.blend.base import Hit
from flexkv.blend.segment_moves import SegmentMoves
from flexkv.errors import TransferError
from flexkv.transfer.layerwise.base import Array, LostRows


class StagedRows:
    """One hit's rows of one layer: a `RowSource` of the layerwise pipeline."""

    def __init__(self, load: SegmentLoad, hit: Hit, layer: int) -> None:
        self._load, self._hit, self._layer = load, hit, layer

    def copy_to(self, rows: Array) -> None:
        """
        Raises:
            LostRows: the pages did not arrive, arrived too late, or are damaged.
        """
        self._load.copy_layer(self._hit, self._layer, rows)


class SegmentLoad:
    """A load of one prompt's segments from the host pool. Must be closed.

    Args:
        hits: the hits, whose staging blocks this object frees.
        deadline_s: seconds that each wait lasts at most.
    """

    def __init__(self, moves: SegmentMoves, hits: Sequence[Hit], deadline_s: float) -> None:
        self._moves = moves
        self._deadline_s = deadline_s
        self.hits = list(hits)
        self.lost: dict[int, str] = {}
        """Segment -> why some of its pages did not arrive; known once this object is closed."""

    def rows(self, layer: int) -> list[StagedRows]:
        """The rows of a layer, for each hit; the layers arrive in order."""
        return [StagedRows(self, hit, layer) for hit in self.hits]

    def copy_layer(self, hit: Hit, layer: int, rows: Array) -> None:
        ends_s = time.monotonic() + self._deadline_s
        for ticket in hit.tickets:
            found = self._moves.engine.wait_layer(ticket, layer, max(0.0, ends_s - time.monotonic()))
            if not found.ok:
                raise LostRows(f"pages {'did not verify' if found.in_time else 'did not come in time'}")
        staging = self._moves.staging
        block_tokens = staging.block_tokens
        for number, block in enumerate(hit.blocks.tolist()):
            at = number * block_tokens
            end = min(at + block_tokens, hit.tokens)
            rows[:, at:end] = staging.rows[layer, block, :, : end - at]

    @property
    def moves(self) -> bool:
        """Whether some pages are still on their way. Does not wait."""
        engine = self._moves.engine
        return not all(engine.wait(ticket, 0.0) for hit in self.hits for ticket in hit.tickets)

    def drop_lost(self) -> None:
        """Drops hits some of whose pages did not arrive or verify; `lost` names them. The pages of the others stay as
        they are until the load is closed. Precondition: nothing moves.
        """
        self._moves.take_results()
        for hit in list(self.hits):
            if reason := self._moves.why_failed(hit):
                self.lost[hit.segment] = reason
                self.hits.remove(hit)
                self._moves.finish(hit, 0.0)

    def abandon(self) -> None:
        """Frees the staging blocks, those of pages that still move once they have ended. Does not wait."""
        hits, self.hits = self.hits, []
        for hit in hits:
            self._moves.finish(hit, 0.0)

    def close(self) -> None:
        """Waits for pages that still move, and frees the staging blocks. Idempotent.

        Raises:
            TransferError: some pages still move at the deadline. The cache frees their blocks once they do not.
        """
        ends_s = time.monotonic() + self._deadline_s
        hits, self.hits = self.hits, []
        late = [hit for hit in hits if not self._moves.finish(hit, max(0.0, ends_s - time.monotonic()))]
        for hit in hits:
            if hit not in late and (reason := self._moves.why_failed(hit)):
                self.lost[hit.segment] = reason
        if late:
            raise TransferError(
                f"{len(late)} segments of {len(hits)} still move after {self._deadline_s:g} s"
            )
