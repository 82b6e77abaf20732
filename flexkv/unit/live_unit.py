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
"""Seconds between two checks for expired leases. A lease expires if no load follows its lookup; by default, it lasts a
minute.
"""


class LiveUnit(EngineUnit):
    """A unit that serves requests, with its host pool, tiers, weights gate and plugins.

    Args:
        places: for each rank and KV group, where the rank's share of a slot lies.
        slabs: the slabs on disk, for workers that copy pages directly between disk and the engine's pool; None if no
            worker does this.
        pools: the id of each rank's engine pool.
        close_s: maximum number of seconds that `close` takes.
        gate: the weights gate over the manager's tiers.

    Attributes:
        pools: the id of each rank's engine pool at the time when the unit was made.
        driver: submits ops to the tiers behind host memory, and reports their results to the manager.
        gate: keeps the tiers behind host memory out of use until the name of the engine's weights is known.
        plugins: the user's programs that run beside the unit; None if there are none.
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
        """The value that `close` returned; None before its first call."""

    def make_grant(self, on_device: bool) -> PoolGrant:
        """Makes the record with which workers in other processes map the host pool.

        Args:
            on_device: whether the engine's pool lies on GPUs. Each worker then registers the host memory with its GPU
                before it uses it.
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
            # Each worker registers the memory with its own GPU. This takes a while, and the GPU may not accept all
            # of the memory, so only slots that all workers have reported are used. Workers without a GPU register
            # nothing: every mapped slot is ready for them.
            up = min(up, *self._ready.values()) if len(self._ready) == len(self.places) else 0
        if up > self._up:
            self._up = up
            # All groups share the slots of group 0.
            self.manager.grow(0, up)
        # `growing` stays true until the pool has logged how mapping its memory ended. Reading `ready_slots` logs it.
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
        """The tier of the unit's own disks; None if the unit has no disks."""
        return next((tier for tier in self.manager.tiers if isinstance(tier, DiskPages)), None)

    @property
    def busy(self) -> bool:
        if self.plugins is not None and self.plugins.calls.busy:
            return True
        return self.has_tiers and self.driver.busy

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
        """The unit's state and counts as plain values, which plugins may ask for."""
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
        """Closes the unit; see `EngineUnit.close`.

        Args:
            close_s: maximum number of seconds for the tiers; None for `transfer.close_s`.
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
