"""Lookup leases: the pages that `match` promised to a request. They are not evicted until the request loads or releases
them, or the lease expires."""

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
    """Pages of one group that are promised for a load straight from their tier to engine blocks. Each page is leased
    once.

    Attributes:
        tier: number of the tier.
        entries: the pages' entries in the tier's index, uint32 [pages].
        places: the pages' slots in the tier, int32 [pages].
        tags: the tags that the slots must contain when they are read, uint8 [pages, TAG_BYTES].
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
    """Pages of one group that are in host memory or being fetched to it, each pinned once for a waiting request.

    Attributes:
        entries: the pages' entries in the index of host memory, uint32 [pages].
        slots: the pages' host slots, int32 [pages].
    """

    group: int
    entries: EntryIds
    slots: SlotIds


@dataclass(slots=True)
class GroupLease:
    """One group's share of a lease: whole blocks, then the partial tail if there is one.

    ```
    first_block                                    first_block + blocks
    |  in host memory  |  being fetched: `fetches`            |  tail  |    all in `entries` and `slots`
    |  in host memory  |  loaded straight: `straight`         |             only the first part in `entries` and `slots`
    ```

    Attributes:
        entries: index entries of the pages that are in host memory or being fetched to it, the tail last, uint32
            [pages].
        slots: host slots of the pages in `entries`, int32 [pages].
        first_block: index in the request of the share's first block.
        blocks: number of whole blocks; with a tail, `pages` is one more.
        fetches: op number of the fetch that brings each page, 0 for a page that is in host memory, int64 [pages]; None
            if all pages are in host memory.
        straight: the last blocks, if they are loaded straight from another tier; None if there are none. A share with
            such blocks has no tail.
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
        """Whether the share has no tail, and none of its blocks is being fetched."""
        return self.fetches is None and not self.has_tail

    def followed_by(self, held: HeldPages) -> GroupLease:
        """Returns a new lease: this lease's blocks, then the blocks in `held`, which follow them in the request.
        Precondition: all these blocks are in host memory.
        """
        return GroupLease(
            np.concatenate((self.entries, held.entries)),
            np.concatenate((self.slots, held.slots)),
            self.first_block,
            self.blocks + len(held.entries),
        )


@dataclass(slots=True)
class Lease:
    """The pages that a lookup promised to one request. They are not evicted while the lease exists.

    The figure shows the request's tokens, and where the KV of each part comes from:

        |  the engine's own  |  whole blocks of the lease  |  its partial tail  |  computed by the engine
        0                start_tokens                  + tokens           + tail_tokens

    Attributes:
        groups: the share of each KV group.
        since_s: clock time at which the lease was made.
        start_tokens: number of tokens that the engine had itself: whole blocks of every group.
        tokens: number of tokens promised after the start: whole blocks of every group.
        tail_tokens: number of tokens in the partial tail; 0 without a tail.
        cut: whether more tokens were found but not promised, because the limit of promised pages was reached.
        by_tier: number of promised tokens that each tier supplied; see `MatchResult`.
        shared_tokens: number of leading tokens shared with earlier requests; see `MatchResult`.
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
    on.

    Returns an empty tuple if the request has neither a lease nor held pages, or if the lease and the held pages cannot
    be joined. They cannot be joined in these cases: the lease has another start, a tail or blocks that are being
    fetched; not every group has exactly one record of held pages; or pages are held although the lease has blocks that
    are loaded straight.

    Args:
        start_tokens: number of tokens that the engine has itself now.
        start_block: number of blocks that `start_tokens` tokens fill.
    """
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
