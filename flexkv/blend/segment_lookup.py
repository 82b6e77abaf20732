"""Looks up the cached leading parts of a prompt's segments, and starts loading them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from flexkv.blend.base import Hit, Tokens
from flexkv.blend.keys import GROUP, SegmentKeys, SegmentKeyScheme
from flexkv.blend.segment_moves import LateBlocks, SegmentMoves
from flexkv.blend.segment_unit import SegmentUnit
from flexkv.cache.base import Outcome
from flexkv.transfer.base import Ticket

MOST_HITS = 256
"""The maximum number of segments of one prompt that are loaded. The limit exists because each of them takes queue
entries of the transfer engine."""

READS_A_HIT = 2
"""Reads from disk per hit: one for its full blocks, and one for the tokens after them."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A segment that is looked up.

    Attributes:
        segment: number of the segment in the prompt.
        keys: the segment's keys.
        request: id of the manager's request for the segment's full blocks.
    """

    segment: int
    keys: SegmentKeys
    request: str

    @property
    def tail_request(self) -> str:
        """Id of a separate request for the tail, the tokens after the last full block. It is separate because a tail is
        read from disk before its load begins, while full blocks are loaded as they are being read.
        """
        return f"{self.request}-tail"

    @property
    def pages(self) -> int:
        return len(self.keys.whole) + (self.keys.tail is not None)


class SegmentLookup:
    """Makes the lookups of one segment cache: asks the cache's manager, and starts loading the hits."""

    def __init__(self, unit: SegmentUnit, moves: SegmentMoves, scheme: SegmentKeyScheme) -> None:
        self._unit = unit
        self._manager = unit.live.manager
        self._moves = moves
        self._staging = moves.staging
        self._scheme = scheme
        self._requests = itertools.count()

    def begin(self, segments: Sequence[Tokens | None], deadline_s: float, caller: str = "") -> list[Hit]:
        """Starts loading the cached part of each segment. Waits for tails that are on disk, as `load` does.

        Args:
            segments: tokens of each segment; None for a segment to skip.
            deadline_s: see `load`.
            caller: see `SegmentCache.begin_load`.
        """
        asked = self.ask(segments, caller)
        if self._unit.live.has_tiers:
            for one in asked[:MOST_HITS]:
                self._match_tail(one)  # starts reading the tails first, because this call waits for them
        return self.load(asked, deadline_s)

    @property
    def slots(self) -> int:
        """Number of pages that host memory can hold."""
        return self._unit.live.slots

    @property
    def no_room(self) -> int:
        """Number of lookups that continued without some pages on disk, because host memory had no free slots for
        them."""
        return sum(tier.counts.no_room for tier in self._manager.tiers[1:])

    def ask(self, segments: Sequence[Tokens | None], caller: str = "") -> list[Asked]:
        """Makes the keys and request ids of segments, without looking anything up. Segments that are None are left
        out."""
        return [
            Asked(number, self._scheme.keys(tokens, caller), f"load-{next(self._requests)}")
            for number, tokens in enumerate(segments)
            if tokens is not None
        ]

    def fetch(self, asked: Asked) -> Outcome:
        """Looks up a segment, and starts reading its cached pages into host memory. May be called repeatedly. Until
        `load` or `give_up`, the segment's pages in host memory are protected from eviction.

        Returns:
            COMING if more pages are being read, ASK_AGAIN if more pages wait for slots in host memory, HIT if no more
            will arrive.
        """
        outcomes = {self._match_tail(asked)[1]}
        if len(asked.keys.whole):
            outcomes.add(self._manager.match(asked.request, [asked.keys.whole], 0).outcome)
        open_ = (outcome for outcome in (Outcome.COMING, Outcome.ASK_AGAIN) if outcome in outcomes)
        return next(open_, Outcome.HIT)

    def waits(self, asked: Asked, for_room: bool = True) -> bool:
        """Records that the caller still waits for a segment, and returns whether it is too early to call `fetch` again.

        Args:
            for_room: whether the segment also waits for slots in host memory, not only for reads.
        """
        still = self._manager.still_waits if for_room else self._manager.waits
        whole = still(asked.request)
        return still(asked.tail_request) or whole

    def give_up(self, asked: Asked) -> None:
        """Ends the lookup of a segment that is no longer needed. The reads of its pages continue, because later lookups
        may use the pages.
        """
        for request in (asked.request, asked.tail_request):
            self._manager.release(request)
            self._manager.end_request(request)

    def pages(self, keys: SegmentKeys) -> int:
        """Returns the number of leading pages of a segment that are cached in any tier. Asks only the index."""
        whole, tail = self._manager.present(GROUP, keys.whole), keys.tail
        if not whole.all():
            return int(np.argmin(whole))
        return len(whole) + (tail is not None and bool(self._manager.present(GROUP, tail.keys).all()))

    def load(self, asked: Sequence[Asked], deadline_s: float = 0.0) -> list[Hit]:
        """Starts loading the cached pages of each segment. If this raises, it frees all staging blocks except those of
        copies in flight. The latter are freed when the copies have finished.

        Args:
            deadline_s: how long to wait, in seconds, until the segments' tails have been read from disk; 0 to load only
                tails that are in host memory.
        """
        found: list[tuple[Asked, Hit]] = []
        try:
            self._find(asked, found, deadline_s)
        except Exception:
            for _, hit in found:
                self._moves.leave(LateBlocks(hit.tickets, hit.blocks, hit.requests))
            raise
        finally:
            begun = {request for _, hit in found for request in hit.requests}
            for request in (each for one in asked for each in (one.request, one.tail_request)):
                self._manager.release(request)
                if request not in begun:
                    self._manager.end_request(request)
        return [hit for _, hit in found if hit.tokens]

    def _find(self, asked: Sequence[Asked], found: list[tuple[Asked, Hit]], deadline_s: float) -> None:
        """Starts the loads, and appends each load that has begun to `found`. So the caller can end these loads even if
        this method raises."""
        for one in asked:
            if len(found) < MOST_HITS and (hit := self._load_whole(one)) is not None:
                found.append((one, hit))
            self._manager.release(one.request)
        if self._unit.live.has_tiers and deadline_s:
            waiting = [one.tail_request for one, _ in found]
            self._unit.wait_while(lambda: any(map(self._manager.waits, waiting)), deadline_s)
        for at, (one, hit) in enumerate(found):
            found[at] = (one, self._with_tail(one, hit))

    def _load_whole(self, asked: Asked) -> Hit | None:
        """Starts loading the cached full blocks of a segment. Returns None if the segment has full blocks but none of
        them can be loaded, because then its tail cannot be used either.
        """
        whole = asked.keys.whole
        if not len(whole):
            return Hit(asked.segment, 0, np.empty(0, np.int32), (), ())
        match = self._manager.match(asked.request, [whole], 0)
        blocks = self._staging.take(match.blocks) if match.blocks else None
        begun = None if blocks is None else self._begin(asked.request, blocks, tail=False)
        if blocks is None or begun is None:
            return None
        ticket, streamed = begun
        tokens = len(blocks) * self._scheme.block_tokens
        return Hit(asked.segment, tokens, blocks, (ticket,), (asked.request,), streamed)

    def _match_tail(self, asked: Asked) -> tuple[int, Outcome]:
        """Looks up the tail of a segment, and plans to read it if it is on disk.

        Returns:
            The number of the tail's tokens that can be loaded now, and the outcome of the lookup; 0 and MISS if the
            segment has no tail.
        """
        keys = asked.keys
        if keys.tail is None:
            return 0, Outcome.MISS
        whole_tokens = len(keys.whole) * self._scheme.block_tokens
        match = self._manager.match(asked.tail_request, [keys.whole], whole_tokens, [keys.tail])
        return match.tail_tokens, match.outcome

    def _with_tail(self, asked: Asked, hit: Hit) -> Hit:
        """Starts loading the tail of a segment if all its full blocks are being loaded. Returns the hit with the tail's
        tokens, or unchanged if the tail cannot be loaded."""
        if hit.tokens < len(asked.keys.whole) * self._scheme.block_tokens:
            return hit
        tokens, _ = self._match_tail(asked)
        blocks = self._staging.take(1) if tokens else None
        if blocks is None:
            return hit
        begun = self._begin(asked.tail_request, blocks, tail=True)
        if begun is None:
            return hit
        return replace(
            hit,
            tokens=hit.tokens + tokens,
            blocks=np.concatenate((hit.blocks, blocks)),
            tickets=(*hit.tickets, begun[0]),
            requests=(*hit.requests, asked.tail_request),
        )

    def _begin(self, request: str, blocks: NDArray[np.int32], tail: bool) -> tuple[Ticket, bool] | None:
        """Starts loading the pages that a lookup has matched, layer by layer, so that the first layers can be used
        while the last ones are still in flight. If this returns None or raises, the staging blocks are free again.

        Returns:
            The load's ticket, and whether some of its pages are still being read from disk. None if there is nothing to
            load or the queue has no free entry.
        """
        try:
            graph = self._manager.begin_load(request, [blocks], tail=tail)
            ticket = None if graph is None else self._moves.submit(graph.layerwise())
        except Exception:
            self._staging.give(blocks)
            raise
        if graph is None or ticket is None:
            self._staging.give(blocks)
            return None
        return ticket, any(op.reads.any() for op in graph.ops)
