"""Plans the tier of a unit's own disks from its settings, before any folder is opened."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from flexkv.cache.tiers.contract import TierFacts, WriteMode
from flexkv.cache.tiers.disk.load_route import GdsUse
from flexkv.cache.tiers.disk.tier import DiskTier, DiskTraffic
from flexkv.cache.tiers.plan import ImageNeeds, TierPlan, UnitFacts
from flexkv.cache.tiers.tables import TierFactory
from flexkv.errors import GeometryError
from flexkv.facts.ranks import GroupFacts, KvGroup
from flexkv.observe import get_logger
from flexkv.storage.base import DiskGroup, DiskIdentity, DiskOptions
from flexkv.storage.folder_share import (
    OwnBytes,
    WholeSlots,
    bytes_per_folder,
    own_bytes,
    shared_file_systems,
    whole_slots,
)
from flexkv.storage.group_tables import codec_of
from flexkv.storage.striped_slabs import StripedSlabs
from flexkv.transfer.engine import TransferEngine
from flexkv.transfer.host_pool import HostPool
from flexkv.transfer.slab_map import SlabMap

logger = get_logger(__name__)

OPS_SHARE = 2
"""In each direction, reads or writes, the manager uses at most one in this many of the lane's queue entries. An op
occupies its entry until its result is polled."""

PROMISES_NEED = (
    "it needs an engine that computes what a load did not bring: vLLM with "
    '"kv_load_failure_policy":"recompute"'
)
GDS_NEEDS = f"{PROMISES_NEED}; or disk.gds_may_fail_requests, with which a page that fails costs its request"
ONE_GROUP = "it is for models with one KV group"


def plan_disk(unit: UnitFacts) -> TierPlan | None:
    """Plans the disk tier; returns None if `disk.folders` is empty.

    Raises:
        GeometryError: the ranks report different page formats.
    """
    return DiskPlan(unit) if unit.config.disk.folders else None


class DiskPlan(TierPlan):
    """The plan of the disk tier; `plan_disk` makes it."""

    def __init__(self, unit: UnitFacts) -> None:
        self._unit = unit
        self._groups = disk_groups(unit)
        self._traffic = disk_traffic(unit)
        self.images = tuple(image_needs(group) for group in self._groups)
        self._slabs: SlabMap | None = None

    def open(self, pool: HostPool, on_error: ExitStack) -> TierFactory:
        """Opens the folders; see `TierPlan.open`.

        Raises:
            FlexKVError: a folder is in use by another process, or cannot be used; the message says which and why.
        """
        config = self._unit.config
        disk, transfer = config.disk, config.transfer
        for roots in shared_file_systems(disk):
            logger.warning(
                "disk.folders: %s lie on one file system, which striping over them does not make faster; name one "
                "folder a disk",
                " and ".join(map(str, roots)),
            )
        identity = disk_identity(self._unit)
        options = DiskOptions(
            bytes_per_disk=bytes_per_folder(
                disk, config.host.units_per_node, own_bytes(identity, *self._groups)
            ),
            io=disk.io,
            depth=disk.depth,
            stuck_s=disk.stuck_s,
            register_buffers=disk.register_buffers,
            sealed_apart=self._traffic.gds_stores,
        )
        volumes = StripedSlabs.open(disk_folders(self._unit), identity, self._groups, options)
        on_error.callback(volumes.close, transfer.close_s)
        plane = TransferEngine(
            queue_ops=transfer.queue_ops,
            op_stuck_s=transfer.stuck_s,
            lanes=[volumes.lane([pool] * len(self._groups))],
        )
        on_error.callback(plane.close, transfer.close_s)
        if self._traffic.gds_loads is not GdsUse.NEVER:
            self._slabs = volumes.slab_map()
        return partial(DiskTier, volumes=volumes, traffic=self._traffic, plane=plane)

    def slab_map(self) -> SlabMap | None:
        return self._slabs


def disk_traffic(unit: UnitFacts) -> DiskTraffic:
    """Returns how the unit uses its disks: as its settings ask, except for uses of which this engine or its ranks are
    not capable. Logs a warning about each setting that cannot be fulfilled.
    """
    disk = unit.config.disk
    if disk.stream and not (unit.recomputes and len(unit.groups) == 1):
        logger.warning("disk.stream is off here: %s", PROMISES_NEED if not unit.recomputes else ONE_GROUP)
    gds_loads = _gds_loads(unit)
    gds_stores = disk.gds_stores
    if gds_stores and gds_loads is GdsUse.NEVER:
        logger.warning("disk.gds_stores is off here: %s", _gds_needs(unit))
        gds_stores = False
    return DiskTraffic(disk_facts(unit), disk.ttl_s, gds_loads, gds_stores)


def disk_facts(unit: UnitFacts) -> TierFacts:
    """Returns the limits and modes with which the unit reads and writes its folders."""
    config = unit.config
    disk = config.disk
    return TierFacts(
        "disk",
        write=WriteMode(disk.mode),
        write_pages=disk.write_pages,
        fetch_pages=config.load.inflight_pages,
        waiting_pages=config.store.inflight_pages,
        fetch_ops=max(1, config.transfer.queue_ops // OPS_SHARE),
        wait_s=disk.wait_s,
        streams=disk.stream and unit.recomputes and len(unit.groups) == 1,
        stream_layers=config.load.mode == "layerwise",
    )


def _gds_loads(unit: UnitFacts) -> GdsUse:
    """Returns when straight loads are used: as `disk.gds` says, or never if this engine or its ranks cannot do them."""
    wanted = unit.config.disk.gds
    if wanted == "off":
        return GdsUse.NEVER
    may_fail = unit.recomputes or unit.config.disk.gds_may_fail_requests
    if len(unit.groups) > 1 or not may_fail:
        if wanted == "on":
            logger.warning("disk.gds=on is off here: %s", _gds_needs(unit))
        return GdsUse.NEVER
    if wanted == "on":
        return GdsUse.ALWAYS
    # A load inside a step would make all requests of the step wait for the disk.
    if unit.config.load.mode != "async" or not all(rank.gpudirect for rank in unit.ranks):
        return GdsUse.NEVER
    return GdsUse.WHERE_FASTER


def _gds_needs(unit: UnitFacts) -> str:
    return ONE_GROUP if len(unit.groups) > 1 else GDS_NEEDS


def disk_groups(unit: UnitFacts) -> list[DiskGroup]:
    """Returns the descriptions of the unit's groups for the disks. All groups use the slabs of the first group.

    Raises:
        GeometryError: the ranks report different page formats.
    """
    return [
        _disk_group(
            group,
            [rank.groups[number] for rank in unit.ranks],
            unit.config.host.verify,
            shares=0 if number else None,
        )
        for number, group in enumerate(unit.groups)
    ]


def _disk_group(
    group: KvGroup, ranks: Sequence[GroupFacts], host_digests: bool, shares: int | None
) -> DiskGroup:
    formats = {rank.format_id for rank in ranks}
    if len(formats) != 1:
        raise GeometryError(f"the ranks have pages of different formats: {', '.join(sorted(formats))}")
    return DiskGroup(
        format_id=ranks[0].format_id,
        stripe_bytes=tuple(rank.stripe_bytes for rank in ranks),
        runs=tuple(rank.run_table for rank in ranks),
        block_tokens=group.block_tokens,
        dtype=ranks[0].dtype,
        host_digests=host_digests,
        rule=group.rule.value,
        reach=group.reach,
        signature=group.signature,
        shares=shares,
    )


def image_needs(group: DiskGroup) -> ImageNeeds:
    """Returns the space that the tier needs in a host slot for a page of the group with its trailer."""
    codec = codec_of(group)
    ranks = range(codec.ranks) if group.host_digests else ()
    return ImageNeeds(codec.image_bytes, tuple(codec.digest_offset(rank) for rank in ranks))


def disk_identity(unit: UnitFacts) -> DiskIdentity:
    return DiskIdentity(unit.owner.model, unit.owner.namespace, unit.owner.unit)


def disk_folders(unit: UnitFacts) -> list[Path]:
    return [Path(folder) for folder in unit.config.disk.folders]


def overwritable(unit: UnitFacts) -> OwnBytes:
    """Returns a function from a folder to the number of bytes in it that the unit may overwrite. The function raises
    GeometryError if the ranks report different page formats.
    """

    def own(root: Path) -> int:
        return own_bytes(disk_identity(unit), *disk_groups(unit))(root)

    return own


def whole_slots_of(unit: UnitFacts) -> WholeSlots:
    """Returns a function that rounds a number of bytes down to whole slots of the unit. The function raises
    GeometryError if the ranks report different page formats.
    """

    def whole(asked: int) -> int:
        return whole_slots(*disk_groups(unit))(asked)

    return whole
