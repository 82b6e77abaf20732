"""Stores: the contract of the modes, which decide when blocks are offered to the cache (`eager_stores.py`,
`lazy_stores.py`), and their common part: which tokens of a request are certain."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from flexkv.adapters.vllm.engine_spec import EngineSpec
from flexkv.adapters.vllm.events import EventLog
from flexkv.adapters.vllm.holds import Holds
from flexkv.adapters.vllm.metadata import ConnectorMetadata
from flexkv.adapters.vllm.requests import RequestTable, RequestTracker
from flexkv.adapters.vllm.store_watch import StoreWatch
from flexkv.observe import Counters
from flexkv.transfer.graph import BlockIds, TransferGraph
from flexkv.unit.base import EngineUnit

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

BlocksByGroup = Sequence[Sequence[int]]


class StoreMode(ABC):
    """One engine's stores. The scheduler's thread calls all methods, which plan stores and never wait.

    Attributes:
        holds: ended requests with pending pages; None for a mode without holds.
    """

    holds: Holds | None = None

    @abstractmethod
    def plan_step(self, output: SchedulerOutput, step: int, orders: ConnectorMetadata) -> None:
        """Adds the step's stores to its orders. Costs O(requests + new blocks)."""

    @abstractmethod
    def started(self, tracker: RequestTracker) -> None:
        """Called when the request has a new block table."""

    @abstractmethod
    def preempted(self, tracker: RequestTracker) -> None:
        """Called when the engine takes the request's blocks away, while the tracker still has them."""

    @abstractmethod
    def ended(
        self, tracker: RequestTracker, step: int, blocks: BlocksByGroup | None = None
    ) -> list[TransferGraph]:
        """Plans the last stores of a request that has ended and whose blocks are about to be freed.

        Args:
            blocks: the request's blocks now, by the engine's numbers of the groups; None if the engine does not say.
        """

    def plan_before_load(self, blocks: int) -> TransferGraph | None:
        """Plans the stores that should begin before the engine hands so many of its free blocks to a load."""
        return None

    @abstractmethod
    def load_failed(self, blocks: Iterable[int]) -> None:
        """Takes blocks without valid KV: targets of a failed load, and blocks that were computed from them by requests
        that have lost their blocks since. Live requests have `cursor` and `suspect_from` for this instead."""

    @abstractmethod
    def load_kept(self, tracker: RequestTracker, first_block: int) -> None:
        """Called when a request keeps wrong KV from this block of the first group on, which the engine does not compute
        again: neither this KV is stored, nor any that other requests compute from it."""

    @abstractmethod
    def unpublished(self, blocks: BlockIds) -> None:
        """Called when a store of these engine blocks ended without being published."""

    @abstractmethod
    def reset(self, stale_hashes: dict[int, bytes]) -> None:
        """Called when the weights change.

        Args:
            stale_hashes: engine block -> its hash, for blocks that may still hold KV of the old weights.
        """


class NoStores(StoreMode):
    """For an engine that only reads the cache (vLLM's kv_role is kv_consumer)."""

    def plan_step(self, output: SchedulerOutput, step: int, orders: ConnectorMetadata) -> None:
        """Nothing is stored."""

    def started(self, tracker: RequestTracker) -> None:
        """Nothing is stored."""

    def preempted(self, tracker: RequestTracker) -> None:
        """Nothing is stored."""

    def ended(
        self, tracker: RequestTracker, step: int, blocks: BlocksByGroup | None = None
    ) -> list[TransferGraph]:
        return []

    def load_failed(self, blocks: Iterable[int]) -> None:
        """Nothing is stored."""

    def load_kept(self, tracker: RequestTracker, first_block: int) -> None:
        """Nothing is stored."""

    def unpublished(self, blocks: BlockIds) -> None:
        """Nothing is stored."""

    def reset(self, stale_hashes: dict[int, bytes]) -> None:
        """Nothing is stored."""


@dataclass(frozen=True, slots=True)
class StoreTables:
    """The parts of one engine's scheduler that a mode that stores reads or reports to."""

    unit: EngineUnit
    spec: EngineSpec
    requests: RequestTable
    watch: StoreWatch
    counters: Counters
    events: EventLog | None


class RequestStores(StoreMode):
    """The common part of the modes that store: which tokens of a request are certain, and which blocks hold KV of
    replaced weights or from a failed load."""

    def __init__(self, tables: StoreTables) -> None:
        spec = tables.spec
        self._manager = tables.unit.manager
        self._requests = tables.requests
        self._watch = tables.watch
        self._counters = tables.counters
        self._events = tables.events
        self._groups = spec.geometry.groups
        self._block_tokens = self._groups[0].block_tokens
        self._prompt_only = spec.config.store.tokens == "prompt"
        self._queue_ops = spec.config.transfer.queue_ops
        self._stale_hashes: dict[int, bytes] = {}

    @property
    def _places(self) -> int:
        """Number of further stores that every rank's queue takes for certain: a store keeps its entry in a rank's queue
        until the rank's report of it is under way."""
        return self._queue_ops - len(self._watch.ops)

    def _certain_after_step(self, tracker: RequestTracker, scheduled_tokens: int) -> int:
        """Number of tokens whose KV is computed and accepted once this step's forward has run, and which the request's
        settings allow to be stored.

        Prompt tokens of this step count, because they are known. Tokens that the step generates do not count, nor do
        drafts of earlier steps that are not accepted yet.
        """
        request = tracker.request
        computed, prompt = request.num_computed_tokens, request.num_prompt_tokens
        if computed < prompt:
            return tracker.storable(int(min(computed + scheduled_tokens, prompt)))
        if self._prompt_only:
            return tracker.storable(int(prompt))
        return tracker.storable(int(min(computed - request.num_output_placeholders, request.num_tokens)))

    def _certain_at_end(self, tracker: RequestTracker) -> int:
        """Number of tokens whose KV is computed and accepted when the request ends, without steps still under way, and
        which the request's settings allow to be stored."""
        request = tracker.request
        # A preemption or a failed load takes computed tokens back while their steps are still under way.
        certain = min(max(0, request.num_computed_tokens - request.num_in_flight_tokens), request.num_tokens)
        return tracker.storable(
            int(min(certain, request.num_prompt_tokens) if self._prompt_only else certain)
        )

    def load_kept(self, tracker: RequestTracker, first_block: int) -> None:
        tracker.stale = True
        self._taint(tracker, tracker.block_ids[first_block:])

    def started(self, tracker: RequestTracker) -> None:
        """Marks the request as stale if it took blocks whose KV must not be stored from the engine's own cache."""
        if self._stale_hashes and not tracker.stale:
            blocks = self._watch.pool.blocks
            # A block that has lost its hash cannot be found by it, so its entry is dropped.
            self._stale_hashes = {
                block: block_hash
                for block, block_hash in self._stale_hashes.items()
                if blocks[block].block_hash == block_hash
            }
            tracker.stale = any(
                self._stale_hashes.get(block, b"") == blocks[block].block_hash
                for table in tracker.tables
                for block in table.ids
            )

    def _taint(self, tracker: RequestTracker, block_ids: Iterable[int]) -> None:
        """Marks these blocks of a stale request, so that requests that find them in the engine's own cache become stale
        too: KV computed from KV that must not be stored must not be stored either."""
        if tracker.stale and self._watch.has_pool:
            blocks = self._watch.pool.blocks
            for block in block_ids:
                if (block_hash := blocks[block].block_hash) is not None:
                    self._stale_hashes[block] = block_hash


def first_failed(block_ids: list[int], failed_blocks: set[int]) -> int | None:
    """Index of the first block in a request's table that is among the failed ones; None if none is."""
    if failed_blocks.isdisjoint(block_ids):
        return None
    held = np.array(block_ids, dtype=np.int64)
    return int(np.flatnonzero(np.isin(held, np.fromiter(failed_blocks, dtype=np.int64)))[0])
