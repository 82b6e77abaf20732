"""Loads segments of one prompt from the host pool to the staging pool, layer by layer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from flexkv.blend.base import Hit
from flexkv.blend.segment_moves import SegmentMoves
from flexkv.errors import TransferError
from flexkv.observe import PageLoss
from flexkv.transfer.layerwise.base import Array, LostRows

UNVERIFIED, LATE = "pages did not verify", "pages did not come in time"


@dataclass(frozen=True, slots=True)
class LostHit:
    """A hit that was dropped, because some of its pages did not arrive.

    Attributes:
        hit: the hit.
        reason: the reason as text.
        why: the category in which the missing pages are counted. None if all pages were in host memory when the load
            began: pages that are lost from host memory are not counted.
    """

    hit: Hit
    reason: str
    why: PageLoss | None


class StagedRows:
    """One hit's rows of one layer. A `RowSource` of the layerwise pipeline."""

    def __init__(self, load: SegmentLoad, hit: Hit, layer: int) -> None:
        self._load, self._hit, self._layer = load, hit, layer

    def copy_to(self, rows: Array) -> None:
        """Waits for the rows, and copies them to `rows` [planes, tokens, heads, head_dim].

        Raises:
            LostRows: the pages did not arrive, arrived too late, or are damaged.
        """
        self._load.copy_layer(self._hit, self._layer, rows)


class SegmentLoad:
    """A load of one prompt's segments from the host pool to the staging pool. Must be closed.

    Args:
        hits: the hits to load. This object frees their staging blocks.
        deadline_s: how long each wait may last, in seconds.
        reads_s: how long all waits for pages together may last, in seconds, if pages are still being read from disk;
            None if each wait may last `deadline_s`.

    Attributes:
        hits: the hits that were not dropped.
        lost: maps a segment's number to the reason why some of its pages did not arrive. Complete after `close`.
    """

    def __init__(
        self, moves: SegmentMoves, hits: Sequence[Hit], deadline_s: float, reads_s: float | None = None
    ) -> None:
        self._moves = moves
        self._deadline_s = deadline_s
        self._ends_s = None if reads_s is None else time.monotonic() + reads_s
        self._whole: set[Hit] = set()
        """Hits whose pages have all arrived and passed verification."""
        self.hits = list(hits)
        self.lost: dict[int, str] = {}

    def rows(self, layer: int) -> list[StagedRows]:
        """Returns one row source per hit, for the rows of layer `layer`. The layers arrive in ascending order."""
        return [StagedRows(self, hit, layer) for hit in self.hits]

    def wait_layer(self, hit: Hit, layer: int) -> None:
        """Waits until a layer of a hit is in the staging pool.

        Raises:
            LostRows: the pages did not arrive, arrived too late, or are damaged.
        """
        if hit in self._whole:
            return
        ends_s = self._end_of_waits()
        for ticket in hit.tickets:
            found = self._moves.engine.wait_layer(ticket, layer, max(0.0, ends_s - time.monotonic()))
            if not found.ok:
                raise LostRows(UNVERIFIED if found.in_time else LATE)

    def _end_of_waits(self) -> float:
        """Returns the deadline of a wait that begins now, as a value of `time.monotonic`."""
        return time.monotonic() + self._deadline_s if self._ends_s is None else self._ends_s

    def copy_layer(self, hit: Hit, layer: int, rows: Array) -> None:
        self.wait_layer(hit, layer)
        staging = self._moves.staging
        block_tokens = staging.block_tokens
        for number, block in enumerate(hit.blocks.tolist()):
            at = number * block_tokens
            end = min(at + block_tokens, hit.tokens)
            rows[:, at:end] = staging.rows[layer, block, :, : end - at]

    @property
    def moves(self) -> bool:
        """Whether any pages are still being loaded. Does not wait."""
        engine = self._moves.engine
        return not all(engine.wait(ticket, 0.0) for hit in self.hits for ticket in hit.tickets)

    def has_layers(self, layers: int) -> bool:
        """Returns whether the first `layers` layers of every hit have arrived in the staging pool or have failed. Does
        not wait.
        """
        engine = self._moves.engine
        return all(
            hit in self._whole
            or engine.wait(ticket, 0.0)
            or engine.wait_layer(ticket, layers - 1, 0.0).in_time
            for hit in self.hits
            for ticket in hit.tickets
        )

    def drop_lost(self, wait: bool = False) -> list[LostHit]:
        """Drops the hits that have lost pages: pages that did not arrive in time or failed verification. Adds the
        segments of these hits to `lost`. The pages of the other hits do not change until the load is closed.

        Args:
            wait: whether to wait until each hit has arrived or is lost. If False, this call does not check hits whose
                pages are still in flight; a later call does.

        Returns:
            The hits that this call has dropped.
        """
        dropped = []
        for hit in [hit for hit in self.hits if hit not in self._whole]:
            if (lost := self._look(hit, wait)) is not None:
                self.lost[hit.segment] = lost.reason
                self.hits.remove(hit)
                self._moves.finish(hit, 0.0)
                dropped.append(lost)
        return dropped

    def _look(self, hit: Hit, wait: bool) -> LostHit | None:
        """Checks one hit. Returns it with the reason if it is lost; None if it is complete or still in flight."""
        engine, ends_s = self._moves.engine, self._end_of_waits()
        moving = [ticket for ticket in hit.tickets if not engine.wait(ticket, 0.0)]
        if any(engine.wait_layer(ticket, 0, 0.0).failed for ticket in moving):
            return self._lost(hit, UNVERIFIED, PageLoss.SEGMENT_UNREADABLE)
        for ticket in moving:
            if not engine.wait(ticket, max(0.0, ends_s - time.monotonic()) if wait else 0.0):
                is_late = time.monotonic() >= ends_s
                return self._lost(hit, LATE, PageLoss.SEGMENT_LATE) if is_late else None
        self._moves.take_results()
        if reason := self._moves.why_failed(hit):
            return self._lost(hit, reason, PageLoss.SEGMENT_UNREADABLE)
        self._whole.add(hit)
        return None

    def _lost(self, hit: Hit, reason: str, why: PageLoss) -> LostHit:
        return LostHit(hit, reason, why if hit.streamed else None)

    def abandon(self) -> None:
        """Frees the staging blocks without waiting. Blocks of copies in flight are freed after the copies have
        finished.
        """
        hits, self.hits = self.hits, []
        for hit in hits:
            self._moves.finish(hit, 0.0)

    def close(self) -> None:
        """Waits for copies in flight, and frees the staging blocks. Idempotent.

        Raises:
            TransferError: copies are still in flight at the deadline. The cache frees their blocks after they have
                finished.
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
