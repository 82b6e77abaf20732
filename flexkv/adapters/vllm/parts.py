"""What serves one ownership unit once its ranks are known, and what it is made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flexkv.adapters.common.base import UnitOwner
from flexkv.adapters.common.capacity import PromptLimit
from flexkv.adapters.common.host_unit import HostUnit
from flexkv.adapters.vllm.eager import EagerStores
from flexkv.adapters.vllm.events import EventLog
from flexkv.adapters.vllm.geometry import BlockGeometry
from flexkv.adapters.vllm.lazy import LazyStores
from flexkv.adapters.vllm.loads import Loads
from flexkv.adapters.vllm.lookups import Lookups
from flexkv.adapters.vllm.metadata import Handshake
from flexkv.adapters.vllm.outcomes import Outcomes
from flexkv.adapters.vllm.request_table import RequestTable
from flexkv.adapters.vllm.step_times import StepTimes
from flexkv.adapters.vllm.store_mode import NoStores, StoreMode
from flexkv.adapters.vllm.store_watch import StoreWatch
from flexkv.adapters.vllm.stores import StorePlanner, StoreRules
from flexkv.adapters.vllm.use import Use
from flexkv.adapters.vllm.worker import WorkerSide, current_device_is_host
from flexkv.cache.base import CacheListener
from flexkv.cache.listeners import Listeners
from flexkv.config import FlexKVConfig
from flexkv.observe import Counters


@dataclass(frozen=True, slots=True)
class Parts:
    """What works once every rank is known and the host pool is made.

    Attributes:
        workers: all ranks' worker sides if they live in this process, else none.
        steps: None without a disk tier: only what the disks bring up competes with computing.
    """

    unit: HostUnit
    lookups: Lookups
    loads: Loads
    stores: StoreMode
    outcomes: Outcomes
    watch: StoreWatch
    workers: tuple[WorkerSide, ...]
    steps: StepTimes | None


@dataclass(frozen=True, slots=True)
class Blueprint:
    """What the engine said of the unit at its start: all that the parts take beside its ranks.

    Attributes:
        namespace: 32 bytes, of every key.
        step_tokens: that the engine computes in one step at most.
        stores_end_in_step: see `EagerStores`.
    """

    config: FlexKVConfig
    geometry: BlockGeometry
    namespace: bytes
    owner: UnitOwner
    step_tokens: int
    stores_end_in_step: bool
    use: Use
    prompt_limit: PromptLimit | None

    def make(
        self,
        handshakes: Mapping[int, Handshake],
        workers: tuple[WorkerSide, ...],
        watch: StoreWatch,
        requests: RequestTable,
        counters: Counters,
        events: EventLog,
    ) -> Parts:
        """Sizes and creates the host pool, and what works with it.

        Args:
            handshakes: of every rank.
            workers: see `Parts`; they are given the pool at once.

        Raises:
            GeometryError: the ranks do not agree.
            CapacityError: not even one slot fits.
        """
        listeners = Listeners(events)
        unit = HostUnit.create(
            self.config,
            self.geometry.block_tokens,
            self.geometry.num_blocks,
            handshakes,
            not workers,
            listeners,
            self.owner,
            recomputes=self.use.recomputes,
            prompt_limit=self.prompt_limit,
        )
        try:
            for worker in workers:
                worker.attach(unit.unit_id, unit.pool, unit.places[worker.rank], unit.slabs)
            return self._make_with(unit, workers, watch, requests, counters, events, listeners)
        except BaseException:
            unit.close()
            raise

    def _make_with(
        self,
        unit: HostUnit,
        workers: tuple[WorkerSide, ...],
        watch: StoreWatch,
        requests: RequestTable,
        counters: Counters,
        events: EventLog,
        listeners: Listeners,
    ) -> Parts:
        config = self.config
        unit.grant = None if workers else unit.make_grant(not current_device_is_host())
        lookups = Lookups(
            unit.manager, self.geometry, config.store.partial_blocks, counters, self.use.drop_last_block
        )
        mode = config.load.mode
        loads = Loads(lookups, sync=mode != "async", by_layer=mode == "layerwise")
        stores = self._make_stores(unit, watch, requests, counters, events)
        if isinstance(stores, CacheListener):
            listeners.add(stores)
        outcomes = Outcomes(unit, workers, requests, loads, stores, watch, counters, events)
        steps = StepTimes(unit.manager.cost.compute) if unit.disk is not None else None
        return Parts(unit, lookups, loads, stores, outcomes, watch, workers, steps)

    def _make_stores(
        self,
        unit: HostUnit,
        watch: StoreWatch,
        requests: RequestTable,
        counters: Counters,
        events: EventLog,
    ) -> StoreMode:
        store = self.config.store
        if not self.use.stores:
            return NoStores()
        rules = StoreRules(self.geometry.block_tokens, store.tokens == "prompt", store.partial_blocks)
        planner = StorePlanner(unit.manager, watch, rules, counters, events)
        if store.mode != "lazy":
            return EagerStores(planner, requests, self.stores_end_in_step, by_layer=store.mode == "layerwise")
        return LazyStores(
            planner,
            requests,
            unit.manager,
            watch,
            self.geometry,
            self.namespace,
            self.step_tokens,
            unit.slots,
            counters,
            events,
        )
