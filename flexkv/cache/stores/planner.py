"""The contract of a store planner, and what the modes that store have in common (`eager.py`, `lazy.py`)."""

from __future__ import annotations

from collections.abc import Iterable

from flexkv.cache.base import StorePlan
from flexkv.cache.stores.base import BlocksByGroup, StepBlocks, StoreOrders, StoreParts, StoreRequest
from flexkv.cache.stores.holds import Holds
from flexkv.observe import PageLoss
from flexkv.transfer.graph import BlockIds, TransferGraph


class StorePlanner:
    """One engine's stores. The scheduler's thread calls all methods, which plan stores and never wait.

    This class plans none: it serves an engine that only reads the cache.

    Attributes:
        holds: ended requests with pending pages; None for a mode without holds.
    """

    holds: Holds | None = None

    def plan_step(
        self, requests: Iterable[StoreRequest], step: StepBlocks, orders: StoreOrders, idle: bool
    ) -> None:
        """Adds a step's stores to its orders. Costs O(requests + new blocks).

        Args:
            requests: those that the step computes, with `computed`, `step_end` and `certain` as of this step.
            idle: the step computes nothing.
        """

    def started(self, request: StoreRequest) -> None:
        """Called when the request has a new block table."""

    def preempted(self, request: StoreRequest) -> None:
        """Called when the engine takes the request's blocks away, while its tables still have them."""

    def ended(self, request: StoreRequest, blocks: BlocksByGroup | None = None) -> list[TransferGraph]:
        """Plans the last stores of a request that has ended and whose blocks are about to be freed. Its `certain` does
        not count steps that are still under way.

        Args:
            blocks: the request's blocks now; None if the engine does not say.
        """
        return []

    def plan_before_load(self, blocks: int) -> TransferGraph | None:
        """Plans the stores that should begin before the engine gives `blocks` of its free blocks to a load."""
        return None

    def load_failed(self, blocks: Iterable[int]) -> None:
        """Takes blocks without valid KV: targets of a failed load, and blocks that were computed from them by requests
        that have lost their blocks since. Live requests have `cursor` and `suspect_from` for this instead."""

    def load_kept(self, request: StoreRequest, first_block: int) -> None:
        """Called when a request keeps wrong KV from this block of the first group on, which the engine does not
        recompute: neither this KV nor any that other requests compute from it is stored.
        """

    def unpublished(self, blocks: BlockIds) -> None:
        """Called when a store of these engine blocks ended without being published."""

    def reset(self, stale_hashes: dict[int, bytes]) -> None:
        """Called when the weights change.

        Args:
            stale_hashes: engine block -> its hash, for blocks that may still hold KV of the old weights.
        """


class RequestStores(StorePlanner):
    """The common part of the modes that store. It watches and counts offered blocks, and keeps out KV of replaced
    weights or from a failed load."""

    def __init__(self, parts: StoreParts) -> None:
        self.parts = parts
        self._manager = parts.manager
        self._watch = parts.watch
        self._groups = parts.groups
        self._block_tokens = parts.groups[0].block_tokens
        self._stale_hashes: dict[int, bytes] = {}

    @property
    def places(self) -> int:
        """Number of further stores for which every rank's queue certainly has room: a store keeps its entry in a rank's
        queue until the rank's report of it is under way.
        """
        return self.parts.queue_ops - len(self._watch.ops)

    def count(self, pages: int, reason: PageLoss) -> None:
        """Counts pages that were computed and will not be stored."""
        reason.count(self.parts.counters, pages)

    def note_plan(
        self,
        request: StoreRequest,
        group: int,
        plan: StorePlan,
        first_block: int,
        holder: str | None = None,
        held: bool = False,
    ) -> TransferGraph | None:
        """Announces a plan's stores, and watches the blocks that they read; returns the plan's graph.

        Args:
            holder: the request while it holds its blocks.
            held: the blocks are those of a hold.
        """
        if self.parts.events is not None:
            self.parts.events.planned(request, group, plan, first_block)
        for op in plan.graph.ops if plan.graph is not None else ():
            if held:
                self._watch.add_held(op.op_id, op.blocks)
            else:
                self._watch.add(op.op_id, op.blocks, holder)
        return plan.graph

    # --- blocks that must not be stored ---

    def load_kept(self, request: StoreRequest, first_block: int) -> None:
        request.stale = True
        self.taint(request, request.block_ids[first_block:])

    def started(self, request: StoreRequest) -> None:
        """Marks the request as stale if it took blocks whose KV must not be stored from the engine's own cache."""
        if self._stale_hashes and not request.stale:
            hash_of = self._watch.hash_of
            # A block that has lost its hash cannot be found by it, so its entry is dropped.
            self._stale_hashes = {
                block: block_hash
                for block, block_hash in self._stale_hashes.items()
                if hash_of(block) == block_hash
            }
            request.stale = any(
                self._stale_hashes.get(block, b"") == hash_of(block)
                for table in request.tables
                for block in table.ids
            )

    def taint(self, request: StoreRequest, block_ids: Iterable[int]) -> None:
        """Marks these blocks of a stale request, so that requests that find them in the engine's own cache become stale
        too: KV computed from KV that must not be stored must not be stored either."""
        if request.stale:
            for block in block_ids:
                if (block_hash := self._watch.hash_of(block)) is not None:
                    self._stale_hashes[block] = block_hash
