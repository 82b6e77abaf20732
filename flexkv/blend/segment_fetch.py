"""Reads the cached pages of one prompt's segments into host memory, and then loads them, without ever waiting.

This module is for callers whose thread must not wait, such as an engine's step. It promises a page to the caller when
the page is in host memory. So a slow or hanging disk delays only the request that needs the page, and no engine step.
If `SegmentFolders.streams` is set, it promises full blocks while they are still being read. The load then copies them
in ranges of layers, and the code that uses a layer waits for that layer.
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
    """A fetch of one prompt's segments to host memory. No method blocks. Pages that have no slot in host memory after
    `disk.wait_s` are given up, and so are pages whose reads take longer than `disk.wait_s`. If full blocks are
    streamed, their load may take the same time again.

    Call order:
        `advance` or `begin_load` repeatedly, until `begin_load` returns a load; or `give_up`.

    Args:
        deadline_s: how long each wait of the load may last, in seconds.
        caller: see `SegmentCache.begin_load`.
        reads_s: see `SegmentLoad`.

    Attributes:
        missed: number of the segments' pages that the load leaves out, by reason; empty before `begin_load` has
            returned the load.
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
        # A prompt with more pages than host memory has slots would wait for slots that it occupies itself.
        self._awaits_room = sum(self._known) <= lookup.slots
        self._without_room: set[int] = set()
        """Numbers of the segments whose lookup continued without some pages, because host memory had no free slots for
        them."""
        self._coming = list(self._asked)
        try:
            self._coming = [one for one in self._asked if self._fetch(one)]
            moves.begin_reads()
        except Exception:
            self.give_up()
            raise

    def begin_load(self) -> SegmentLoad | None:
        """If no more pages will arrive, starts loading those that have arrived, and returns the load. Otherwise returns
        None."""
        return self._load() if self.advance() else None

    def advance(self) -> bool:
        """Repeats the lookups of segments that still wait for pages. Returns True if no segment waits any more. The
        caller need not begin the load at once, because pages that have arrived are kept in host memory.
        """
        self._moves.free_late()
        # `waits` is called for every segment that still waits, because each call keeps the segment's place in the queue
        # for host slots.
        self._coming = [
            one for one in self._coming if self._lookup.waits(one, self._awaits_room) or self._fetch(one)
        ]
        self._moves.begin_reads()
        return not self._coming

    def _fetch(self, asked: Asked) -> bool:
        """Looks up a segment and begins its reads. Returns whether to look it up again later."""
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
        """Returns why page number `got` of a segment did not arrive, although it was in a tier when the fetch began."""
        if self._lookup.pages(asked.keys) <= got:
            return PageLoss.SEGMENT_UNREADABLE
        return PageLoss.SEGMENT_NO_ROOM if asked.segment in self._without_room else PageLoss.SEGMENT_LATE

    def give_up(self) -> None:
        """Ends the fetch, because the caller no longer needs the segments. Idempotent."""
        asked, self._asked, self._coming = self._asked, [], []
        for one in asked:
            self._lookup.give_up(one)
