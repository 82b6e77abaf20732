"""Lookup leases: the pages that `match` promised to a request, and that are not evicted until it loads or releases
them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flexkv.cache.base import EntryIds, TierId
from flexkv.transfer.graph import PageTags, ReadIds, SlotIds


@dataclass(frozen=True, slots=True)
class StraightPages:
    """Pages of one group that are loaded straight from their tier to engine blocks, each leased in that tier.

    Attributes:
        tier: number of the tier.
        entries: entries in the tier's index, uint32 [pages].
        places: place of each entry, int32 [pages].
        tags: the tags that the places must hold, uint8 [pages, TAG_BYTES].
    """

    tier: TierId
    entries: EntryIds
    places: SlotIds
    tags: PageTags

    def __len__(self) -> int:
        return len(self.entries)

    def at(self, positions: NDArray[np.intp]) -> StraightPages:
        return StraightPages(self.tier, self.entries[positions], self.places[positions], self.tags[positions])


class HeldPages(NamedTuple):
    """Pages of one group that are in host memory or being fetched, each leased once for a request that waits.

    Attributes:
        entries: uint32 [pages].
        slots: int32 [pages].
    """

    group: int
    entries: EntryIds
    slots: SlotIds


@dataclass(slots=True)
class GroupLease:
    """One group's share of a lease: whole blocks, followed (in the same arrays) by the partial tail if there is one.

    ```
    first_block                                    first_block + blocks
    |  in host memory  |  coming: `fetches`                   |  tail  |    all of them: entries, slots
    |  in host memory  |  where they lie: `straight`          |             the first part: entries, slots
    ```

    Attributes:
        entries: entries of the pages in host memory or being fetched, uint32 [pages].
        slots: int32 [pages].
        first_block: number of the first block within the request.
        blocks: whole blocks; `pages` is one more when there is a tail.
        fetches: int64 [pages], the op that brings each page to host memory, or 0; None if all are there.
        straight: the blocks that follow and are loaded straight from another tier. With them there is no tail.
    """

    entries: EntryIds
    slots: SlotIds
    first_block: int
    blocks: int
    fetches: ReadIds | None = None
    straight: StraightPages | None = None

    @property
    def pages(self) -> int:
        return len(self.entries) + (0 if self.straight is None else len(self.straight))

    @property
    def has_tail(self) -> bool:
        return self.pages > self.blocks

    @property
    def is_whole(self) -> bool:
        """Whether these are only whole blocks that can all be loaded at once, because none is being fetched."""
        return self.fetches is None and not self.has_tail

    def followed_by(self, held: HeldPages) -> GroupLease:
        """A share with these whole blocks and the following blocks `held`. Precondition: all these blocks are in
        host memory.
        """
        return GroupLease(
            np.concatenate((self.entries, held.entries)),
            np.concatenate((self.slots, held.slots)),
            self.first_block,
            self.blocks + len(held.entries),
        )


@dataclass(slots=True)
class Lease:
    """The pages that a lookup promised to one request and keeps for it.

    The tokens of the request, from its first on, and where their KV comes from:

        |  the engine's own  |  these pages, whole blocks  |  a partial tail  |  computed by the engine
        0                start_tokens                  + tokens         + tail_tokens

    Attributes:
        since_s: the time at which it was made.
        start_tokens: tokens that the engine had itself: whole blocks of every group.
        tokens: tokens promised after those: whole blocks of every group.
        tail_tokens: tokens of the partial tail; 0 for none.
        cut: more than `tokens` were found, but there is no room to promise the rest.
        by_tier, shared_tokens: see `MatchResult`.
    """

    groups: tuple[GroupLease, ...]
    since_s: float
    start_tokens: int = 0
    tokens: int = 0
    tail_tokens: int = 0
    cut: bool = False
    by_tier: tuple[int, ...] = ()
    shared_tokens: int = 0

    @property
    def pages(self) -> int:
        pages = 0
        for group in self.groups:
            pages += len(group.entries)
            if group.straight is not None:
                pages += len(group.straight.entries)
        return pages


def joined_shares(
    lease: Lease | None, held: Sequence[HeldPages], groups: int, start_tokens: int, start_block: int
) -> tuple[GroupLease, ...]:
    """Joins a request's lease and the pages held for it into one share per group, of whole blocks from `start_block`
    on. Empty if there is neither, or if they do not form such shares."""
    if lease is not None and (
        lease.start_tokens != start_tokens or not all(share.is_whole for share in lease.groups)
    ):
        return ()
    if not held:
        return () if lease is None else lease.groups
    if [pages.group for pages in held] != list(range(groups)):
        return ()
    if lease is not None and any(share.straight is not None for share in lease.groups):
        return ()
    if lease is None:
        return tuple(
            GroupLease(pages.entries, pages.slots, start_block, len(pages.entries)) for pages in held
        )
    return tuple(share.followed_by(pages) for share, pages in zip(lease.groups, held, strict=True))
