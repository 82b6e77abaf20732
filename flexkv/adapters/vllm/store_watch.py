"""Watches engine blocks that store operations still have to read although no request holds them, and detects when the
engine reuses them.

The engine does not reuse a block that a request holds, so the blocks of live requests need no limit. A request that
ends may leave blocks whose copy is in flight, and blocks for whose copy there was no slot yet. These blocks keep their
content until the engine reuses them. They are in the engine's free queue, which hands out the most recently used blocks
last. So flexkv watches them in the queue for a bounded time, and takes no reference. With a reference,
`reset_prefix_cache` would fail before it calls any connector, and requests would wait or be preempted when memory is
short. Without one, the engine can reuse a block as soon as it needs the block.

The engine's pool calls back when it reuses a watched block or resets (`BlockPool.unpin_blocks`). If a copy of the block
is in flight, the step's metadata orders every worker to end the copy before the worker's forward pass may write to the
block. A worker that cannot do so counts the page as failed. If no copy has begun, flexkv no longer stores the block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import get_block_hash

from flexkv.cache.stores.base import GROUP, HeldBlocks, PoolBlock, StoreWatch
from flexkv.transfer.graph import BlockIds, OpId

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


class BlockWatch(StoreWatch):
    """Watches the engine blocks that are being stored, and the blocks of ended requests that wait to be stored.

    The engine's pool has one watcher per block. If a block already has a watcher (another connector's, or vLLM's own),
    flexkv's watcher calls it, and `close` restores it. If another watcher replaces flexkv's later, the block counts as
    reused.

    Args:
        share: the largest share of the pool's blocks that may be in the process of being stored while no request holds
            them. The share is limited because a step that gets such a block has to wait for the copy. Blocks that are
            being stored when their request ends count, too, and may exceed the limit.
        block_tokens: number of tokens per block of the first group.
    """

    def __init__(self, pool: BlockPool, share: float, block_tokens: int) -> None:
        super().__init__()
        self._pool = pool
        self._block_tokens = block_tokens
        self._limit = max(1, int(pool.num_gpu_blocks * share))
        self._op_of_block: dict[int, OpId] = {}
        self._ops_of_holder: dict[str, set[OpId]] = {}
        self._holder_of_op: dict[OpId, str] = {}
        self._unheld = 0
        """Number of blocks that are being stored and that no request holds."""
        self._free: dict[OpId, list[tuple[KVCacheBlock, bytes]]] = {}
        self._watched: dict[OpId, list[int]] = {}
        """By op, the blocks that are being stored, have flexkv's watcher, and are held by no request. Blocks that a
        request holds are left out, so that `take_reused` does not have to check them, however many there are."""
        self._reused: dict[OpId, set[int]] = {}
        self._checked: tuple[int, int] | None = None
        """`free_head` when `take_reused` last checked all of `_watched`; None if blocks were added since."""
        self._held: dict[int, list[HeldBlocks]] = {}
        self._callback = self._on_reuse
        self._others: dict[int, Callable[[KVCacheBlock], None]] = {}

    # --- stores in flight ---

    @property
    def room(self) -> int:
        return self._limit - self._unheld

    def add(self, op_id: OpId, blocks: BlockIds, holder: str | None = None) -> None:
        self._watch(self._enter(op_id, blocks))
        if holder is None:
            self._count_unheld(op_id)
        else:
            self._ops_of_holder.setdefault(holder, set()).add(op_id)
            self._holder_of_op[op_id] = holder

    def add_free(self, op_id: OpId, blocks: BlockIds) -> None:
        self._free[op_id] = [(block, block.block_hash) for block in self._enter(op_id, blocks)]
        self._unheld += len(blocks)

    def add_held(self, op_id: OpId, blocks: BlockIds) -> None:
        """Adds an op that stores blocks of an ended request (`HeldBlocks`). The blocks must be `still_held`. Does not
        move the blocks within the engine's free queue."""
        self._enter(op_id, blocks)
        self._count_unheld(op_id)

    def release(self, holder: str) -> None:
        for op_id in self._ops_of_holder.pop(holder, ()):
            del self._holder_of_op[op_id]
            self._count_unheld(op_id)

    def end(self, op_id: OpId) -> None:
        self._reused.pop(op_id, None)
        blocks = self.ops.pop(op_id, None)
        if blocks is None:
            return
        holder = self._holder_of_op.pop(op_id, None)
        if holder is None:
            self._unheld -= len(blocks)
            self._free.pop(op_id, None)
            self._watched.pop(op_id, None)
        else:
            of_holder = self._ops_of_holder[holder]
            of_holder.discard(op_id)
            if not of_holder:
                del self._ops_of_holder[holder]
        for block in blocks.tolist():
            if self._op_of_block.get(block) == op_id:
                del self._op_of_block[block]

    def take_reused(self) -> dict[OpId, list[int]]:
        # The engine takes blocks from the head of its free queue. If the head is still the same, it has taken none.
        if (head := self.free_head) != self._checked:
            self._checked = head
            self._find_unwatched()
        for op_id, free in self._free.items():
            # The engine removes the hash of a block that it reuses. A block that it takes for a hit keeps its hash
            # and its content.
            gone = {block.block_id for block, block_hash in free if block.block_hash != block_hash}
            if gone:
                self._reused.setdefault(op_id, set()).update(gone)
                self._free[op_id] = [entry for entry in free if entry[0].block_id not in gone]
        if not self._reused:
            return {}
        reused, self._reused = self._reused, {}
        return {op_id: self._positions(op_id, ids) for op_id, ids in reused.items()}

    def _find_unwatched(self) -> None:
        """Records as reused all blocks in `_watched` that no longer have flexkv's watcher. Either the engine has called
        this watcher, which has recorded the block already, or another watcher has replaced it.
        """
        watchers = self._pool._reuse_watchers
        for op_id, watched in self._watched.items():
            # The usual case is tested without a loop in Python, because most steps of a busy engine reach this line.
            if list(map(watchers.get, watched)).count(self._callback) == len(watched):
                continue
            lost = {block for block in watched if watchers.get(block) is not self._callback}
            self._reused.setdefault(op_id, set()).update(lost)
            self._watched[op_id] = [block for block in watched if block not in lost]

    # --- blocks that wait for a store ---

    def hold(self, block_ids: Sequence[int]) -> HeldBlocks:
        held = HeldBlocks(block_ids)
        self._watch([self._pool.blocks[block] for block in block_ids])
        for block in block_ids:
            self._held.setdefault(block, []).append(held)
        return held

    def end_hold(self, held: HeldBlocks) -> None:
        for block in held.block_ids:
            # Holds are compared by identity, because several ended requests may each hold the same block.
            others = [other for other in self._held.get(block, ()) if other is not held]
            if others:
                self._held[block] = others
            else:
                self._held.pop(block, None)

    def still_held(self, block_ids: Sequence[int]) -> int:
        """Returns how many leading blocks still have flexkv's watcher. This must be checked, because a watcher that has
        replaced flexkv's does not call it."""
        watchers = self._pool._reuse_watchers
        for number, block in enumerate(block_ids):
            if watchers.get(block) is not self._callback:
                return number
        return len(block_ids)

    # --- the pool ---

    def is_empty(self) -> bool:
        # One block, the null block, is never free.
        pool = self._pool
        return (
            not len(pool.cached_block_hash_to_block) and pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        )

    def has_cached(self, block_hash: bytes) -> bool:
        return self._pool.get_cached_block(block_hash, [GROUP]) is not None

    def hash_of(self, block: int) -> bytes | None:
        return self._pool.blocks[block].block_hash

    def hashes(self) -> dict[int, bytes]:
        return {b.block_id: b.block_hash for b in self._pool.blocks if b.block_hash is not None}

    @property
    def free_head(self) -> tuple[int, int]:
        queue = self._pool.free_block_queue
        head = queue.fake_free_list_head.next_free_block
        return (head.block_id if head is not None else -1, queue.num_free_blocks)

    def free_blocks(self, count: int) -> list[PoolBlock]:
        return self._whole(islice(self._pool.free_block_queue.iter_blocks_after(None), count))

    def whole_blocks(self, block_ids: Sequence[int]) -> list[PoolBlock]:
        return self._whole(self._pool.blocks[block] for block in block_ids)

    def _whole(self, blocks: Iterable[KVCacheBlock]) -> list[PoolBlock]:
        whole = self._block_tokens
        return [
            PoolBlock(block.block_id, block.block_hash)
            for block in blocks
            if block.block_hash is not None and not block.is_null and not block.block_hash_num_tokens % whole
        ]

    def engine_key(self, block_hash: bytes) -> bytes:
        return bytes(get_block_hash(block_hash))

    # --- life ---

    def close(self) -> None:
        """Removes flexkv's watchers from the engine's pool, and restores the watchers that were there before."""
        watchers = self._pool._reuse_watchers
        for block_id in [block_id for block_id, watcher in watchers.items() if watcher is self._callback]:
            if (other := self._others.pop(block_id, None)) is not None:
                watchers[block_id] = other
            else:
                del watchers[block_id]

    def _enter(self, op_id: OpId, blocks: BlockIds) -> list[KVCacheBlock]:
        ids = blocks.tolist()
        self.ops[op_id] = blocks
        self._op_of_block.update(dict.fromkeys(ids, op_id))
        return [self._pool.blocks[block] for block in ids]

    def _watch(self, blocks: list[KVCacheBlock]) -> None:
        for block in blocks:
            other = self._pool._reuse_watchers.get(block.block_id)
            if other is not None and other is not self._callback:
                self._others[block.block_id] = other
        # These calls take a reference and drop it at once, which sets the callback and leaves the reference count
        # unchanged.
        self._pool.touch(blocks)
        self._pool.unpin_blocks(blocks, self._callback)

    def _count_unheld(self, op_id: OpId) -> None:
        self._watched[op_id] = self.ops[op_id].tolist()
        self._unheld += len(self.ops[op_id])
        self._checked = None

    def _on_reuse(self, block: KVCacheBlock) -> None:
        op_id = self._op_of_block.get(block.block_id)
        if op_id is not None:
            self._reused.setdefault(op_id, set()).add(block.block_id)
        for held in self._held.pop(block.block_id, ()):
            held.lost.add(block.block_id)
            # When the engine reuses a block, the block has left the free queue. In a reset, it is still in the queue.
            held.was_reset = held.was_reset or block.next_free_block is not None
        other = self._others.pop(block.block_id, None)
        if other is not None:
            other(block)

    def _positions(self, op_id: OpId, ids: Iterable[int]) -> list[int]:
        wanted = set(ids)
        return [position for position, block in enumerate(self.ops[op_id].tolist()) if block in wanted]
