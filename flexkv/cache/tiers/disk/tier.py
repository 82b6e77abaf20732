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
        facts: limits and modes; see `TierFacts`.
        ttl_s: whole seconds after which a written page is a miss; None for never.
        gds_loads: when whole blocks are loaded from disk without passing through host memory. Other than NEVER only if
            the workers have a lane for such loads and a page may fail to load: then either the engine computes the
            page, or the request fails (`disk.gds_may_fail_requests`).
        gds_stores: whether blocks are stored straight to disk instead of in host memory.
    """

    facts: TierFacts = TierFacts("disk")  # noqa: RUF009 - frozen
    ttl_s: int | None = None
    gds_loads: GdsUse = GdsUse.NEVER
    gds_stores: bool = False


class DiskTier(DiskPages):
    """The tier of the unit's own disks. Adds straight loads and stores to `DiskPages`, if the unit uses them.

    Args:
        volumes: the open folders; closed with the tier.
        traffic: how the unit uses its disks.
        plane: runs DISK_READ, DISK_WRITE and DISK_SEAL ops; None if the caller runs them.

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
