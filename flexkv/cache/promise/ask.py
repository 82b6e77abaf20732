"""One lookup of a request, and what it came to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from flexkv.cache.base import TailCandidates, TierId
from flexkv.cache.ledger.leases import Lease
from flexkv.cache.moves.fetches import WantedPages
from flexkv.facts.keys import Keys
from flexkv.observe import MissReason


class Ask(NamedTuple):
    """What a lookup is asked, and within which bounds it may answer.

    Attributes:
        keys: per group, those of the whole blocks that may be promised, from the request's first token on.
        start_tokens: that the engine has itself: whole blocks of every group.
        tail: per group, what may follow the last whole block; None where no tail may be promised.
        tiers: behind host memory, those that the request may be served from.
        room_pages: at most so many are promised.
        straight: pages may be promised where they lie.
        bound: why no more than `keys` may be promised; None where these are all that was asked for.
    """

    request_id: str
    keys: Sequence[Keys]
    start_tokens: int
    tail: Sequence[TailCandidates | None] | None
    tiers: Sequence[TierId]
    room_pages: int
    straight: bool = True
    bound: MissReason | None = None

    @property
    def tiers_mask(self) -> int:
        """Host memory and `tiers`, as native lookups take them."""
        mask = 1
        for tier in self.tiers:
            mask |= 1 << tier
        return mask


@dataclass(slots=True)
class Looked:
    """What a lookup came to.

    Attributes:
        lease: what is promised.
        fetches: that the request now waits for.
        awaited: the pages for which it has to wait for room, in line, and without the lease.
    """

    lease: Lease
    fetches: int = 0
    awaited: Sequence[WantedPages] = ()
