"""Eager stores: a block is offered as soon as the step that completes it has been planned."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from flexkv.adapters.vllm.metadata import ConnectorMetadata
from flexkv.adapters.vllm.requests import RequestTable, RequestTracker
from flexkv.adapters.vllm.store_mode import StoreMode
from flexkv.adapters.vllm.stores import StorePlanner
from flexkv.transfer.graph import BlockIds, TransferGraph

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class EagerStores(StoreMode):
    """Offers the certain blocks of every scheduled request.

    Args:
        within_steps: what a step did not store is not stored at the request's end either: nothing tells this connector
            when the engine hands out the blocks again.
        by_layer: a step's stores are copied layer by layer, while its forward runs.
    """

    def __init__(
        self, planner: StorePlanner, requests: RequestTable, within_steps: bool, by_layer: bool = False
    ) -> None:
        self._planner = planner
        self._requests = requests
        self._within_steps = within_steps
        self._by_layer = by_layer

    def plan_step(self, output: SchedulerOutput, step: int, orders: ConnectorMetadata) -> None:
        for request_id, scheduled in output.num_scheduled_tokens.items():
            tracker = self._requests.get(request_id)
            if tracker is not None:
                certain = self._planner.certain_after_step(tracker, scheduled)
                graph = self._planner.plan(tracker, certain, step)
                if graph is not None:
                    orders.stores.append(graph.layerwise() if self._by_layer else graph)

    def started(self, tracker: RequestTracker) -> None:
        self._planner.mark_stale(tracker)

    def preempted(self, tracker: RequestTracker) -> None:
        """What was certain has been offered at every step."""

    def ended(self, tracker: RequestTracker, step: int) -> list[TransferGraph]:
        """What was generated since the last whole block was stored, and the tail."""
        if self._within_steps:
            return []
        certain = self._planner.certain_at_end(tracker)
        tracker.retry_step = 0
        graphs = (self._planner.plan(tracker, certain, step), self._planner.plan_tail(tracker, certain))
        return [graph for graph in graphs if graph is not None]

    def load_failed(self, blocks: Iterable[int]) -> None:
        """Blocks are offered for a request, and barred with it."""

    def unpublished(self, blocks: BlockIds) -> None:
        """A request offers its blocks once; the next request with the same tokens offers them again."""

    def reset(self, stale_hashes: dict[int, bytes]) -> None:
        self._planner.stale_hashes = stale_hashes
