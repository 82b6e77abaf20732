"""Plans stores: which blocks of a request are certain, and which of those to offer to the cache now."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from flexkv.adapters.vllm.block_keys import GROUP, tail_extra
from flexkv.adapters.vllm.requests import RequestTracker
from flexkv.adapters.vllm.store_watch import StoreWatch
from flexkv.cache.base import CacheManager, StorePlan
from flexkv.cache.keys import tail_key
from flexkv.observe import Counters
from flexkv.transfer.graph import TransferGraph

if TYPE_CHECKING:
    from flexkv.adapters.vllm.events import EventLog

RETRY_STEPS = 16
"""Steps after which blocks that found no place are offered again. Offering costs microseconds for thousands of blocks,
and what fills queues takes milliseconds to drain: every step would be waste, never would lose the blocks."""


@dataclass(frozen=True, slots=True)
class StoreRules:
    """What of a request may be stored.

    Attributes:
        prompt_only: nothing that was generated.
        tails: also the last tokens, which fill no block.
    """

    block_tokens: int
    prompt_only: bool
    tails: bool


class StorePlanner:
    """Offers the certain blocks of requests to the cache."""

    def __init__(
        self,
        manager: CacheManager,
        watch: StoreWatch,
        rules: StoreRules,
        counters: Counters,
        events: EventLog,
    ) -> None:
        self._manager = manager
        self._watch = watch
        self._rules = rules
        self._counters = counters
        self._events = events
        self.stale_hashes: dict[int, bytes] = {}

    def certain_after_step(self, tracker: RequestTracker, scheduled_tokens: int) -> int:
        """Tokens whose KV is computed and accepted once this step's forward has run.

        Prompt tokens of this step count: they are known. What the step generates does not, nor what earlier steps
        drafted and nobody has accepted yet.
        """
        request = tracker.request
        computed, prompt = request.num_computed_tokens, request.num_prompt_tokens
        if computed < prompt:
            return int(min(computed + scheduled_tokens, prompt))
        if self._rules.prompt_only:
            return int(prompt)
        return int(min(computed - request.num_output_placeholders, request.num_tokens))

    def certain_at_end(self, tracker: RequestTracker) -> int:
        """Tokens whose KV is computed and accepted when the request ends, without steps still under way."""
        request = tracker.request
        # A preemption or a failed load takes computed tokens back while their steps are still under way.
        certain = min(max(0, request.num_computed_tokens - request.num_in_flight_tokens), request.num_tokens)
        return int(min(certain, request.num_prompt_tokens) if self._rules.prompt_only else certain)

    def plan(self, tracker: RequestTracker, certain_tokens: int, step: int) -> TransferGraph | None:
        """Stores of whole blocks that have not been offered yet."""
        end = min(certain_tokens // self._rules.block_tokens, len(tracker.block_ids))
        if end <= tracker.cursor or step < tracker.retry_step:
            return None
        first = tracker.cursor
        if tracker.skip_save or tracker.stale:
            self.taint(tracker, first, end)
            tracker.cursor = end
            return None
        keys = tracker.keys()
        end = min(end, len(keys))
        room = self._watch.room
        if end - first > room:
            self._counters.add(
                "flexkv_dropped_store_pages_total", end - first - room, reason="reference_limit"
            )
            tracker.retry_step = step + RETRY_STEPS
            end = first + room
        if end <= first:
            return None
        blocks = tracker.blocks(first, end)
        plan = self._manager.begin_store(tracker.request_id, GROUP, keys[first:end], blocks, first)
        if plan.dropped:
            self._counters.add("flexkv_dropped_store_pages_total", plan.dropped, reason="no_slot")
            tracker.retry_step = step + RETRY_STEPS
        else:
            tracker.cursor = end
        self._events.planned(tracker, plan, first)
        return self._watched(plan)

    def plan_tail(self, tracker: RequestTracker, certain_tokens: int) -> TransferGraph | None:
        """The store of the tokens after the last whole block, at the request's end."""
        block, tokens = divmod(certain_tokens, self._rules.block_tokens)
        if not self._rules.tails or tracker.skip_save or tracker.stale:
            return None
        if tokens == 0 or block >= len(tracker.block_ids) or self._watch.room < 1:
            return None
        request, first = tracker.request, certain_tokens - tokens
        extra = tail_extra(request, first, certain_tokens)
        if extra is None or block > len(tracker.keys()):
            return None
        parent = tracker.parent_key(block)
        tail = request.all_token_ids[first:certain_tokens]
        key = tail_key(tracker.namespace, GROUP, parent, extra, tail, block)
        plan = self._manager.begin_store(
            tracker.request_id, GROUP, key, tracker.blocks(block, block + 1), block, tokens
        )
        return self._watched(plan)

    def _watched(self, plan: StorePlan) -> TransferGraph | None:
        if plan.graph is not None:
            for op in plan.graph.ops:
                self._watch.add(op.op_id, op.blocks)
        return plan.graph

    def mark_stale(self, tracker: RequestTracker) -> None:
        """Whether the request took blocks that still hold KV of replaced weights from the engine's own cache."""
        if self.stale_hashes and not tracker.stale:
            blocks = self._watch.pool.blocks
            tracker.stale = any(
                self.stale_hashes.get(block, b"") == blocks[block].block_hash for block in tracker.block_ids
            )

    def taint(self, tracker: RequestTracker, first: int, end: int) -> None:
        """What was computed from KV of replaced weights is as bad, also for those who find it in the engine's cache."""
        if tracker.stale:
            blocks = self._watch.pool.blocks
            for block in tracker.block_ids[first:end]:
                if (block_hash := blocks[block].block_hash) is not None:
                    self.stale_hashes[block] = block_hash


def first_failed(block_ids: list[int], failed_blocks: set[int]) -> int | None:
    """Number of the first block of a request's table among the failed ones; None if it holds none of them."""
    if failed_blocks.isdisjoint(block_ids):
        return None
    held = np.array(block_ids, dtype=np.int64)
    return int(np.flatnonzero(np.isin(held, np.fromiter(failed_blocks, dtype=np.int64)))[0])
