"""The disk tier of one ownership unit: opened before host memory is sized, because a slot must hold what the disk
writes beside a page, and driven by the scheduler's thread, which it never makes wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from flexkv.adapters.common.base import RankFacts, UnitOwner
from flexkv.adapters.common.capacity import PromptLimit, TierCapacity
from flexkv.adapters.common.common_keys import COMMON
from flexkv.cache.ids import TierId
from flexkv.cache.manager import LocalCacheManager
from flexkv.cache.tier import TierCounts, TierFactory, TierFacts, WriteMode
from flexkv.cache.tiers.disk.load_route import GdsUse
from flexkv.cache.tiers.disk.tier import DiskTier, DiskTraffic
from flexkv.cache.tiers.factory import unit_tiers
from flexkv.cache.unit_driver import UnitDriver
from flexkv.config import FlexKVConfig
from flexkv.errors import GeometryError
from flexkv.observe import Counters, get_logger
from flexkv.storage.base import DiskGroup, DiskIdentity, DiskOptions
from flexkv.storage.base import DiskTier as Volumes
from flexkv.storage.folder_share import OwnBytes, bytes_per_folder, own_bytes, shared_file_systems
from flexkv.storage.sibling_pages import SiblingPages
from flexkv.storage.sibling_reader import SiblingReader
from flexkv.storage.siblings import Sibling, open_siblings
from flexkv.storage.unit import DiskUnit
from flexkv.transfer.engine import TransferEngine
from flexkv.transfer.host_pool import HostPool

logger = get_logger(__name__)

OPS_SHARE = 2
"""The control plane uses at most one in so many of the lane's queue places for each direction: a lane whose results
have not been polled yet still holds theirs."""

PROMISES_NEED = (
    "it needs an engine that computes what a load did not bring: vLLM with "
    '"kv_load_failure_policy":"recompute"'
)
GDS_NEEDS = f"{PROMISES_NEED}, and load.mode=async"


def disk_traffic(config: FlexKVConfig, recomputes: bool, said: Sequence[RankFacts]) -> DiskTraffic:
    """The bounds of the unit's traffic with its disks: the settings as this engine and its ranks can have them.

    Args:
        recomputes: the engine computes what a load did not bring.
    """
    disk = config.disk
    if disk.stream and disk.folders and not recomputes:
        logger.warning("disk.stream is off here: %s", PROMISES_NEED)
    gds_loads = _gds_loads(config, recomputes, said)
    gds_stores = disk.gds_stores and bool(disk.folders)
    if gds_stores and gds_loads is GdsUse.NEVER:
        logger.warning("disk.gds_stores is off here: %s", GDS_NEEDS)
        gds_stores = False
    facts = TierFacts(
        "disk",
        write=WriteMode(disk.mode),
        write_pages=disk.write_pages,
        fetch_pages=config.load.inflight_pages,
        waiting_pages=config.store.inflight_pages,
        fetch_ops=max(1, config.transfer.queue_ops // OPS_SHARE),
        wait_s=disk.wait_s,
        streams=disk.stream and recomputes,
        stream_layers=config.load.mode == "layerwise",
    )
    return DiskTraffic(facts, disk.ttl_s, gds_loads, gds_stores)


def _gds_loads(config: FlexKVConfig, recomputes: bool, said: Sequence[RankFacts]) -> GdsUse:
    """`disk.gds` as this engine and its ranks can have it."""
    disk = config.disk
    if disk.gds == "off" or not disk.folders:
        return GdsUse.NEVER
    if not recomputes or config.load.mode != "async":
        if disk.gds == "on":
            logger.warning("disk.gds=on is off here: %s", GDS_NEEDS)
        return GdsUse.NEVER
    if disk.gds == "on":
        return GdsUse.ALWAYS
    return GdsUse.WHERE_FASTER if all(rank.gpudirect for rank in said) else GdsUse.NEVER


def open_tier(
    config: FlexKVConfig, block_tokens: int, said: Sequence[RankFacts], owner: UnitOwner, sealed_apart: bool
) -> Volumes:
    """Opens the unit's folders.

    Args:
        sealed_apart: see `DiskOptions`.

    Raises:
        GeometryError: the ranks say different formats of their pages.
        FlexKVError: a folder is in use by another process, or cannot be used; says which and why.
    """
    group = disk_group(config, block_tokens, said)
    disk = config.disk
    identity = _identity(owner)
    for roots in shared_file_systems(disk):
        logger.warning(
            "disk.folders: %s lie on one file system, which striping over them does not make faster; name one folder a "
            "disk",
            " and ".join(map(str, roots)),
        )
    options = DiskOptions(
        bytes_per_disk=bytes_per_folder(disk, config.host.units_per_node, own_bytes(identity, group)),
        io=disk.io,
        depth=disk.depth,
        stuck_s=disk.stuck_s,
        register_buffers=disk.register_buffers,
        sealed_apart=sealed_apart,
    )
    return DiskUnit.open(_folders(config), identity, [group], options)


def overwritable(
    config: FlexKVConfig, block_tokens: int, said: Sequence[RankFacts], owner: UnitOwner
) -> OwnBytes:
    """Bytes in a folder that the unit may write over.

    Raises:
        GeometryError: as `disk_group`.
    """

    def own(root: Path) -> int:
        return own_bytes(_identity(owner), disk_group(config, block_tokens, said))(root)

    return own


def disk_group(config: FlexKVConfig, block_tokens: int, said: Sequence[RankFacts]) -> DiskGroup:
    """The unit's pages as its disks see them.

    Raises:
        GeometryError: the ranks say different formats of their pages.
    """
    formats = {rank.format_id for rank in said}
    if len(formats) != 1:
        raise GeometryError(f"the ranks have pages of different formats: {', '.join(sorted(formats))}")
    return DiskGroup(
        format_id=said[0].format_id,
        stripe_bytes=tuple(rank.stripe_bytes for rank in said),
        runs=tuple(rank.run_table for rank in said),
        block_tokens=block_tokens,
        dtype=said[0].dtype,
        host_digests=config.host.verify,
    )


def find_siblings(
    config: FlexKVConfig, block_tokens: int, said: Sequence[RankFacts], owner: UnitOwner
) -> list[Sibling]:
    """What other engines, or other units, have left of this model in the unit's folders: with the common key scheme.

    With an engine's own keys another engine's pages lie in folders of another fingerprint.
    """
    if config.keys.scheme != COMMON:
        return []
    group = disk_group(config, block_tokens, said)
    return open_siblings(_folders(config), _identity(owner), group, said[0].heads)


def _folders(config: FlexKVConfig) -> list[Path]:
    return [Path(folder) for folder in config.disk.folders]


def _identity(owner: UnitOwner) -> DiskIdentity:
    return DiskIdentity(owner.model, owner.namespace, owner.unit)


def tiers_of(
    config: FlexKVConfig,
    volumes: Volumes | None,
    traffic: DiskTraffic,
    pool: HostPool,
    siblings: Sequence[Sibling],
    group: DiskGroup | None,
) -> Sequence[TierFactory]:
    """The tiers of the unit's manager, with their planes.

    Args:
        volumes: open; None without a disk tier.
        pool: the unit's host pool, made with slots of `volumes.image_bytes(0)` bytes.
        group: of the unit's pages; with siblings.
    """
    if volumes is None:
        return unit_tiers()
    transfer = config.transfer
    plane = TransferEngine(
        queue_ops=transfer.queue_ops, op_stuck_s=transfer.stuck_s, lanes=[volumes.lane([pool])]
    )
    if not siblings:
        return unit_tiers(volumes, traffic, plane)
    assert group is not None
    reader = SiblingReader(siblings, group, pool, transfer.queue_ops, config.disk.stuck_s)
    facts = replace(traffic.facts, name="peers", write=WriteMode.OFF, stream_layers=False)
    return unit_tiers(volumes, traffic, plane, SiblingPages(siblings), facts, reader)


class UnitDisk:
    """The disk tier of a unit, running.

    Args:
        manager: with a disk tier.
    """

    def __init__(self, config: FlexKVConfig, pool: HostPool, manager: LocalCacheManager) -> None:
        self._manager = manager
        (self._tier,) = (tier for tier in manager.tiers if isinstance(tier, DiskTier))
        self._volumes = self._tier.volumes
        self._driver = UnitDriver(manager, fail_read=pool.fail_read)
        self._close_s = config.transfer.close_s
        self._said = TierCounts()
        self._streamed_said = 0
        self._durable_said = 0

    def stop_gds(self, reason: str) -> None:
        """Blocks on disk are loaded through host memory from now on."""
        if self._tier.straight is not None:
            self._tier.straight.stop(reason)

    def log_capacity(self, block_tokens: int, block_bytes: int, limit: PromptLimit | None) -> None:
        """Logs what the disks in use have room for, and warns where that is less than one prompt."""
        alive, disks = sum(self._volumes.alive), self._volumes.disks
        blocks = self._volumes.slots(0) // disks * alive
        capacity = TierCapacity(
            "disk tier", blocks, block_tokens, block_bytes, "disk.bytes_per_folder", alive
        )
        there = len(self._tier)
        capacity.log(logger, limit, f", on {alive} of {disks} disk(s); {there} blocks there already")

    @property
    def busy(self) -> bool:
        """Whether something is being read or written, or waits for it."""
        return self._driver.busy

    def pump(self) -> bool:
        """Hands over what there is to do and takes what was done; whether there is news for `count`."""
        was_busy = self._driver.busy
        self._driver.poll()
        return was_busy or self._tier.durable_pages != self._durable_said

    def count(self, counters: Counters) -> None:
        """Adds what was counted since the last call, and sets the gauges."""
        now = self._counts()
        new = {
            field.name: getattr(now, field.name) - getattr(self._said, field.name) for field in fields(now)
        }
        self._said = now
        streamed = self._manager.stats().streamed_pages
        counters.add("flexkv_disk_pages_total", new["read"], direction="read")
        counters.add("flexkv_disk_pages_total", new["written"], direction="write")
        counters.add("flexkv_disk_failed_pages_total", new["failed_reads"], direction="read")
        counters.add("flexkv_disk_failed_pages_total", new["failed_writes"], direction="write")
        counters.add("flexkv_disk_lost_pages_total", new["dropped_writes"], reason="busy")
        counters.add("flexkv_disk_lost_pages_total", new["lost"], reason="evicted")
        counters.add("flexkv_disk_lost_pages_total", new["gone"], reason="disk")
        counters.add("flexkv_disk_evictions_total", new["evicted"])
        counters.add("flexkv_disk_expired_pages_total", new["expired"])
        counters.add("flexkv_disk_lookups_total", new["waits"], outcome="waited")
        counters.add("flexkv_disk_lookups_total", new["late"], outcome="late")
        counters.add("flexkv_disk_lookups_total", new["left"], outcome="computed")
        counters.add("flexkv_disk_left_pages_total", new["left_pages"])
        counters.add("flexkv_disk_streamed_pages_total", streamed - self._streamed_said)
        self._streamed_said = streamed
        counters.add("flexkv_disk_gds_pages_total", new["gds_read"], direction="read")
        counters.add("flexkv_disk_gds_pages_total", new["gds_written"], direction="write")
        counters.add("flexkv_disk_durable_pages_total", self._tier.durable_pages - self._durable_said)
        self._durable_said = self._tier.durable_pages
        entries = self._tier.presence
        counters.set("flexkv_disk_slots", entries.up_slots(0))
        counters.set("flexkv_disk_slots_used", len(entries))
        counters.set("flexkv_disks", sum(self._volumes.alive))
        cost, number = self._manager.cost, TierId(self._manager.tiers.index(self._tier))
        lines = (("read", cost.fetch(number)), ("load", cost.load), ("gds", cost.straight(number)))
        for what, line in lines:
            counters.set("flexkv_disk_page_seconds", line.line()[1], what=what)
        counters.set("flexkv_compute_token_seconds", cost.compute.line()[1])

    def _counts(self) -> TierCounts:
        """Of all tiers behind host memory together."""
        return TierCounts(
            **{
                field.name: sum(getattr(tier.counts, field.name) for tier in self._manager.tiers[1:])
                for field in fields(TierCounts)
            }
        )

    def close(self) -> bool:
        """Writes what waits and makes it durable, within `transfer.close_s`."""
        return self._driver.close(self._close_s)
