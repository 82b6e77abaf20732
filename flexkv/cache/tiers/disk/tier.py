"""The unit's own disks as a tier: pages go through host memory, or straight to and from engine blocks."""

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
        ttl_s: whole seconds after which a written page is a miss; None for never.
        gds_loads: when whole blocks are loaded from disk without passing through host memory. Only if a load may fail
            pages (the engine computes them, or `disk.gds_may_fail_requests`), and if the workers have the lane for it.
        gds_stores: blocks are stored straight on disk, and not in host memory.
    """

    facts: TierFacts = TierFacts("disk")  # noqa: RUF009 - frozen
    ttl_s: int | None = None
    gds_loads: GdsUse = GdsUse.NEVER
    gds_stores: bool = False


class DiskTier(DiskPages):
    """Adds to `DiskPages` the routes past host memory that its unit uses.

    Args:
        volumes: the open folders; closed with the tier.
        plane: runs DISK_READ, DISK_WRITE and DISK_SEAL; None if the caller does.

    Raises:
        ConfigError: the time to live is not positive.
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
