"""Host memory as a tier: the hub manages its pages, and its routes plan loads and stores."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flexkv.cache.base import EntryIds
from flexkv.cache.tiers.contract import Tier, TierCounts, TierFacts
from flexkv.cache.tiers.host.load_route import HostLoads
from flexkv.cache.tiers.host.store_route import HostStores
from flexkv.cache.tiers.tables import TierContext
from flexkv.facts.keys import Keys


class HostTier(Tier):
    """The tier of host memory, which is the first tier of every manager."""

    facts = TierFacts("host memory")

    def __init__(self, context: TierContext) -> None:
        tables = context.tables
        self._hub = tables.hub
        self.presence = tables.hub.presence
        self.counts = TierCounts()
        self.loads = HostLoads(tables)
        self.stores = HostStores(tables)

    def leading(self, group: int, keys: Keys) -> EntryIds:
        return self.presence.match_prefix(group, keys)

    def present(self, group: int, keys: Keys) -> NDArray[np.bool_]:
        return self._hub.there(group, keys)

    def forget(self, group: int, keys: Keys) -> int:
        return self._hub.remove(group, self.presence.find(group, keys, ready_only=False))

    def begin_reset(self) -> None:
        self.presence.clear()
        self._hub.times.clear()

    def finish_reset(self, ends_s: float) -> None:
        """Does nothing, because no page in host memory survives the process."""

    def poll(self, now_s: float) -> None:
        """Does nothing, because host memory has no events, such as a lost disk, to report."""
