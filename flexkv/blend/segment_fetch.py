"""Brings the cached pages of one prompt's segments to host memory, and then loads them, without ever waiting.

For a caller whose thread must not wait, such as an engine's step. A page is promised once it is in host memory, so a
slow or hanging disk only uses up the request's time to wait and delays no step. If the unit streams, whole blocks are
promised while they are being read. The load then brings them by ranges of layers, and the user of a layer waits for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from flexkv.blend.base import Tokens
from flexkv.blend.segment_load import SegmentLoad
from flexkv.blend.segment_lookup import MOST_HITS, Asked, SegmentLookup
from flexkv.blend.segment_moves import SegmentMoves
from flexkv.cache.base import Outcome
from flexkv.observe import PageLoss


class SegmentFetch:
    """One prompt's segments on their way to host memory. The disks' time to wait (`disk.wait_s`) applies once to room
    in host memory and once to reads; if whole blocks are streamed, it applies again to their load.

    Call order:
        `advance` or `begin_load` repeatedly until the latter returns a load, or `give_up`.

    Args:
        deadline_s: how long each wait of the load lasts at most.
        reads_s: see `SegmentLoad`.

    Attributes:
        missed: pages of the segments that the load does not bring, by reason; known with the load.
    """

    def __init__(
        self,
        lookup: SegmentLookup,
        moves: SegmentMoves,
        segments: Sequence[Tokens],
        deadline_s: float,
        caller: str = "",
        reads_s: float | None = None,
    ) -> None:
        self._lookup, self._moves = lookup, moves
        self._deadline_s, self._reads_s = deadline_s, reads_s
        self.missed: Counter[PageLoss] = Counter()
        self._asked = lookup.ask(segments, caller)[:MOST_HITS]
        self._known = [lookup.pages(one.keys) for one in self._asked]
        # A prompt that exceeds host memory would wait for room that it occupies itself.
        self._awaits_room = sum(self._known) <= lookup.slots
        self._without_room: set[int] = set()
        """Segments whose lookup went on without pages for which there was no room."""
        self._coming = list(self._asked)
        try:
            self._coming = [one for one in self._asked if self._fetch(one)]
            moves.begin_reads()
        except Exception:
            self.give_up()
            raise

    def begin_load(self) -> SegmentLoad | None:
        """Begins to load the pages that have arrived, once no more will; None until then."""
        return self._load() if self.advance() else None

    def advance(self) -> bool:
        """Asks again for pages that are under way. Returns whether no more will arrive, for a caller that begins the
        load later: arrived pages stay in host memory.
        """
        self._moves.free_late()
        # Every segment is asked for, because that keeps its place in the queue for room.
        self._coming = [
            one for one in self._coming if self._lookup.waits(one, self._awaits_room) or self._fetch(one)
        ]
        self._moves.begin_reads()
        return not self._coming

    def _fetch(self, asked: Asked) -> bool:
        """Whether to ask again for a segment."""
        before = self._lookup.no_room
        outcome = self._lookup.fetch(asked)
        lacks_room = outcome is Outcome.ASK_AGAIN and not self._awaits_room
        if self._lookup.no_room > before or lacks_room:
            self._without_room.add(asked.segment)
        return outcome is not Outcome.HIT and not lacks_room

    def _load(self) -> SegmentLoad:
        asked, self._asked = self._asked, []
        hits = self._lookup.load(asked)
        came = {hit.segment: len(hit.blocks) for hit in hits}
        for one, known in zip(asked, self._known, strict=True):
            pages, got = one.pages, came.get(one.segment, 0)
            if pages > max(known, got):
                self.missed[PageLoss.SEGMENT_ABSENT] += pages - max(known, got)
            if known > got:
                self.missed[self._why(one, got)] += known - got
        return SegmentLoad(self._moves, hits, self._deadline_s, self._reads_s)

    def _why(self, asked: Asked, got: int) -> PageLoss:
        """Why page number `got` of a segment, which a tier had, did not arrive."""
        if self._lookup.pages(asked.keys) <= got:
            return PageLoss.SEGMENT_UNREADABLE
        return PageLoss.SEGMENT_NO_ROOM if asked.segment in self._without_room else PageLoss.SEGMENT_LATE

    def give_up(self) -> None:
        """Ends the fetch, because its segments are no longer needed. Idempotent."""
        asked, self._asked, self._coming = self._asked, [], []
        for one in asked:
            self._lookup.give_up(one)
