"""The arguments and the result of one lookup of a request."""

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
    """The arguments of a lookup, and the limits of its result.

    Attributes:
        keys: per group, the keys of the whole blocks that may be promised, from the request's first token on.
        start_tokens: number of tokens that the engine has itself: whole blocks of every group.
        tail: per group, candidates for the tail after the last whole block; None if no tail may be promised.
        tiers: numbers of the tiers behind host memory whose pages the request may use.
        room_pages: maximum number of pages that may be promised.
        straight: whether pages may be promised that are then loaded straight from their tier to engine blocks.
        settings: the caller's settings for the request. The other attributes already respect them.
        bound: the reason why keys that the engine asked for are missing from `keys`; None if none are missing.
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
        """Host memory and `tiers` as a bit mask, with bit i for tier number i; for native lookups."""
        mask = 1
        for tier in self.tiers:
            mask |= 1 << tier
        return mask


@dataclass(slots=True)
class Looked:
    """The result of a lookup.

    Attributes:
        lease: the promised pages.
        fetches: number of fetches and questions to tiers for which the request now waits.
        awaited: pages for which there are not enough free slots. If not empty, the request waits in the queue for slots
            (`RoomLine`), and its lease must end.
        left_out: the reason why pages after the lease are left to the engine although tiers have them, if the reason
            applies to this lookup only; else None. Reasons that apply to later lookups too are in `Wait.skipped`.
    """

    lease: Lease
    fetches: int = 0
    awaited: Sequence[WantedPages] = ()
    left_out: MissReason | None = None
