"""The memory and disks of one ownership unit: slot image, pool and manager, sized when every rank is known."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from flexkv.adapters.common.base import (
    PoolGrant,
    PoolId,
    RankFacts,
    RankPlace,
    UnitId,
    UnitOwner,
    random_id,
)
from flexkv.adapters.common.capacity import PromptLimit, TierCapacity
from flexkv.adapters.common.start_check import check_start
from flexkv.adapters.common.unit_disk import (
    UnitDisk,
    disk_group,
    disk_traffic,
    find_siblings,
    open_tier,
    overwritable,
    tiers_of,
)
from flexkv.c_ext import SlotImage
from flexkv.cache.base import CacheListener, GroupSpec, ManagerLimits
from flexkv.cache.manager import LocalCacheManager
from flexkv.cache.tiers.disk.load_route import GdsUse
from flexkv.cache.tiers.disk.tier import DiskTraffic
from flexkv.config import FlexKVConfig, read_memory, resolve_host_bytes
from flexkv.errors import CapacityError, GeometryError
from flexkv.observe import Counters, get_logger
from flexkv.storage.base import DiskTier
from flexkv.storage.siblings import Sibling
from flexkv.transfer.host_pool import MAX_EXTENT_BYTES, HostPool
from flexkv.transfer.slab_map import SlabMap
from flexkv.transfer.trailer import digest_areas

logger = get_logger(__name__)

START_WAIT_S = 10.0
"""How long the engine's start waits for the first extent (at most 1 GiB: half a second on an idle machine), so that
the first requests find room; the rest comes up while the engine runs."""

FAILED_LOAD_REST_S = 30.0
"""How long nothing is promised to an engine that ends a request whose load is late. Each try costs a client its
request, and what is slow for longer than `load.deadline_s` is seldom fast a moment later."""

EXPIRE_EVERY_S = 1.0
"""How often leases of lookups that were never followed up are looked through; they live for a minute by default."""


def share_of_node(config: FlexKVConfig, units: int) -> FlexKVConfig:
    """The configuration of one of `units` units on this node, unless it says the number itself."""
    if units <= 1 or config.origin("host.units_per_node") != "default":
        return config
    return config.model_copy(update={"host": config.host.model_copy(update={"units_per_node": units})})


@dataclass(frozen=True, slots=True)
class SlotGeometry:
    """Bytes of a slot, and each rank's share of it."""

    slot_bytes: int
    places: tuple[RankPlace, ...]

    @classmethod
    def of(cls, said: Sequence[RankFacts], ranks: int, verify: bool, tier: DiskTier | None) -> SlotGeometry:
        """Stripes, then the trailer: run digests where pages are verified, and all that a disk writes beside a page.

        Args:
            said: of each rank that has a stripe of its own; of one where all `ranks` hold the same bytes.
        """
        trailer_bytes, areas = digest_areas([rank.runs for rank in said]) if verify else (0, [])
        image = SlotImage([rank.stripe_bytes for rank in said], trailer_bytes)
        digests = [image.trailer_offset + area for area in areas]
        if tier is not None and verify:
            digests = list(tier.digest_offsets(0))
        return cls(
            tier.image_bytes(0) if tier is not None else image.total_bytes,
            tuple(
                RankPlace(image.stripe_offset(rank), digests[rank] if digests else None)
                for rank in (range(ranks) if len(said) == ranks else [0] * ranks)
            ),
        )


@dataclass(slots=True)
class HostUnit:
    """One unit's host tier, and its disk tier if it has one.

    Attributes:
        places: each rank's share of a slot.
        grant: what the workers need to map the pool; None once all have it.
        workers_pin: workers in other processes register the memory with their own devices.
        slots: of the pool, once all of it is up.
        usable: False after a rank could not use the pool: then nothing is promised and nothing stored.
        disk: None without a disk tier.
        slabs: for workers that load from the disks without a page of host memory; None where none does.
        unit_id: see `UnitId`.
        pools: of each rank, the engine's pool that this was made for.
    """

    pool: HostPool
    places: tuple[RankPlace, ...]
    manager: LocalCacheManager
    slots: int
    grant: PoolGrant | None = None
    usable: bool = True
    workers_pin: bool = False
    disk: UnitDisk | None = None
    slabs: SlabMap | None = None
    unit_id: UnitId = field(default_factory=lambda: UnitId(random_id()))
    pools: tuple[PoolId, ...] = ()
    _up: int = 0
    _evictions_said: int = 0
    _expire_at_s: float = 0.0
    _ready: dict[int, int] = field(default_factory=dict)

    @classmethod
    def create(
        cls,
        config: FlexKVConfig,
        block_tokens: int,
        num_blocks: int,
        handshakes: Mapping[int, RankFacts],
        shared: bool,
        listener: CacheListener | None,
        owner: UnitOwner,
        recomputes: bool = False,
        fails_requests: bool = True,
        prompt_limit: PromptLimit | None = None,
    ) -> HostUnit:
        """Opens the disks, sizes and creates pool and manager.

        Args:
            recomputes: see `disk_traffic`.
            fails_requests: the engine ends a request whose load fails; not of one that recomputes.
            prompt_limit: a tier that holds less is warned of; None where the engine does not tell.

        Raises:
            GeometryError: a rank is missing, or the ranks count different blocks.
            CapacityError: the memory does not hold one slot, or is not there.
            ConfigError: several settings cannot be had on this machine, or `host.numa_node`.
            FlexKVError: a folder of the disk tier cannot be used, or another process uses it.
        """
        ranks = len(handshakes)
        if sorted(handshakes) != list(range(ranks)):
            raise GeometryError(f"handshake of ranks {sorted(handshakes)}; expected 0 to {ranks - 1}")
        counts = {handshake.num_blocks for handshake in handshakes.values()}
        if counts != {num_blocks}:
            raise GeometryError(f"the ranks have {sorted(counts)} blocks, the scheduler {num_blocks}")
        said = [handshakes[rank] for rank in range(ranks)]
        if len({(rank.replicated, rank.stripe_bytes if rank.replicated else 0) for rank in said}) != 1:
            raise GeometryError(f"the ranks do not agree on whether they hold the same bytes: {said}")
        if said[0].replicated:
            del said[1:]
        check_start(config, ranks, overwritable(config, block_tokens, said, owner))
        traffic = disk_traffic(config, recomputes, said)
        with ExitStack() as taken:
            tier = None
            if config.disk.folders:
                tier = open_tier(config, block_tokens, said, owner, traffic.gds_stores)
                taken.callback(tier.close, config.transfer.close_s)
            siblings = find_siblings(config, block_tokens, said, owner) if tier is not None else []
            rest_s = FAILED_LOAD_REST_S if fails_requests and not recomputes else 0.0
            unit = cls._create(
                taken,
                config,
                block_tokens,
                said,
                shared,
                listener,
                tier,
                traffic,
                siblings,
                ranks,
                prompt_limit,
                rest_s,
            )
            taken.pop_all()
        unit.pools = tuple(handshakes[rank].pool_id for rank in range(ranks))
        return unit

    @classmethod
    def _create(
        cls,
        taken: ExitStack,
        config: FlexKVConfig,
        block_tokens: int,
        said: Sequence[RankFacts],
        shared: bool,
        listener: CacheListener | None,
        tier: DiskTier | None,
        traffic: DiskTraffic,
        siblings: Sequence[Sibling],
        ranks: int,
        prompt_limit: PromptLimit | None,
        rest_s: float,
    ) -> HostUnit:
        """
        Args:
            taken: is given what must end where this fails.
        """
        slot = SlotGeometry.of(said, ranks, config.host.verify, tier)
        pool = _make_pool(config, block_tokens, slot.slot_bytes, ranks, shared)
        taken.callback(pool.close)
        group = None if tier is None else disk_group(config, block_tokens, said)
        limits = ManagerLimits(
            ranks=ranks,
            inflight_store_pages=config.store.inflight_pages,
            inflight_load_pages=config.load.inflight_pages,
            lease_s=config.load.lease_s,
            rest_s=rest_s,
        )
        manager = LocalCacheManager(
            [GroupSpec(block_tokens, pool.slots)],
            limits,
            policy=config.index.policy,
            listener=listener,
            compute_if_faster=config.disk.compute_if_faster,
            tiers=tiers_of(config, tier, traffic, pool, siblings, group),
        )
        for behind in manager.tiers:
            if behind.plane is not None:
                # A disk's files stay open, and its folder locked, until its engine has ended.
                taken.callback(behind.plane.close, config.transfer.close_s)
        _log_host_tier(config, pool, block_tokens, ranks, prompt_limit)
        unit = cls(pool, slot.places, manager, pool.slots)
        if tier is not None:
            unit.disk = UnitDisk(config, pool, manager)
            if traffic.gds_loads is not GdsUse.NEVER:
                unit.slabs = tier.slab_map()
            unit.disk.log_capacity(block_tokens, slot.slot_bytes, prompt_limit)
        return unit

    def make_grant(self, on_device: bool) -> PoolGrant:
        """What workers in other processes need to map the pool.

        Args:
            on_device: the engine's pool lies on devices, whose processes register the memory before they use it.
        """
        self.workers_pin = on_device
        return PoolGrant(self.unit_id, self.pools, self.pool.descriptor(), self.places, self.slabs)

    def heard(self, ready: Mapping[int, int]) -> None:
        """Ranks said how many slots they can use."""
        self._ready.update(ready)
        if self.grant is not None and len(self._ready) == len(self.places):
            self.grant = None

    def grow(self) -> None:
        """Lets the manager use what has come up since."""
        up = self.pool.ready_slots
        if self.workers_pin:
            # Each worker registers the memory with its own device, which takes a while and may fall short. On a host
            # device a slot is up for all at once, and workers map the pool before they touch it.
            up = min(up, *self._ready.values()) if len(self._ready) == len(self.places) else 0
        if up > self._up:
            self._up = up
            self.manager.grow(0, up)

    @property
    def disk_busy(self) -> bool:
        """Whether the disks have something to do."""
        return self.disk is not None and self.disk.busy

    def pump(self) -> bool:
        """Gives the disks what there is to do; whether anything may have changed. Never waits."""
        return self.disk is not None and self.disk.pump()

    def expire_if_due(self, counters: Counters) -> None:
        """Ends leases of lookups that were never followed up, if it is time to look."""
        now_s = time.monotonic()
        if now_s >= self._expire_at_s:
            self._expire_at_s = now_s + EXPIRE_EVERY_S
            counters.add("flexkv_expired_leases_total", self.manager.expire())

    def disable(self, rank: int, error: str) -> None:
        """A rank cannot use the pool: the engine goes on without a cache."""
        if self.usable:
            logger.error("host tier is off: rank %d: %s", rank, error)
            self.usable = False

    def stop_gds(self, rank: int, reason: str) -> None:
        """A rank cannot load from the disks without a page of host memory: blocks on disk come up first, for good."""
        if self.disk is not None:
            self.disk.stop_gds(f"rank {rank}: {reason}")

    def count(self, counters: Counters) -> None:
        """Sets the gauges."""
        counters.set("flexkv_host_slots", self._up)
        counters.set("flexkv_host_slots_used", self._up - self.manager.free_slots(0))
        counters.set("flexkv_inflight_ops", self.manager.inflight_ops())
        evictions = self.manager.stats().evicted_blocks
        counters.add("flexkv_evictions_total", evictions - self._evictions_said)
        self._evictions_said = evictions
        if self.disk is not None:
            self.disk.count(counters)

    def close(self) -> None:
        """Ends the disk tier, and gives the memory back once the last worker has let go of it."""
        if self.disk is not None:
            self.disk.close()
        self.manager.flush_log()
        self.pool.close()


def _log_host_tier(
    config: FlexKVConfig, pool: HostPool, block_tokens: int, ranks: int, limit: PromptLimit | None
) -> None:
    per_rank = config.host.bytes_per_rank is not None
    setting, shares = ("host.bytes_per_rank", ranks) if per_rank else ("host.bytes", 1)
    capacity = TierCapacity("host tier", pool.slots, block_tokens, pool.slot_bytes, setting, shares)
    capacity.log(logger, limit, f", for {ranks} rank(s)")


def _make_pool(
    config: FlexKVConfig, block_tokens: int, slot_bytes: int, ranks: int, shared: bool
) -> HostPool:
    memory = read_memory()
    size = resolve_host_bytes(config, ranks, memory.usable, memory.huge_page_bytes * memory.huge_pages_free)
    slots = size // slot_bytes
    if slots < 1:
        raise CapacityError(
            f"{size} bytes of host memory hold no slot of {slot_bytes} bytes (one block of {block_tokens} tokens over "
            f"{ranks} ranks): set host.bytes to some thousand times {slot_bytes}"
        )
    extent_bytes = min(MAX_EXTENT_BYTES, max(config.host.extent_bytes, slot_bytes))
    pool = HostPool(
        slot_bytes,
        slots,
        shared=shared,
        extent_bytes=extent_bytes,
        huge_pages=config.host.huge_pages,
        numa_node=config.host.numa_node,
    )
    if not pool.wait_ready(min(slots, max(1, extent_bytes // slot_bytes)), START_WAIT_S):
        if pool.stopped_reason:
            logger.warning("host tier: no memory came up: %s", pool.stopped_reason)
        else:
            logger.warning(
                "host tier: none of its memory is up after %.0f s; it comes up meanwhile, and takes blocks as it does",
                START_WAIT_S,
            )
    return pool
