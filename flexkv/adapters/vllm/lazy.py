"""Lazy stores: what the engine is about to evict, read off its free queue."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from vllm.v1.core.kv_cache_utils import get_block_hash

from flexkv.adapters.vllm.events import EventLog
from flexkv.adapters.vllm.geometry import BlockGeometry
from flexkv.adapters.vllm.lookups import GROUP
from flexkv.adapters.vllm.references import StoreWatch
from flexkv.cache.base import CacheManager
from flexkv.cache.keys import EngineKeyChain
from flexkv.observe import Counters
from flexkv.transfer.graph import BlockIds, TransferGraph

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

STEPS_AHEAD = 2
"""How many full steps' worth of blocks at the head of the free queue are kept stored: the next step may take one
step's worth before the copies planned now have ended."""

LAZY_REQUEST = "flexkv-lazy"


class LazyPlanner:
    """Offers the blocks at the head of the engine's free queue."""

    def __init__(
        self,
        manager: CacheManager,
        watch: StoreWatch,
        geometry: BlockGeometry,
        namespace: bytes,
        step_tokens: int,
        counters: Counters,
        events: EventLog,
    ) -> None:
        self._manager = manager
        self._watch = watch
        self._geometry = geometry
        self._namespace = namespace
        self._ahead = STEPS_AHEAD * -(-step_tokens // geometry.block_tokens)
        self._counters = counters
        self._events = events
        self._seen: tuple[int, int] = (-1, -1)
        self._offered: dict[int, bytes] = {}
        self.suspects: dict[int, bytes] = {}

    def plan(self) -> TransferGraph | None:
        """Stores of blocks that the engine may hand out next and that the cache does not have."""
        queue = self._watch.pool.free_block_queue
        head = queue.fake_free_list_head.next_free_block
        seen = (head.block_id if head is not None else -1, queue.num_free_blocks)
        if seen == self._seen:
            return None
        self._seen = seen
        candidates = self._candidates()
        room = self._watch.room
        if len(candidates) > room:
            self._seen = (-1, -1)
            del candidates[max(0, room) :]
        if not candidates:
            return None
        # The queue has the ends of conversations first; the cache evicts a batch's last blocks first.
        candidates.reverse()
        hashes = [get_block_hash(block.block_hash) for block in candidates]
        chain = EngineKeyChain(self._namespace, GROUP)
        chain.extend(hashes)
        blocks = np.array([block.block_id for block in candidates], dtype=np.int32)
        plan = self._manager.begin_store(LAZY_REQUEST, GROUP, chain.keys, blocks, 0)
        if plan.dropped:
            self._counters.add("flexkv_dropped_store_pages_total", plan.dropped, reason="no_slot")
            self._seen = (-1, -1)
        else:
            self._offered.update((block.block_id, block.block_hash) for block in candidates)
        self._events.planned_by_hash(plan, chain.keys, hashes)
        self._manager.release(LAZY_REQUEST)
        if plan.graph is not None:
            for op in plan.graph.ops:
                self._watch.add_free(op.op_id, op.blocks)
        return plan.graph

    def reset(self, stale: dict[int, bytes]) -> None:
        """Everything stored became a miss; blocks that still hold KV of the old weights (`stale`) stay out."""
        self.suspects = dict(stale)
        self._offered.clear()
        self._seen = (-1, -1)

    def offer_again(self, blocks: BlockIds) -> None:
        """Blocks whose store ended without being published."""
        for block in blocks.tolist():
            self._offered.pop(block, None)
        if len(blocks):
            self._seen = (-1, -1)

    def suspect(self, block_ids: list[int]) -> None:
        """Blocks computed from a failed load or replaced weights: not to be stored under the hash they carry now."""
        blocks = self._watch.pool.blocks
        for block_id in block_ids:
            if (block_hash := blocks[block_id].block_hash) is not None:
                self.suspects[block_id] = block_hash

    def trust(self, block_ids: list[int]) -> None:
        """Blocks that were computed again."""
        for block_id in block_ids:
            self.suspects.pop(block_id, None)

    def _candidates(self) -> list[KVCacheBlock]:
        found: list[KVCacheBlock] = []
        for count, block in enumerate(self._watch.pool.free_block_queue.iter_blocks_after(None)):
            if count >= self._ahead:
                break
            block_hash = block.block_hash
            if block_hash is None or block.is_null:
                continue
            if self._offered.get(block.block_id) == block_hash:
                continue
            if self.suspects and self.suspects.get(block.block_id) == block_hash:
                continue
            if block.block_hash_num_tokens % self._geometry.block_tokens:
                continue  # the hash names a part of the block
            found.append(block)
        return found
