"""Plans the tiers of running peers' pages, and the sharing of this unit's own pages with its peers."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Literal

from flexkv.c_ext import PeerDirectory
from flexkv.cache.tiers.contract import Tier, WriteMode
from flexkv.cache.tiers.disk.pages import DiskPages
from flexkv.cache.tiers.disk.plan import disk_facts, disk_folders, disk_groups, disk_identity, image_needs
from flexkv.cache.tiers.plan import TierPlan, UnitFacts
from flexkv.cache.tiers.running_peers.tier import LivePeerTier
from flexkv.cache.tiers.tables import TierContext, TierFactory
from flexkv.config import FlexKVConfig
from flexkv.errors import ConfigError
from flexkv.observe import get_logger
from flexkv.peers.page_formats import UnitPages
from flexkv.peers.pool_reader import PoolReader
from flexkv.peers.share import PeerShare
from flexkv.peers.slab_reader import SlabReader
from flexkv.storage.folder import unit_folder
from flexkv.transfer.host_pool import HostPool

logger = get_logger(__name__)

HOST, FOLDERS = "peer-host", "peers"
"""Names of the tiers of running peers' host pools and folders, in settings, metrics and the log. The tier of folders
that were read at start (`peer_folders`) is also named `peers`, so the metrics count the two tiers of folders
together."""


def plan_share(unit: UnitFacts) -> PeerShare | None:
    """Plans the sharing with other units that the unit's settings enable; returns None if nothing is shared.

    Raises:
        ConfigError: `peers.store` is `once` but host memory is not shared, or folders are to be shared with other
            machines but not with units of this machine.
    """
    host, disk = shares(unit.config)
    if unit.config.peers.store == "once" and not host:
        raise ConfigError(
            f"peers.store: once with peers.share: {unit.config.peers.share}: it needs shared host memory; allowed are "
            "peers.share: auto and host+disk"
        )
    if unit.config.peers.across_machines and not disk:
        raise ConfigError(
            f"peers.across_machines: true with peers.share: {unit.config.peers.share} and disk.folders: "
            f"{','.join(unit.config.disk.folders) or 'none'}: it needs shared folders; allowed are at least one "
            "folder, and peers.share: auto, host+disk and disk"
        )
    if not host and not disk:
        return None
    groups, peers = disk_groups(unit), unit.config.peers
    heads = [group.heads for group in unit.ranks[0].groups]
    return PeerShare(
        peers.folder,
        disk_identity(unit),
        UnitPages(groups, heads, unit.config.keys.scheme == "common"),
        host,
        disk,
        peers.store == "once",
        peers.beat_s if peers.across_machines else None,
    )


def shares(config: FlexKVConfig) -> tuple[bool, bool]:
    """Returns whether host memory is shared, and whether folders are shared."""
    share = config.peers.share
    if share == "auto":
        share = usual_share(config)
    return share == "host+disk", share != "off" and bool(config.disk.folders)


def usual_share(config: FlexKVConfig) -> Literal["host+disk", "disk", "off"]:
    """Returns the meaning of `peers.share: auto` with these settings. Host memory is shared if several units start on
    the node or if `peers.store` is `once`. Folders are shared in any case."""
    return "host+disk" if config.host.units_per_node > 1 or config.peers.store == "once" else "disk"


def plan_peer_host(unit: UnitFacts) -> TierPlan | None:
    """Plans the tier of peers' host pools; returns None if host memory is not shared."""
    share = unit.share
    return None if share is None or share.host is None else PeerHostPlan(unit, share, share.host)


def plan_running_folders(unit: UnitFacts) -> TierPlan | None:
    """Plans the tier of running peers' folders; returns None if folders are not shared."""
    share = unit.share
    return None if share is None or share.disk is None else PeerFoldersPlan(unit, share, share.disk)


class PeerHostPlan(TierPlan):
    """The plan of the tier of peers' host pools. Its `open` also shows this unit's own pool to peers."""

    shares_pool = True

    def __init__(self, unit: UnitFacts, share: PeerShare, directory: PeerDirectory) -> None:
        self._unit, self._share, self._directory = unit, share, directory
        self._groups = disk_groups(unit)
        self.images = tuple(map(image_needs, self._groups)) if unit.config.host.verify else ()

    def open(self, pool: HostPool, on_error: ExitStack) -> TierFactory:
        config = self._unit.config
        share = self._share
        on_error.callback(share.close)
        reader = PoolReader(
            self._directory,
            share.other_format,
            self._groups,
            pool,
            config.transfer.queue_ops,
            config.disk.stuck_s,
        )
        on_error.callback(reader.close, config.transfer.close_s)
        facts = replace(
            disk_facts(self._unit), name=HOST, write=WriteMode.OFF, streams=False, stream_layers=False
        )

        def make(context: TierContext) -> Tier:
            board = share.show_host(context.tables.hub.presence, pool, pool.slots)
            context.tables.hub.board = board
            return LivePeerTier(context, self._directory, facts, share, reader, share.once)

        return make


class PeerFoldersPlan(TierPlan):
    """The plan of the tier of running peers' folders. Its `open` also shows this unit's own folders to peers."""

    def __init__(self, unit: UnitFacts, share: PeerShare, directory: PeerDirectory) -> None:
        self._unit, self._share, self._directory = unit, share, directory
        self._groups = disk_groups(unit)

    def open(self, pool: HostPool, on_error: ExitStack) -> TierFactory:
        unit, config, share = self._unit, self._unit.config, self._share
        on_error.callback(share.close)
        reader = SlabReader(
            self._directory,
            share.folders,
            self._groups,
            pool,
            config.transfer.queue_ops,
            config.disk.stuck_s,
        )
        on_error.callback(reader.close, config.transfer.close_s)
        facts = replace(disk_facts(unit), name=FOLDERS, write=WriteMode.OFF, stream_layers=False)
        identity = disk_identity(unit)
        folders = [unit_folder(root, identity, self._groups) for root in disk_folders(unit)]

        def make(context: TierContext) -> Tier:
            disk = next(tier for tier in context.tables.tiers if isinstance(tier, DiskPages))
            share.show_disk(disk.show(), folders)
            return LivePeerTier(context, self._directory, facts, share, reader)

        return make
