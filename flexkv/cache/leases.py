"""Lookup leases: what `match` promised to a request and keeps from being evicted until it is loaded or released."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flexkv.errors import ContractError
from flexkv.transfer.graph import PageTags, ReadIds, SlotIds

EntryIds = NDArray[np.uint32]
"""Entries of the native block index, each pinned once for every lease that names it."""

NO_ENTRIES: EntryIds = np.empty(0, np.uint32)

NO_ENTRY = np.uint32(0xFFFFFFFF)
"""In place of an entry: the index does not know the key."""


@dataclass(frozen=True, slots=True)
class DiskLease:
    """Pages of one group, each leased in the disk index.

    Attributes:
        entries: of the disk index, uint32 [pages].
        places: of the entries, int32 [pages].
        tags: what the places must hold, uint8 [pages, TAG_BYTES].
    """

    entries: EntryIds
    places: SlotIds
    tags: PageTags

    def __len__(self) -> int:
        return len(self.entries)

    def at(self, positions: NDArray[np.intp]) -> DiskLease:
        return DiskLease(self.entries[positions], self.places[positions], self.tags[positions])


@dataclass(slots=True)
class GroupLease:
    """One group's share of a promise: whole blocks, then (in the same arrays) the partial tail if there is one.

    Attributes:
        entries: of what is in host memory, or on its way there, uint32 [pages].
        slots: int32 [pages].
        first_block: number in the request of the first block.
        blocks: whole blocks; `pages` is one more when there is a tail.
        reads: int64 [pages], of each page the read from disk that brings it, or 0; None when all are there.
        on_disk: the blocks that follow and are loaded from where they lie; then there is no tail.
    """

    entries: EntryIds
    slots: SlotIds
    first_block: int
    blocks: int
    reads: ReadIds | None = None
    on_disk: DiskLease | None = None

    @property
    def pages(self) -> int:
        return len(self.entries) + (0 if self.on_disk is None else len(self.on_disk))

    @property
    def has_tail(self) -> bool:
        return self.pages > self.blocks


@dataclass(slots=True)
class Lease:
    """A promise to one request.

    Attributes:
        since_s: the clock when it was made.
    """

    groups: tuple[GroupLease, ...]
    since_s: float

    @property
    def pages(self) -> int:
        return sum(group.pages for group in self.groups)


class LeaseTable:
    """The lookup leases by request, oldest first, with the pages they reserve."""

    def __init__(self) -> None:
        self._leases: dict[str, Lease] = {}
        self.reserved_pages = 0

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases.values())

    def get(self, request_id: str) -> Lease | None:
        return self._leases.get(request_id)

    def add(self, request_id: str, lease: Lease) -> None:
        """The request must have none."""
        assert request_id not in self._leases
        self._leases[request_id] = lease
        self.reserved_pages += lease.pages

    def pop(self, request_id: str) -> Lease | None:
        lease = self._leases.pop(request_id, None)
        if lease is not None:
            self.reserved_pages -= lease.pages
        return lease

    def older_than(self, since_s: float) -> list[str]:
        """Requests whose lease was made before `since_s`. Costs no more than those, as leases are kept in order."""
        expired = []
        for request_id, lease in self._leases.items():
            if lease.since_s >= since_s:
                break
            expired.append(request_id)
        return expired

    def requests(self) -> list[str]:
        return list(self._leases)

    def check_integrity(self) -> None:
        """
        Raises:
            ContractError: another number of pages is counted than is leased.
        """
        pages = sum(lease.pages for lease in self)
        if pages != self.reserved_pages:
            raise ContractError(f"{self.reserved_pages} pages are counted as reserved, not {pages}")
