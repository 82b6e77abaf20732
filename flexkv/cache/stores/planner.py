"""The contract of a store planner, and the common part of the two planners that store blocks (`eager.py`,
`lazy.py`)."""

from __future__ import annotations

from collections.abc import Iterable

from flexkv.cache.base import StorePlan
from flexkv.cache.stores.base import BlocksByGroup, StepBlocks, StoreOrders, StoreParts, StoreRequest
from flexkv.cache.stores.holds import Holds
from flexkv.observe import PageLoss
from flexkv.transfer.graph import BlockIds, TransferGraph


class StorePlanner:
    """Plans the stores of one engine. The scheduler's thread calls all methods. They never wait.

    This class itself plans no stores: it is for engines that only read the cache.

    Attributes:
        holds: ended requests with pending pages (see `holds.py`); None if the planner does not keep them.
    """

    holds: Holds | None = None

    def plan_step(
        self, requests: Iterable[StoreRequest], step: StepBlocks, orders: StoreOrders, idle: bool
    ) -> None:
        """Plans the stores of a step, and adds them to `orders`. O(requests + new blocks).

        Args:
            requests: the requests that the step computes, with the values of `computed`, `step_end` and `certain` for
                this step.
            step: the engine's report about its blocks in this step.
            idle: whether the step computes nothing.
        """

    def started(self, request: StoreRequest) -> None:
        """Called when the request has a new block table."""

    def preempted(self, request: StoreRequest) -> None:
        """Called when the engine preempts the request and takes its blocks. The request's tables still list these
        blocks."""

    def ended(self, request: StoreRequest, blocks: BlocksByGroup | None = None) -> list[TransferGraph]:
        """Plans the last stores of a request that has ended and whose blocks are about to be freed. Its `certain` does
        not include tokens of steps that are still running.

        Args:
            blocks: the request's current blocks; None if the engine does not report them.
        """
        return []

    def plan_before_load(self, blocks: int) -> TransferGraph | None:
        """Plans the stores that must begin before the engine gives `blocks` of its free blocks to a load."""
        return None

    def load_failed(self, blocks: Iterable[int]) -> None:
        """Called with engine blocks that have no valid KV. They are blocks that a load failed to fill, blocks that were
        computed from these by requests that have lost them since, and blocks that requests whose adapter's files have
        changed left behind. For blocks of live requests, the caller sets `cursor` and `suspect_from` instead."""

    def load_kept(self, request: StoreRequest, first_block: int) -> None:
        """Called when a load has failed and the engine does not compute its blocks again. The request then has wrong KV
        from block `first_block` of the first group on. Neither this KV nor KV that other requests compute from it is
        stored.
        """

    def unpublished(self, blocks: BlockIds) -> None:
        """Called when a store has ended and the pages of these engine blocks were not published."""

    def reset(self, stale_hashes: dict[int, bytes]) -> None:
        """Called when the cache was reset because the weights may have changed. Until `pool_emptied` is called, the
        engine's blocks may have KV of the old weights. The caller marks each request that gets such a block as stale.

        Args:
            stale_hashes: for each block in the engine's own prefix cache, its hash, by block number.
        """

    def pool_emptied(self) -> None:
        """Called when no block of the engine has KV of replaced weights any more, because the engine's pool was empty
        (`StoreWatch.is_empty`)."""


class RequestStores(StorePlanner):
    """The common part of the planners that store blocks. It watches the blocks that stores in flight read, counts
    blocks that are not stored, and does not store KV that was computed with replaced weights or from a failed load."""

    def __init__(self, parts: StoreParts) -> None:
        self.parts = parts
        self._manager = parts.manager
        self._watch = parts.watch
        self._groups = parts.groups
        self._block_tokens = parts.groups[0].block_tokens
        self._stale_hashes: dict[int, bytes] = {}

    @property
    def places(self) -> int:
        """Number of further stores for which the queue of every rank certainly has a free entry. A store occupies an
        entry in each rank's queue until the rank reports the store.
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
        """Reports a plan's stores to `StoreParts.events`, watches the blocks that the stores read, and returns the
        plan's graph.

        Args:
            holder: id of the request if it holds the blocks; None if it is about to lose them or has lost them.
            held: whether the blocks belong to a hold (see `holds.py`).
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

    def pool_emptied(self) -> None:
        self._stale_hashes = {}

    def load_kept(self, request: StoreRequest, first_block: int) -> None:
        request.stale = True
        self.taint(request, request.block_ids[first_block:])

    def started(self, request: StoreRequest) -> None:
        """Marks the request as stale if it has found blocks in the engine's own cache whose KV must not be stored."""
        if self._stale_hashes and not request.stale:
            hash_of = self._watch.hash_of
            # If a block no longer has the hash, no request can find it by the hash, so it is dropped from the record.
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
        """Records these blocks of a stale request. Requests that find them in the engine's own cache become stale too,
        because KV that was computed from them must not be stored either."""
        if request.stale:
            for block in block_ids:
                if (block_hash := self._watch.hash_of(block)) is not None:
                    self._stale_hashes[block] = block_hash
