"""Makes the planner of an engine's store operations, and reads each step's blocks from vLLM's schedule for the
planner."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from flexkv.adapters.vllm.engine_spec import EngineSpec
from flexkv.adapters.vllm.events import EventLog
from flexkv.adapters.vllm.pool_geometry import PoolGeometry
from flexkv.cache.stores.base import BlocksByGroup, StoreParts, StoreWatch
from flexkv.cache.stores.eager import EagerStores
from flexkv.cache.stores.lazy import LazyStores
from flexkv.cache.stores.planner import StorePlanner
from flexkv.observe import Counters
from flexkv.unit.base import EngineUnit

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


def make_planner(
    unit: EngineUnit, spec: EngineSpec, watch: StoreWatch, counters: Counters, events: EventLog | None
) -> StorePlanner:
    """Makes the planner of an engine's store operations. The engine's role and `store.mode` decide which class of
    planner is made."""
    if not spec.role.stores:
        return StorePlanner()
    geometry = spec.geometry
    parts = StoreParts(
        unit.manager,
        watch,
        counters,
        events,
        geometry.groups,
        geometry.alignment_tokens,
        states_handed_over=geometry.states_handed_over,
        namespace=spec.namespace,
        settings=spec.config.store,
        queue_ops=spec.config.transfer.queue_ops,
        slots=unit.slots,
        has_tiers=unit.has_tiers,
        is_busy=lambda: unit.busy,
        step_tokens=spec.step_tokens,
        ends_in_step=spec.role.stores_end_in_step,
    )
    return (LazyStores if spec.config.store.mode == "lazy" else EagerStores)(parts)


class ScheduledBlocks:
    """The blocks that vLLM's schedule of one step reports, by flexkv's numbers of the KV groups; see `StepBlocks`."""

    def __init__(self, geometry: PoolGeometry, output: SchedulerOutput) -> None:
        self._geometry = geometry
        self._state = output.kv_connector_block_state

    def blocks(self, request_id: str) -> BlocksByGroup | None:
        blocks = self._state.get_block_ids(request_id) if self._state is not None else None
        return blocks if blocks is None else in_our_order(self._geometry, blocks)

    def states(self, request_id: str) -> Iterable[tuple[int, int, int]]:
        offers = self._state.boundary_state_offloads if self._state is not None else {}
        ours = {group.number: at for at, group in enumerate(self._geometry.groups)}
        return [(ours[number], block, tokens) for number, block, tokens in offers.get(request_id, ())]


def in_our_order(geometry: PoolGeometry, blocks: BlocksByGroup) -> BlocksByGroup:
    """Returns blocks, given in the engine's order of the KV groups, in the order of `PoolGeometry.groups`."""
    return [blocks[group.number] for group in geometry.groups]
