"""Builds a unit from its ranks' descriptions: slot geometry, host memory, tiers and manager. A failed build leaves
nothing open.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

from flexkv.cache.base import CacheListener, GroupSpec, ManagerLimits
from flexkv.cache.manager import LocalCacheManager
from flexkv.cache.tiers.disk.plan import overwritable, whole_slots_of
from flexkv.cache.tiers.factory import plan_tiers
from flexkv.cache.tiers.host.tier import HostTier
from flexkv.cache.tiers.plan import UnitFacts
from flexkv.cache.tiers.running_peers.plan import plan_share
from flexkv.cache.tiers.tables import TierFactory
from flexkv.config import FlexKVConfig, read_memory, resolve_host_bytes
from flexkv.errors import CapacityError, GeometryError
from flexkv.facts.ranks import KvGroup, RankFacts, UnitOwner
from flexkv.observe import get_logger
from flexkv.transfer.host_pool import MAX_EXTENT_BYTES, HostPool
from flexkv.unit.base import CacheRole
from flexkv.unit.capacity import PromptLimit, TierCapacity
from flexkv.unit.live_unit import LiveUnit
from flexkv.unit.plugin_calls import PromptKeys
from flexkv.unit.plugins import UnitPlugins
from flexkv.unit.slot_geometry import SlotGeometry
from flexkv.unit.start_check import check_start
from flexkv.unit.weights_gate import WeightsGate

logger = get_logger(__name__)

START_WAIT_S = 10.0
"""Maximum time for which the engine's start waits until the host pool's first extent is mapped, so that blocks of the
first requests can be stored. An extent has at most 1 GiB, and mapping it takes half a second on an idle machine. The
other extents are mapped while the engine runs."""

FAILED_LOAD_REST_S = 30.0
"""If the engine ends requests whose loads are late, lookups promise nothing to new requests for this many seconds after
a failed load. In such an engine each further load may cost a client its request, and a tier that needed longer than
`load.deadline_s` is seldom fast a moment later.
"""


def share_of_node(config: FlexKVConfig, units: int) -> FlexKVConfig:
    """Returns the configuration for one of `units` units on this node. If the user set `host.units_per_node`, the
    configuration is returned unchanged."""
    if units <= 1 or config.origin("host.units_per_node") != "default":
        return config
    return config.replaced({"host.units_per_node": units})


def build_unit(
    config: FlexKVConfig,
    groups: Sequence[KvGroup],
    ranks: Mapping[int, RankFacts],
    owner: UnitOwner,
    role: CacheRole = CacheRole(),  # noqa: B008 - frozen
    listener: CacheListener | None = None,
    prompt_limit: PromptLimit | None = None,
    slots: int | None = None,
    alignment_tokens: int | None = None,
    prompt_keys: PromptKeys | None = None,
) -> LiveUnit:
    """Builds the unit that serves `ranks`, with its host pool, tiers and manager.

    Args:
        groups: KV groups of the engine's pool. They share the host pool's slots; a slot can hold a page of any group.
        ranks: the facts of every rank, by rank number.
        slots: number of slots in the host pool; None for as many as the configured host memory holds.
        listener: receives the keys that become visible in host memory, and the keys that are no longer visible there;
            None for no listener.
        prompt_limit: the longest prompt that the engine accepts; the log warns if a tier cannot hold it. None if the
            engine does not report it.
        alignment_tokens: every hit is a multiple of this many tokens; None if a hit need only end at a block boundary
            of every group.
        prompt_keys: makes keys from token ids, for plugins' calls; None if no plugin may ask about a prompt.

    Raises:
        GeometryError: a rank is missing, or the ranks do not agree.
        CapacityError: the memory does not hold one slot, or is not available.
        ConfigError: this machine lacks something that a setting requires.
        FlexKVError: a folder cannot be used, or another process uses it.
    """
    facts = UnitFacts(config, tuple(groups), _stripes(ranks, len(groups)), owner, role.recomputes)
    facts = replace(facts, share=plan_share(facts))
    check_start(config, len(ranks), overwritable(facts), whole_slots_of(facts))
    plans = plan_tiers(facts)
    images = [plan.images for plan in plans if plan.images]
    geometry = SlotGeometry.of(facts.ranks, len(ranks), config.host.verify, images)
    with ExitStack() as on_error:
        if slots is None:
            slots = _slots(config, groups, geometry.slot_bytes, len(ranks))
        shared = role.shared or any(plan.shares_pool for plan in plans)
        pool = _make_pool(config, geometry.slot_bytes, slots, shared)
        on_error.callback(pool.close)
        tiers: list[TierFactory] = [HostTier]
        tiers += [tier for plan in plans if (tier := plan.open(pool, on_error)) is not None]
        manager = LocalCacheManager(
            _specs(groups, pool.slots),
            ManagerLimits(
                ranks=len(ranks),
                inflight_store_pages=config.store.inflight_pages,
                inflight_load_pages=config.load.inflight_pages,
                lease_s=config.load.lease_s,
                prefetch_requests=config.disk.prefetch_requests,
                rest_s=FAILED_LOAD_REST_S if role.fails_requests and not role.recomputes else 0.0,
                asks_again=role.asks_again,
            ),
            policy=config.index.policy,
            listener=listener,
            compute_if_faster=config.disk.compute_if_faster and role.compute_if_faster,
            tiers=tiers,
            alignment_tokens=alignment_tokens,
        )
        slabs = next((slabs for plan in plans if (slabs := plan.slab_map()) is not None), None)
        pools = [ranks[rank].pool_id for rank in range(len(ranks))]
        gate = WeightsGate.of(config, owner.weights, manager)
        on_error.callback(gate.close)
        if facts.share is not None and owner.weights.is_named:
            facts.share.start(b"")
        unit = LiveUnit(pool, manager, geometry.places, slabs, pools, config.transfer.close_s, gate)
        _log_capacity(config, unit, groups, prompt_limit)
        unit.plugins = UnitPlugins.start(config, unit.unit_id, unit, prompt_keys)
        on_error.pop_all()
        return unit


def _specs(groups: Sequence[KvGroup], slots: int) -> list[GroupSpec]:
    """Describes the groups to the manager. All groups share the slots of the first group."""
    return [
        GroupSpec(group.block_tokens, slots, group.rule, group.reach, shares=0 if number else None)
        for number, group in enumerate(groups)
    ]


def _stripes(ranks: Mapping[int, RankFacts], groups: int) -> tuple[RankFacts, ...]:
    """Returns the ranks that have their own stripe. If consecutive ranks hold the same bytes, only the first of them
    has its own stripe.

    Raises:
        GeometryError: a rank is missing, or the ranks do not agree.
    """
    if not groups:
        raise GeometryError("a unit of no KV group; needed is at least one")
    if not ranks:
        raise GeometryError("no rank has said what its pool is")
    if sorted(ranks) != list(range(len(ranks))):
        raise GeometryError(f"handshake of ranks {sorted(ranks)}; expected 0 to {len(ranks) - 1}")
    facts = [ranks[rank] for rank in range(len(ranks))]
    for rank in facts:
        if len(rank.groups) != groups:
            raise GeometryError(
                f"rank {rank.rank} has a pool of {len(rank.groups)} KV groups; the engine's scheduler has {groups}"
            )
    counts = {rank.num_blocks for rank in facts}
    if len(counts) != 1:
        raise GeometryError(f"the ranks' pools have {', '.join(map(str, sorted(counts)))} blocks")
    replicas = facts[0].replicas
    if replicas < 1 or len(facts) % replicas:
        raise GeometryError(
            f"{replicas} of {len(facts)} ranks hold the same bytes; allowed is what divides the ranks"
        )
    # If ranks share a stripe, one of them stores it and all of them load it, so their runs must lie at the same
    # offsets.
    firsts = [facts[number - number % replicas] for number in range(len(facts))]
    if any(
        rank.replicas != replicas or _bytes_of(rank) != _bytes_of(first)
        for rank, first in zip(facts, firsts, strict=True)
    ):
        raise GeometryError(f"the ranks do not agree on whether they hold the same bytes: {facts}")
    return tuple(facts[::replicas])


def _bytes_of(rank: RankFacts) -> list[tuple[int, str, bytes]]:
    """Returns the facts that must be equal on all ranks that share a stripe."""
    return [(group.stripe_bytes, group.format_id, group.run_table.tobytes()) for group in rank.groups]


def _log_capacity(
    config: FlexKVConfig, unit: LiveUnit, groups: Sequence[KvGroup], limit: PromptLimit | None
) -> None:
    ranks, slot_bytes = len(unit.places), unit.pool.slot_bytes
    per_rank = config.host.bytes_per_rank is not None
    setting, shares = ("host.bytes_per_rank", ranks) if per_rank else ("host.bytes", 1)
    host = TierCapacity("host tier", unit.slots, tuple(groups), slot_bytes, setting, shares)
    host.log(logger, limit, f", for {ranks} rank(s)")
    for tier in unit.manager.tiers:
        if (room := tier.room_of(0)) is not None:
            capacity = TierCapacity(
                f"{tier.facts.name} tier",
                room.pages,
                tuple(groups),
                slot_bytes,
                room.setting,
                room.shares,
            )
            capacity.log(logger, limit, room.more)


def _slots(config: FlexKVConfig, groups: Sequence[KvGroup], slot_bytes: int, ranks: int) -> int:
    memory = read_memory()
    size = resolve_host_bytes(config, ranks, memory.usable, memory.huge_page_bytes * memory.huge_pages_free)
    slots = size // slot_bytes
    if slots < 1:
        raise CapacityError(
            f"{size} bytes of host memory hold no slot of {slot_bytes} bytes (one block of {groups[0].block_tokens} "
            f"tokens over {ranks} ranks): set host.bytes to some thousand times {slot_bytes}"
        )
    return slots


def _make_pool(config: FlexKVConfig, slot_bytes: int, slots: int, shared: bool) -> HostPool:
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
                "host tier: none of its memory is mapped after %.0f s; it takes blocks as its memory is mapped",
                START_WAIT_S,
            )
    return pool
