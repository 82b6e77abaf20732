"""Looks up the cached parts of a prompt's segments, and begins to load them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flexkv.blend.base import Hit, Tokens
from flexkv.blend.keys import SegmentKeys, SegmentKeyScheme
from flexkv.blend.segment_moves import LateBlocks, SegmentMoves
from flexkv.blend.segment_unit import SegmentUnit
from flexkv.transfer.base import Ticket

MOST_HITS = 256
"""Segments of one prompt that are loaded at once; each takes queue entries of the transfer engine."""

READS_A_HIT = 2
"""Reads from disk per hit: one for its whole blocks, and one for the tokens after them."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A segment that is looked up."""

    segment: int
    keys: SegmentKeys
    request: str

    @property
    def tail_request(self) -> str:
        """The tail's own request: the tail is read from disk before it is loaded, while whole blocks are loaded as they
        are read.
        """
        return f"{self.request}-tail"


class SegmentLookup:
    """Asks one segment cache's manager, and begins the loads of its hits."""

    def __init__(self, unit: SegmentUnit, moves: SegmentMoves, scheme: SegmentKeyScheme) -> None:
        self._unit = unit
        self._manager = unit.live.manager
        self._moves = moves
        self._staging = moves.staging
        self._scheme = scheme
        self._requests = itertools.count()

    def begin(self, segments: Sequence[Tokens | None], deadline_s: float, caller: str = "") -> list[Hit]:
        """Begins to load the cached part of each segment; None stands for a segment to skip.

        Waits up to `deadline_s` seconds for the tokens after whole blocks to be read from disk. After an error only
        blocks of transfers that already move stay taken, until these have ended.
        """
        asked = [
            Asked(number, self._scheme.keys(tokens, caller), f"load-{next(self._requests)}")
            for number, tokens in enumerate(segments)
            if tokens is not None
        ]
        found: list[tuple[Asked, Hit]] = []
        try:
            self._find(asked, found, deadline_s)
        except Exception:
            for _, hit in found:
                self._moves.leave(LateBlocks(hit.tickets, hit.blocks, hit.requests))
            raise
        finally:
            for one in asked:
                self._manager.release(one.request)
                self._manager.release(one.tail_request)
        return [hit for _, hit in found if hit.tokens]

    def _find(self, asked: Sequence[Asked], found: list[tuple[Asked, Hit]], deadline_s: float) -> None:
        """Begins the loads, and records those that it has begun in `found`, even if it raises."""
        if self._unit.live.has_tiers:
            for one in asked[:MOST_HITS]:
                self._match_tail(one)  # first of all, because these reads are waited for
        for one in asked:
            if len(found) < MOST_HITS and (hit := self._load_whole(one)) is not None:
                found.append((one, hit))
            self._manager.release(one.request)
        if self._unit.live.has_tiers:
            waiting = [one.tail_request for one, _ in found]
            self._unit.wait_while(lambda: any(map(self._manager.waits, waiting)), deadline_s)
        for at, (one, hit) in enumerate(found):
            found[at] = (one, self._with_tail(one, hit))

    def _load_whole(self, asked: Asked) -> Hit | None:
        """Begins to load the cached whole blocks of a segment. Returns None if it has whole blocks but none is loaded:
        then no tail can follow them.
        """
        whole = asked.keys.whole
        if not len(whole):
            return Hit(asked.segment, 0, np.empty(0, np.int32), (), ())
        match = self._manager.match(asked.request, [whole], 0)
        blocks = self._staging.take(match.blocks) if match.blocks else None
        ticket = None if blocks is None else self._begin(asked.request, blocks, tail=False)
        if blocks is None or ticket is None:
            return None
        return Hit(
            asked.segment, len(blocks) * self._scheme.block_tokens, blocks, (ticket,), (asked.request,)
        )

    def _match_tail(self, asked: Asked) -> int:
        """Returns how many tokens after the whole blocks can be loaded; starts reading those that lie on disk."""
        keys = asked.keys
        if keys.tail is None:
            return 0
        whole_tokens = len(keys.whole) * self._scheme.block_tokens
        match = self._manager.match(asked.tail_request, [keys.whole], whole_tokens, [keys.tail])
        return match.tail_tokens

    def _with_tail(self, asked: Asked, hit: Hit) -> Hit:
        """The hit with the tokens after its whole blocks, if all of these are coming."""
        if hit.tokens < len(asked.keys.whole) * self._scheme.block_tokens:
            return hit
        tokens = self._match_tail(asked)
        blocks = self._staging.take(1) if tokens else None
        if blocks is None:
            return hit
        ticket = self._begin(asked.tail_request, blocks, tail=True)
        if ticket is None:
            return hit
        return Hit(
            hit.segment,
            hit.tokens + tokens,
            np.concatenate((hit.blocks, blocks)),
            (*hit.tickets, ticket),
            (*hit.requests, asked.tail_request),
        )

    def _begin(self, request: str, blocks: NDArray[np.int32], tail: bool) -> Ticket | None:
        """Begins to load the matched pages layer by layer, so that the first layers can be used while the last ones
        move. Returns None if there is no queue entry. In that case, and after an error, the blocks are free again.
        """
        try:
            graph = self._manager.begin_load(request, [blocks], tail=tail)
            ticket = None if graph is None else self._moves.submit(graph.layerwise())
        except Exception:
            self._staging.give(blocks)
            raise
        if ticket is None:
            self._staging.give(blocks)
        return ticket
