"""Plans the tier of other units' folders, before any folder is opened."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from flexkv.cache.tiers.contract import WriteMode
from flexkv.cache.tiers.disk.plan import disk_facts, disk_folders, disk_groups, disk_identity
from flexkv.cache.tiers.peer_folders.tier import PeerTier
from flexkv.cache.tiers.plan import TierPlan, UnitFacts
from flexkv.cache.tiers.tables import TierFactory
from flexkv.storage.peer_folders import open_peer_folders
from flexkv.storage.peer_pages import PeerPages
from flexkv.storage.peer_reader import PeerReader
from flexkv.transfer.host_pool import HostPool


def plan_peer_folders(unit: UnitFacts) -> TierPlan | None:
    """Plans the tier of other units' folders. Returns None if the unit has no folders or does not use the common key
    scheme: with an engine's own keys, other engines' pages are in folders with another fingerprint."""
    config = unit.config
    return PeersPlan(unit) if config.disk.folders and config.keys.scheme == "common" else None


class PeersPlan(TierPlan):
    """The plan of the tier of pages that other engines or units with this model have left in the unit's folders."""

    def __init__(self, unit: UnitFacts) -> None:
        self._unit = unit

    def open(self, pool: HostPool, on_error: ExitStack) -> TierFactory | None:
        unit, config = self._unit, self._unit.config
        # With keys that engines share, a unit has one group.
        (group,), heads = disk_groups(unit), unit.ranks[0].groups[0].heads
        peers = open_peer_folders(disk_folders(unit), disk_identity(unit), group, heads)
        if not peers:
            return None
        reader = PeerReader(peers, [group], pool, config.transfer.queue_ops, config.disk.stuck_s)
        on_error.callback(reader.close, config.transfer.close_s)
        facts = replace(disk_facts(unit), name="peers", write=WriteMode.OFF, stream_layers=False)
        return partial(PeerTier, pages=PeerPages(peers), facts=facts, plane=reader)
