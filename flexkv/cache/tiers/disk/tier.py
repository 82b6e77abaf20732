"""The unit's own disks as a tier: pages that go by way of host memory, or straight."""

from __future__ import annotations

from dataclasses import dataclass

from flexkv.cache.tiers.contract import Plane, TierFacts
from flexkv.cache.tiers.disk.load_route import GdsLoads, GdsUse
from flexkv.cache.tiers.disk.pages import DiskPages
from flexkv.cache.tiers.disk.store_route import GdsStores
from flexkv.cache.tiers.tables import TierContext
from flexkv.storage.base import Volumes


@dataclass(frozen=True, slots=True)
class DiskTraffic:
    """How one unit uses its disks.

    Attributes:
        facts: bounds and modes.
        ttl_s: pages are a miss this long after they were written, in whole seconds; None for never.
        gds_loads: when whole blocks are loaded from disk without a page of host memory. Only for an engine that
            computes what a load did not bring, whose workers have the lane for it.
        gds_stores: blocks are stored on disk without a page of host memory, and not in host memory.
    """

    facts: TierFacts = TierFacts("disk")  # noqa: RUF009 - frozen
    ttl_s: int | None = None
    gds_loads: GdsUse = GdsUse.NEVER
    gds_stores: bool = False


class DiskTier(DiskPages):
    """Adds to `DiskPages` the ways past host memory that its unit uses.

    Args:
        volumes: the open folders; closed with the tier.
        plane: runs DISK_READ, DISK_WRITE and DISK_SEAL; None where the caller does.

    Raises:
        ConfigError: a time to live that is not positive.
    """

    def __init__(
        self,
        context: TierContext,
        volumes: Volumes,
        traffic: DiskTraffic,
        plane: Plane | None = None,
    ) -> None:
        super().__init__(context, volumes, traffic.facts, traffic.ttl_s, plane)
        if traffic.gds_loads is not GdsUse.NEVER:
            self.straight = self.loads = GdsLoads(self, context, traffic.gds_loads)
        if traffic.gds_stores:
            self.stores = GdsStores(self, context, traffic.facts.write_pages)
