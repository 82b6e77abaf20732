"""Stores: the contract of the modes, which decide when blocks are offered to the cache (`eager_stores.py`,
`lazy_stores.py`), and what they share: which tokens of a request are certain."""

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
    """One engine's stores. Called by the scheduler's thread; plans and never waits.

    Attributes:
        holds: ended requests with pending pages; None for a mode that has none.
    """

    holds: Holds | None = None

    @abstractmethod
    def plan_step(self, output: SchedulerOutput, step: int, orders: ConnectorMetadata) -> None:
        """Adds the step's stores to its orders. Costs O(requests + new blocks)."""

    @abstractmethod
    def started(self, tracker: RequestTracker) -> None:
        """The request has a new block table."""

    @abstractmethod
    def preempted(self, tracker: RequestTracker) -> None:
        """The engine takes the request's blocks away; the tracker still knows them."""

    @abstractmethod
    def ended(
        self, tracker: RequestTracker, step: int, blocks: BlocksByGroup | None = None
    ) -> list[TransferGraph]:
        """The request has ended and its blocks are about to be freed: the last stores of what it computed.

        Args:
            blocks: that it has now, by the engine's numbers of the groups; None where the engine does not say.
        """

    def before_load(self, blocks: int) -> TransferGraph | None:
        """The engine is about to hand so many of its free blocks to a load: plans stores that should begin first."""
        return None

    @abstractmethod
    def load_failed(self, blocks: Iterable[int]) -> None:
        """These blocks hold no valid KV: targets of a failed load, and what requests that have lost them computed from
        those. Of live requests their `cursor` and `suspect_from` tell."""

    @abstractmethod
    def load_kept(self, tracker: RequestTracker, first_block: int) -> None:
        """From this block of the first group on the request has wrong KV that the engine does not compute again:
        nothing of it is stored, nor what others compute from these blocks."""

    @abstractmethod
    def unpublished(self, blocks: BlockIds) -> None:
        """A store of these engine blocks ended without being published."""

    @abstractmethod
    def reset(self, stale_hashes: dict[int, bytes]) -> None:
        """New weights. `stale_hashes`: engine blocks that still carry the hash of KV of the old ones."""


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
    """Of one engine's scheduler: what a mode that stores reads, and where it reports to."""

    unit: EngineUnit
    spec: EngineSpec
    requests: RequestTable
    watch: StoreWatch
    counters: Counters
    events: EventLog | None


class RequestStores(StoreMode):
    """What the modes that store know of requests: which tokens are certain, and which blocks hold KV of replaced
    weights, or from a failed load."""

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
        """How many more stores every rank's queue has a place for, at least: a store has its place on a rank until the
        rank's report of it is under way."""
        return self._queue_ops - len(self._watch.ops)

    def _certain_after_step(self, tracker: RequestTracker, scheduled_tokens: int) -> int:
        """Tokens whose KV is computed and accepted once this step's forward has run.

        Prompt tokens of this step count: they are known. What the step generates does not, nor what earlier steps
        drafted and nobody has accepted yet.
        """
        request = tracker.request
        computed, prompt = request.num_computed_tokens, request.num_prompt_tokens
        if computed < prompt:
            return int(min(computed + scheduled_tokens, prompt))
        if self._prompt_only:
            return int(prompt)
        return int(min(computed - request.num_output_placeholders, request.num_tokens))

    def _certain_at_end(self, tracker: RequestTracker) -> int:
        """Tokens whose KV is computed and accepted when the request ends, without steps still under way."""
        request = tracker.request
        # A preemption or a failed load takes computed tokens back while their steps are still under way.
        certain = min(max(0, request.num_computed_tokens - request.num_in_flight_tokens), request.num_tokens)
        return int(min(certain, request.num_prompt_tokens) if self._prompt_only else certain)

    def load_kept(self, tracker: RequestTracker, first_block: int) -> None:
        tracker.stale = True
        self._taint(tracker, tracker.block_ids[first_block:])

    def started(self, tracker: RequestTracker) -> None:
        """Notes whether the request took blocks whose KV must not be stored from the engine's own cache."""
        if self._stale_hashes and not tracker.stale:
            blocks = self._watch.pool.blocks
            # Nobody finds a block by a hash that it has no more.
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
        """What was computed from KV that must not be stored is as bad, also for those who find it in the engine's
        cache."""
        if tracker.stale and self._watch.has_pool:
            blocks = self._watch.pool.blocks
            for block in block_ids:
                if (block_hash := blocks[block].block_hash) is not None:
                    self._stale_hashes[block] = block_hash


def first_failed(block_ids: list[int], failed_blocks: set[int]) -> int | None:
    """Number of the first block of a request's table among the failed ones; None if it holds none of them."""
    if failed_blocks.isdisjoint(block_ids):
        return None
    held = np.array(block_ids, dtype=np.int64)
    return int(np.flatnonzero(np.isin(held, np.fromiter(failed_blocks, dtype=np.int64)))[0])
