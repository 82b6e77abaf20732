"""The list of tiers that a unit may have, and the factories of those that it has."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from flexkv.cache.tiers.contract import Plane, TierFacts
from flexkv.cache.tiers.disk.plan import plan_disk
from flexkv.cache.tiers.disk.tier import DiskTier, DiskTraffic
from flexkv.cache.tiers.host.tier import HostTier
from flexkv.cache.tiers.peer_folders.plan import plan_peer_folders
from flexkv.cache.tiers.peer_folders.tier import PeerPlane, PeerTier
from flexkv.cache.tiers.plan import PlanTier, TierPlan, UnitFacts
from flexkv.cache.tiers.remote import plan_remote
from flexkv.cache.tiers.running_peers.plan import plan_peer_host, plan_running_folders
from flexkv.cache.tiers.tables import TierFactory
from flexkv.storage.base import StoredPages, Volumes

TIERS: tuple[PlanTier, ...] = (
    plan_peer_host,
    plan_disk,
    plan_peer_folders,
    plan_running_folders,
    plan_remote,
)
"""The functions that plan the tiers behind host memory, in the order in which a lookup asks the tiers. A new tier is a
package with such a function, which is added here."""


def plan_tiers(unit: UnitFacts) -> list[TierPlan]:
    """Plans the tiers behind host memory that the unit's settings enable, in the order in which a lookup asks them."""
    return [planned for plan in TIERS if (planned := plan(unit)) is not None]


def unit_tiers(
    volumes: Volumes | None = None,
    traffic: DiskTraffic = DiskTraffic(),  # noqa: B008 - frozen
    plane: Plane | None = None,
    peers: StoredPages | None = None,
    peer_facts: TierFacts = TierFacts("peers"),  # noqa: B008 - frozen
    peer_plane: PeerPlane | None = None,
) -> Sequence[TierFactory]:
    """Returns the factories of host memory and of tiers whose storage the caller has already opened.

    Args:
        volumes: the unit's own disks; None for no disk tier.
        traffic: how the unit uses its disks.
        plane: runs ops on the unit's own disks; None if the caller runs them.
        peers: pages in other units' folders; None for no tier of peers.
        peer_facts: facts about the tier of peers.
        peer_plane: runs ops on the peers' pages; None if the caller runs them.
    """
    tiers: list[TierFactory] = [HostTier]
    if volumes is not None:
        tiers.append(partial(DiskTier, volumes=volumes, traffic=traffic, plane=plane))
    if peers is not None:
        tiers.append(partial(PeerTier, pages=peers, facts=peer_facts, plane=peer_plane))
    return tiers
