"""Engine blocks that a store in flight still reads, and what happens when the engine hands one out again.

A store takes no reference. A reference would keep the block out of the engine's pool, make `reset_prefix_cache` fail
while any copy is in flight, and turn memory pressure into preemptions. Instead the engine's pool tells us when it
hands such a block out (`BlockPool.unpin_blocks`): that step's metadata then orders every worker to end the copy
before its forward may write the block, or to count the page as failed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

from flexkv.adapters.vllm.block_keys import GROUP
from flexkv.errors import ContractError
from flexkv.transfer.graph import BlockIds, OpId

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


class StoreWatch(Protocol):
    """What a planner of stores needs to know of the engine's pool.

    Attributes:
        ops: stores in flight whose blocks are watched; without any, none is handed out under one.
    """

    ops: dict[OpId, BlockIds]

    @property
    def room(self) -> int:
        """How many more blocks may have a store in flight."""

    @property
    def pool(self) -> BlockPool: ...
    def has_cached(self, block_hash: bytes) -> bool:
        """Whether the engine's own prefix cache has the block of a hash, as far as is known."""

    def add(self, op_id: OpId, blocks: BlockIds) -> None: ...
    def add_free(self, op_id: OpId, blocks: BlockIds) -> None: ...
    def end(self, op_id: OpId) -> None: ...
    def take_reused(self) -> dict[OpId, list[int]]: ...
    def close(self) -> None: ...


class NoWatch:
    """For stores that end inside the step that computed their blocks: no block can be reused meanwhile."""

    room = 1 << 31

    def __init__(self) -> None:
        self.ops: dict[OpId, BlockIds] = {}

    @property
    def pool(self) -> BlockPool:
        raise ContractError("this connector is not given the engine's block pool")

    def has_cached(self, block_hash: bytes) -> bool:
        return False

    def add(self, op_id: OpId, blocks: BlockIds) -> None:
        """Nothing to watch."""

    def add_free(self, op_id: OpId, blocks: BlockIds) -> None:
        """Nothing to watch."""

    def end(self, op_id: OpId) -> None:
        """Nothing was watched."""

    def take_reused(self) -> dict[OpId, list[int]]:
        return {}

    def close(self) -> None:
        """Nothing was watched."""


class BlockWatch:
    """Which engine blocks have a store in flight, bounded by a share of the engine's pool.

    The engine's pool knows one watcher a block. One that is there already (another connector's, or vLLM's own) is
    called after ours, and put back by `close`. One that takes our place later makes the block count as handed out.
    """

    def __init__(self, pool: BlockPool, share: float) -> None:
        self._pool = pool
        self._limit = max(1, int(pool.num_gpu_blocks * share))
        self.ops: dict[OpId, BlockIds] = {}
        self._op_of_block: dict[int, OpId] = {}
        self._free: dict[OpId, list[tuple[KVCacheBlock, bytes]]] = {}
        self._held: dict[OpId, list[int]] = {}
        self._reused: dict[OpId, set[int]] = {}
        self._callback = self._on_reuse
        self._others: dict[int, Callable[[KVCacheBlock], None]] = {}

    @property
    def room(self) -> int:
        """How many more blocks may have a store in flight."""
        return self._limit - len(self._op_of_block)

    @property
    def pool(self) -> BlockPool:
        return self._pool

    def has_cached(self, block_hash: bytes) -> bool:
        return self._pool.get_cached_block(block_hash, [GROUP]) is not None

    def add(self, op_id: OpId, blocks: BlockIds) -> None:
        """Watches blocks that a live request holds."""
        held = self._enter(op_id, blocks)
        for block in held:
            other = self._pool._reuse_watchers.get(block.block_id)
            if other is not None and other is not self._callback:
                self._others[block.block_id] = other
        # A reference that is taken and given back at once leaves the count as it was and the callback behind.
        self._pool.touch(held)
        self._pool.unpin_blocks(held, self._callback)
        self._held[op_id] = blocks.tolist()

    def add_free(self, op_id: OpId, blocks: BlockIds) -> None:
        """Watches blocks that lie in the engine's free queue with their hash, without moving them in it."""
        self._free[op_id] = [(block, block.block_hash) for block in self._enter(op_id, blocks)]

    def end(self, op_id: OpId) -> None:
        """The store has ended everywhere."""
        self._free.pop(op_id, None)
        self._held.pop(op_id, None)
        self._reused.pop(op_id, None)
        blocks = self.ops.pop(op_id, None)
        for block in () if blocks is None else blocks.tolist():
            if self._op_of_block.get(block) == op_id:
                del self._op_of_block[block]

    def take_reused(self) -> dict[OpId, list[int]]:
        """Blocks handed out since the last call: op -> positions in the op."""
        watchers = self._pool._reuse_watchers
        for op_id, held in self._held.items():
            # Ours is gone when it was called, and then the block is known, or when another took its place unchained.
            lost = {block for block in held if watchers.get(block) is not self._callback}
            if lost:
                self._reused.setdefault(op_id, set()).update(lost)
                self._held[op_id] = [block for block in held if block not in lost]
        for op_id, free in self._free.items():
            # Handing a block out drops its hash; a hit takes it with the hash, and its content stays.
            gone = {block.block_id for block, block_hash in free if block.block_hash != block_hash}
            if gone:
                self._reused.setdefault(op_id, set()).update(gone)
                self._free[op_id] = [entry for entry in free if entry[0].block_id not in gone]
        if not self._reused:
            return {}
        reused, self._reused = self._reused, {}
        return {op_id: self._positions(op_id, ids) for op_id, ids in reused.items()}

    def close(self) -> None:
        """Takes our watchers off the engine's pool and puts back those that were there before."""
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

    def _on_reuse(self, block: KVCacheBlock) -> None:
        op_id = self._op_of_block.get(block.block_id)
        if op_id is not None:
            self._reused.setdefault(op_id, set()).add(block.block_id)
        other = self._others.pop(block.block_id, None)
        if other is not None:
            other(block)

    def _positions(self, op_id: OpId, ids: Iterable[int]) -> list[int]:
        wanted = set(ids)
        return [position for position, block in enumerate(self.ops[op_id].tolist()) if block in wanted]
