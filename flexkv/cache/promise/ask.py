"""One lookup of a request, and its result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from flexkv.cache.base import TailCandidates, TierId
from flexkv.cache.ledger.leases import Lease
from flexkv.cache.moves.fetches import WantedPages
from flexkv.facts.keys import Keys
from flexkv.facts.request_settings import NO_SETTINGS, RequestSettings
from flexkv.observe import MissReason


class Ask(NamedTuple):
    """The arguments of a lookup, and the bounds of its answer.

    Attributes:
        keys: per group, the keys of the whole blocks that may be promised, from the request's first token on.
        start_tokens: tokens that the engine has itself: whole blocks of every group.
        tail: per group, candidates for the tail after the last whole block; None if no tail may be promised.
        tiers: tiers behind host memory that may serve the request.
        room_pages: most pages that may be promised.
        straight: whether pages may be promised for straight loads from their tier.
        settings: the settings that the caller gave with the request; the other attributes already take them into
            account.
        bound: why no more than `keys` may be promised; None if `keys` are all keys that the engine asked for.
    """

    request_id: str
    keys: Sequence[Keys]
    start_tokens: int
    tail: Sequence[TailCandidates | None] | None
    tiers: Sequence[TierId]
    room_pages: int
    straight: bool = True
    settings: RequestSettings = NO_SETTINGS
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
    """The result of a lookup.

    Attributes:
        lease: the promised pages.
        fetches: number of fetches and answers that the request now waits for.
        awaited: the pages that need room; the request must wait for this room in the queue, and gives up the lease.
    """

    lease: Lease
    fetches: int = 0
    awaited: Sequence[WantedPages] = ()
