"""Pages that go from the unit's own disks straight to engine blocks, with no page of host memory between (docs/gds.md).

Contract with the disk index: from the promise to the end of the load on every rank its entries are leased, so that
nobody writes their places. Each rank verifies what it brings against the tags; a page that fails is named to the
engine, which computes it, and is forgotten on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flexkv.cache.base import Keys
from flexkv.cache.disk_base import Straight
from flexkv.cache.disk_index import DiskIndex
from flexkv.cache.disk_rates import DiskRates
from flexkv.cache.leases import EntryIds
from flexkv.observe import get_logger
from flexkv.transfer.graph import PageTags, SlotIds

logger = get_logger(__name__)

REST_S = 60.0
"""After a rank's lane or a disk failed pages, nothing goes straight for so long: what hangs may end, the manager's own
lane judges the disk, and each try costs a request its hit."""


@dataclass(frozen=True, slots=True)
class StraightPages:
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

    def at(self, positions: NDArray[np.intp]) -> StraightPages:
        return StraightPages(self.entries[positions], self.places[positions], self.tags[positions])


class StraightLoads:
    """Leases pages for promises, and takes the ends of their loads.

    Args:
        straight: not NEVER.
        rates: of loads that went straight and of those through host memory; the former are measured here.

    Attributes:
        pages: being loaded.
    """

    def __init__(
        self, disk: DiskIndex, straight: Straight, rates: DiskRates, clock: Callable[[], float]
    ) -> None:
        self._disk = disk
        self._straight = straight
        self._rates = rates
        self._clock = clock
        self._rests_until_s = -np.inf
        self.pages = 0

    def wants(self, pages: int, queued_reads: int, now_s: float) -> bool:
        """Whether `pages` are to go straight rather than behind `queued_reads` others through host memory."""
        if now_s < self._rests_until_s:
            return False
        if self._straight is Straight.ALWAYS:
            return True
        return self._rates.straight_is_faster(pages, self.pages, queued_reads, now_s)

    def lease(self, parts: Sequence[tuple[int, Keys]]) -> list[StraightPages] | None:
        """The pages of all groups, if every one is on the unit's own disks; else None, and nothing is leased.

        What is also in host memory is read from disk all the same: a promise has one change from host to disk at most.
        """
        for group, keys in parts:
            if self._disk.reach(group, keys) < len(keys):
                return None
        return [StraightPages(*self._disk.begin_read(group, keys)) for group, keys in parts]

    def release(self, pages: StraightPages) -> None:
        """Ends the lease of pages that are not loaded."""
        self._disk.entries.unpin(pages.entries)

    def begin(self, pages: StraightPages) -> None:
        """These are being loaded."""
        self.pages += len(pages)

    def end(
        self,
        group: int,
        entries: EntryIds,
        places: SlotIds,
        failed: NDArray[np.bool_],
        suspect: NDArray[np.bool_],
        begun_s: float,
        ahead: int,
    ) -> None:
        """A load of these pages has ended on every rank, and so has its lease.

        Args:
            suspect: pages that did not hold what was asked for.
            ahead: pages that were being loaded when it was planned.
        """
        self.pages -= len(entries)
        now_s = self._clock()
        if not failed.any():
            self._rates.straight.see(ahead + len(entries), now_s - begun_s, now_s)
        counts = self._disk.counts
        counts.straight += int(np.count_nonzero(~failed))
        counts.failed_reads += int(np.count_nonzero(suspect))
        counts.unread += int(np.count_nonzero(failed & ~suspect))
        self._disk.end_read(group, entries, places, suspect)

    def rest(self, reason: str) -> None:
        """A rank's lane or a disk failed, or nothing was brought: for a while pages come up through host memory."""
        now_s = self._clock()
        if now_s >= self._rests_until_s:
            logger.warning("pages on disk go through host memory for the next %.0f s: %s", REST_S, reason)
        self._rests_until_s = now_s + REST_S
