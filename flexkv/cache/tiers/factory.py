"""Makes a manager with the tiers that a unit has."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from flexkv.cache.tier import Plane, TierFactory, TierFacts
from flexkv.cache.tiers.disk.tier import DiskTier, DiskTraffic
from flexkv.cache.tiers.host.tier import HostTier
from flexkv.cache.tiers.peers.tier import PeerPlane, PeerTier
from flexkv.storage.base import DiskTier as Volumes
from flexkv.storage.base import StoredPages


def unit_tiers(
    volumes: Volumes | None = None,
    traffic: DiskTraffic = DiskTraffic(),  # noqa: B008 - frozen
    plane: Plane | None = None,
    peers: StoredPages | None = None,
    peer_facts: TierFacts = TierFacts("peers"),  # noqa: B008 - frozen
    peer_plane: PeerPlane | None = None,
) -> Sequence[TierFactory]:
    """The tiers of one unit, in the order in which a lookup asks them.

    Args:
        volumes: of the unit's own disks; None for none.
        plane: of those; None where the caller moves pages.
        peers: pages of other units' folders; None for none.
        peer_plane: of those.
    """
    tiers: list[TierFactory] = [HostTier]
    if volumes is not None:
        tiers.append(partial(DiskTier, volumes=volumes, traffic=traffic, plane=plane))
    if peers is not None:
        tiers.append(partial(PeerTier, pages=peers, facts=peer_facts, plane=peer_plane))
    return tiers
