"""Loads in flight: from the blocks that the engine allocated for a promise to the end on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from flexkv.adapters.common.base import LoadJob
from flexkv.adapters.vllm.lookups import Lookups
from flexkv.adapters.vllm.request import RequestTracker
from flexkv.observe import get_logger
from flexkv.transfer.graph import OpId

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks

logger = get_logger(__name__)


class Loads:
    """Loads of one engine.

    Args:
        sync: they run within the step that needs them, not between steps.
        by_layer: such a step waits for each layer when it comes to it, not for all of them before it starts.
    """

    def __init__(self, lookups: Lookups, sync: bool, by_layer: bool = False) -> None:
        self._lookups = lookups
        self._sync = sync
        self._by_layer = by_layer
        self._jobs: dict[OpId, LoadJob] = {}

    def begin(self, tracker: RequestTracker, blocks: KVCacheBlocks, external_tokens: int) -> LoadJob | None:
        """The engine gave the request its blocks, and takes `external_tokens` of what was promised.

        Returns:
            What the workers are to load; None when the engine takes nothing.
        """
        if external_tokens == 0 and tracker.promise is None:
            return None
        promised = tracker.promise is not None
        graph = self._lookups.begin_load(tracker, blocks, external_tokens)
        if graph is not None:
            if self._by_layer:
                graph = graph.layerwise()
            job = LoadJob(tracker.request_id, graph, self._sync)
            for op in job.ops:
                self._jobs[op.op_id] = job
                if not self._sync:
                    tracker.loading = op.op_id
            return job
        if external_tokens > 0 and not promised:
            # The engine counts on blocks that nobody fills. It must hear that they failed.
            logger.error(
                "request %s: %d tokens were taken without a promise", tracker.request_id, external_tokens
            )
            return LoadJob(tracker.request_id, None, self._sync, tuple(blocks.get_block_ids()[0]))
        return None

    def end(self, op_id: OpId, tracker: RequestTracker | None) -> None:
        """The load's op has ended on every rank; `tracker` is that of its request, if that still lives."""
        job = self._jobs.pop(op_id, None)
        if tracker is not None and tracker.loading == op_id:
            # A load from both tiers has two ops; by either of them all of it is called off.
            others = () if job is None else (op.op_id for op in job.ops if op.op_id in self._jobs)
            tracker.loading = next(iter(others), None)

    def __contains__(self, op_id: OpId) -> bool:
        return op_id in self._jobs

    def __iter__(self) -> Iterator[OpId]:
        return iter(self._jobs)

    def __len__(self) -> int:
        return len(self._jobs)
