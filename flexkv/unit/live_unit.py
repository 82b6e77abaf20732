"""The unit that serves requests; `build_unit` makes it in one step."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from flexkv.cache.manager import LocalCacheManager
from flexkv.cache.tiers.disk.pages import DiskPages
from flexkv.facts.ranks import PoolGrant, PoolId, RankPlace, UnitId, random_id
from flexkv.observe import Counters, get_logger
from flexkv.transfer.host_pool import HostPool
from flexkv.transfer.slab_map import SlabMap
from flexkv.unit.base import EngineUnit, UnitState
from flexkv.unit.driver import UnitDriver
from flexkv.unit.plugins import UnitPlugins
from flexkv.unit.tier_metrics import TierMetrics
from flexkv.unit.weights_gate import WeightsGate

logger = get_logger(__name__)

EXPIRE_EVERY_S = 1.0
"""How often the unit checks for expired leases of lookups that were never used. A lease lasts a minute by default."""


class LiveUnit(EngineUnit):
    """A unit that serves requests, with its pools, tiers and gate.

    Args:
        places: each rank's share of a slot, by group.
        slabs: for workers that move pages directly between a tier and the engine's pool; None if no worker does.
        pools: see the attribute.
        close_s: how long a close may take.
        gate: see the attribute.

    Attributes:
        pools: each rank's engine pool, for which the unit was made.
        driver: carries ops to the tiers behind host memory, and their results back.
        gate: keeps these tiers out of use until the engine's weights are named.
        plugins: programs of the user beside the unit; None if there are none.
    """

    plugins: UnitPlugins | None = None

    def __init__(
        self,
        pool: HostPool,
        manager: LocalCacheManager,
        places: tuple[tuple[RankPlace, ...], ...],
        slabs: SlabMap | None,
        pools: Sequence[PoolId],
        close_s: float,
        gate: WeightsGate,
    ) -> None:
        self.unit_id = UnitId(random_id())
        self.state, self.usable = UnitState.USABLE, True
        self.pool = pool
        self.manager: LocalCacheManager = manager
        self.places = places
        self.slabs = slabs
        self.slots = pool.slots
        self.growing = True
        self.driver = UnitDriver(manager, fail_read=pool.fail_read)
        self.has_tiers = len(manager.tiers) > 1
        self.pools = tuple(pools)
        self.gate = gate
        self._close_s = close_s
        self._metrics = TierMetrics(manager)
        self._workers_pin = False
        self._ready: dict[int, int] = {}
        self._up = 0
        self._expire_at_s = 0.0
        self._closed: bool | None = None
        """What `close` returned; None before the first call."""

    def make_grant(self, on_device: bool) -> PoolGrant:
        """Data with which workers in other processes map the pool.

        Args:
            on_device: the engine's pool lies on devices, whose processes register the memory before they use it.
        """
        self._workers_pin = on_device
        return PoolGrant(self.unit_id, self.pools, self.pool.descriptor(), self.places, self.slabs)

    # --- the ranks ---

    def rank_ready(self, ready: Mapping[int, int]) -> None:
        self._ready.update(ready)
        if self.grant is not None and len(self._ready) == len(self.places):
            self.grant = None

    def grow(self) -> None:
        if not self.growing:
            return
        up = self.pool.ready_slots
        if self._workers_pin:
            # Each worker registers the memory with its own device, which takes a while and may not cover all
            # of it. On a host device a mapped slot is ready for all workers, because they map the pool before
            # they touch it.
            up = min(up, *self._ready.values()) if len(self._ready) == len(self.places) else 0
        if up > self._up:
            self._up = up
            # All groups share the slots of the first.
            self.manager.grow(0, up)
        # The pool logs how bring-up ended when it is polled after the end, so `growing` is true until then.
        self.growing = self._up < self.slots or not self.pool.settled

    def disable(self, rank: int, error: str) -> None:
        if self.state is not UnitState.USABLE:
            return
        logger.error("nothing is cached any more: rank %d: %s", rank, error)
        self.state, self.usable = UnitState.DISABLED, False
        self.reason = f"rank {rank}: {error}"
        self.grant = None
        self.manager.disable()

    def stop_straight_loads(self, rank: int, reason: str) -> None:
        for tier in self.manager.tiers:
            if tier.straight is not None:
                tier.straight.stop(f"rank {rank}: {reason}")

    # --- the tiers ---

    @property
    def tier_names(self) -> tuple[str, ...]:
        return tuple(tier.facts.label for tier in self.manager.tiers)

    @property
    def own_disks(self) -> DiskPages | None:
        """The tier of the unit's own disks; None without one."""
        return next((tier for tier in self.manager.tiers if isinstance(tier, DiskPages)), None)

    @property
    def busy(self) -> bool:
        return self.has_tiers and (self.driver.busy or (self.plugins is not None and self.plugins.calls.busy))

    def poll(self) -> bool:
        if self.plugins is not None:
            self.plugins.calls.run()
        if not self.has_tiers:
            return False
        opened = self.gate.poll()
        was_busy = self.driver.busy
        self.driver.poll()
        return opened or was_busy or self._metrics.has_news

    def expire_if_due(self, counters: Counters) -> None:
        now_s = time.monotonic()
        if now_s >= self._expire_at_s:
            self._expire_at_s = now_s + EXPIRE_EVERY_S
            counters.add("flexkv_expired_leases_total", self.manager.expire())

    def count(self, counters: Counters) -> None:
        counters.set("flexkv_host_slots", self._up)
        if len(self.manager.tables.specs) == 1:
            tokens = self._up * self.manager.tables.specs[0].block_tokens
            counters.set("flexkv_host_capacity_tokens", tokens)
        counters.set("flexkv_host_slots_used", self._up - self.manager.free_slots(0))
        counters.set("flexkv_inflight_ops", self.manager.inflight_ops())
        self._metrics.count(counters)
        if self.has_tiers:
            counters.set("flexkv_weights_known", float(self.gate.is_open))

    def status(self) -> dict[str, Any]:
        """The unit as plain values, for its plugins."""
        stats = self.manager.stats()
        return {
            "unit": self.unit_id.hex(),
            "state": self.state.value,
            "reason": self.reason,
            "tiers": list(self.tier_names),
            "host_slots": self._up,
            "host_slots_used": self._up - self.manager.free_slots(0),
            "pinned_pages": self.manager.kept_pages,
            "inflight_ops": self.manager.inflight_ops(),
            "hit_blocks": stats.hit_blocks,
            "miss_blocks": stats.miss_blocks,
            "loaded_pages": stats.loaded_pages,
            "stored_pages": stats.stored_pages,
        }

    def close(self, close_s: float | None = None) -> bool:
        """See `EngineUnit.close`.

        Args:
            close_s: how long the tiers may take; None for as long as configured.
        """
        if self._closed is None:
            if self.plugins is not None:
                self.plugins.begin_close()
            self.gate.poll()
            self.gate.close()
            self._closed = self.driver.close(self._close_s if close_s is None else close_s)
            self.state, self.reason = UnitState.CLOSED, self.reason or "closed"
            self.usable = self.growing = False
            self.manager.disable()
            self.manager.flush_log()
            self.pool.close()
            if self.plugins is not None:
                self.plugins.close()
        return self._closed
