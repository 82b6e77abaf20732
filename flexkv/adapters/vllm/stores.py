"""The engine's side of store planning: makes the planner, and tells it which tokens of each request are certain."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from flexkv.adapters.vllm.engine_spec import EngineSpec
from flexkv.adapters.vllm.events import EventLog
from flexkv.adapters.vllm.pool_geometry import PoolGeometry
from flexkv.adapters.vllm.requests import RequestTracker
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
    """The planner of an engine's stores, by the engine's role and `store.mode`."""
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


class CertainTokens:
    """Which tokens of a request have KV that is computed and accepted, and that its settings allow to be stored.

    Args:
        prompt_only: generated tokens are not stored, so they do not count.
    """

    def __init__(self, prompt_only: bool) -> None:
        self._prompt_only = prompt_only

    def note_step(self, tracker: RequestTracker, scheduled_tokens: int) -> None:
        """Notes what a step computes of a request, and how much of it is certain once the step's forward has run.

        Prompt tokens of this step count, because they are known. Tokens that the step generates do not count, nor do
        drafts of earlier steps that are not accepted yet.
        """
        request = tracker.request
        computed, prompt = request.num_computed_tokens, request.num_prompt_tokens
        tracker.computed, tracker.step_end = computed, computed + scheduled_tokens
        if computed < prompt:
            certain = min(tracker.step_end, prompt)
        elif self._prompt_only:
            certain = prompt
        else:
            certain = min(computed - request.num_output_placeholders, request.num_tokens)
        tracker.certain = tracker.storable(certain)

    def note_end(self, tracker: RequestTracker) -> None:
        """Notes how much of a request that has ended is certain, without steps still under way."""
        request = tracker.request
        # A preemption or a failed load takes computed tokens back while their steps are still under way.
        certain = min(max(0, request.num_computed_tokens - request.num_in_flight_tokens), request.num_tokens)
        if self._prompt_only:
            certain = min(certain, request.num_prompt_tokens)
        tracker.certain = tracker.storable(certain)


class ScheduledBlocks:
    """What vLLM says of its blocks in one step, by our numbers of the KV groups; see `StepBlocks`."""

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
    """Blocks by the engine's numbers of the KV groups, in the order of `PoolGeometry.groups`."""
    return [blocks[group.number] for group in geometry.groups]
