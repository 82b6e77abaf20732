"""The tier of pages in other units' folders."""

from __future__ import annotations

from typing import Protocol

from flexkv.cache.base import EntryIds
from flexkv.cache.tiers.contract import Plane, TierFacts
from flexkv.cache.tiers.stored_tier import StoredTier
from flexkv.cache.tiers.tables import TierContext
from flexkv.facts.keys import Keys
from flexkv.observe import get_logger
from flexkv.storage.base import StoredPages
from flexkv.transfer.graph import OpId, SlotIds, TransferOp

logger = get_logger(__name__)


class PeerPlane(Plane, Protocol):
    """A plane that reads and converts peers' pages."""

    @property
    def down_reason(self) -> str:
        """Why pages are no longer read; empty while they are read. A hanging disk is noticed when this property is
        read, so the tier reads it from time to time.
        """


class PeerTier(StoredTier):
    """The tier of pages in other units' folders. Pages are forgotten only in this process, because the folders belong
    to other units.

    Args:
        pages: the pages of all folders.
        facts: limits of the tier; see `TierFacts`.
        plane: reads and converts the pages; None if the caller does so.
    """

    def __init__(
        self,
        context: TierContext,
        pages: StoredPages,
        facts: TierFacts,
        plane: PeerPlane | None = None,
    ) -> None:
        super().__init__(context, pages, facts)
        self.plane = plane
        self._reader = plane

    def plan_fetch(
        self,
        op_id: OpId,
        group: int,
        keys: Keys,
        entries: EntryIds,
        places: SlotIds,
        slots: SlotIds,
        layerwise: bool,
    ) -> TransferOp:
        # Pages are never fetched layer by layer, because each page is converted as a whole.
        return super().plan_fetch(op_id, group, keys, entries, places, slots, layerwise=False)

    def begin_open(self, weights: bytes) -> int:
        return sum(self.retire(folder) for folder in self.pages.strange_disks(weights))

    def poll(self, now_s: float) -> None:
        if self._reader is None or self.down or not (reason := self._reader.down_reason):
            return
        self.down = reason
        logger.error("pages of other units' folders are out of use: %s", reason)
        for volume in range(self.pages.disks):
            self.lose(volume)
