"""Engine blocks that stores read after their request has lost them, and what happens when the engine hands one out.

Nobody is handed a block that a request holds, so the blocks of live requests need no bound. A request that ends leaves
blocks whose copy is under way, and blocks that found no room for a copy yet. Both stay what they are until the engine
hands them out: they lie in its free queue, where those used last are handed out last. So flexkv holds them there, for a
bounded time, without a reference. A reference would make `reset_prefix_cache` fail before any connector hears of it,
and turn memory pressure into waiting and preemptions; without one the engine takes a block in the moment in which it
needs it.

The engine's pool tells when it hands such a block out, or resets (`BlockPool.unpin_blocks`). Where a copy is under way,
that step's metadata orders every worker to end the copy before its forward may write the block, or to count the page as
failed. Where none is, the block is held no more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from flexkv.adapters.vllm.block_keys import GROUP
from flexkv.errors import ContractError
from flexkv.transfer.graph import BlockIds, OpId

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


class HeldBlocks:
    """Blocks that an ended request has left, of which no copy is under way yet.

    Attributes:
        lost: those that the engine has handed out since, or forgotten in a reset.
        was_reset: the engine has reset its pool since.
    """

    __slots__ = ("block_ids", "lost", "was_reset")

    def __init__(self, block_ids: Sequence[int]) -> None:
        self.block_ids = block_ids
        self.lost: set[int] = set()
        self.was_reset = False


class StoreWatch(Protocol):
    """What a planner of stores needs to know of the engine's pool.

    Attributes:
        ops: stores in flight, and their blocks.
    """

    ops: dict[OpId, BlockIds]

    @property
    def room(self) -> int:
        """How many more blocks that no request holds may have a store in flight."""

    @property
    def has_pool(self) -> bool: ...
    @property
    def pool(self) -> BlockPool:
        """The engine's pool; asked for only if `has_pool`."""

    def has_cached(self, block_hash: bytes) -> bool:
        """Whether the engine's own prefix cache has the block of a hash, as far as is known."""

    def add(self, op_id: OpId, blocks: BlockIds, holder: str | None = None) -> None: ...
    def add_free(self, op_id: OpId, blocks: BlockIds) -> None: ...
    def add_held(self, op_id: OpId, blocks: BlockIds) -> None: ...
    def release(self, holder: str) -> None:
        """The request holds its blocks no more, or is about to lose them."""

    def end(self, op_id: OpId) -> None: ...
    def hold(self, block_ids: Sequence[int]) -> HeldBlocks: ...
    def end_hold(self, held: HeldBlocks) -> None: ...
    def still_held(self, block_ids: Sequence[int]) -> int: ...
    def take_reused(self) -> dict[OpId, list[int]]: ...
    def close(self) -> None: ...


class NoWatch:
    """For stores that end inside the step that computed their blocks: no block can be reused meanwhile."""

    room = 1 << 31
    has_pool = False

    def __init__(self) -> None:
        self.ops: dict[OpId, BlockIds] = {}

    @property
    def pool(self) -> BlockPool:
        raise ContractError("this connector is not given the engine's block pool")

    def has_cached(self, block_hash: bytes) -> bool:
        return False

    def add(self, op_id: OpId, blocks: BlockIds, holder: str | None = None) -> None:
        self.ops[op_id] = blocks

    def add_free(self, op_id: OpId, blocks: BlockIds) -> None:
        self.ops[op_id] = blocks

    def add_held(self, op_id: OpId, blocks: BlockIds) -> None:
        self.ops[op_id] = blocks

    def release(self, holder: str) -> None:
        """Nothing is watched."""

    def end(self, op_id: OpId) -> None:
        self.ops.pop(op_id, None)

    def hold(self, block_ids: Sequence[int]) -> HeldBlocks:
        raise ContractError("this connector does not hear which blocks the engine hands out")

    def end_hold(self, held: HeldBlocks) -> None:
        """Nothing was held."""

    def still_held(self, block_ids: Sequence[int]) -> int:
        return 0

    def take_reused(self) -> dict[OpId, list[int]]:
        return {}

    def close(self) -> None:
        """Nothing was watched."""


class BlockWatch:
    """Which engine blocks have a store in flight, and which of ended requests are to have one.

    `share` bounds the stores in flight of blocks that no request holds, because a step that is handed one out comes
    after its copy. What was in flight when its request ended counts too, and may exceed the bound.

    The engine's pool knows one watcher a block. One that is there already (another connector's, or vLLM's own) is
    called after ours, and put back by `close`. One that takes our place later makes the block count as handed out.
    """

    has_pool = True

    def __init__(self, pool: BlockPool, share: float) -> None:
        self._pool = pool
        self._limit = max(1, int(pool.num_gpu_blocks * share))
        self.ops: dict[OpId, BlockIds] = {}
        self._op_of_block: dict[int, OpId] = {}
        self._ops_of_holder: dict[str, set[OpId]] = {}
        self._holder_of_op: dict[OpId, str] = {}
        self._unheld = 0
        """Blocks with a store in flight that no request holds."""
        self._free: dict[OpId, list[tuple[KVCacheBlock, bytes]]] = {}
        self._watched: dict[OpId, list[int]] = {}
        """Those of them that lie under our watcher. What a request holds is not looked at, however much it is."""
        self._reused: dict[OpId, set[int]] = {}
        self._held: dict[int, list[HeldBlocks]] = {}
        self._callback = self._on_reuse
        self._others: dict[int, Callable[[KVCacheBlock], None]] = {}

    @property
    def room(self) -> int:
        """How many more blocks that no request holds may have a store in flight."""
        return self._limit - self._unheld

    @property
    def pool(self) -> BlockPool:
        return self._pool

    def has_cached(self, block_hash: bytes) -> bool:
        return self._pool.get_cached_block(block_hash, [GROUP]) is not None

    # --- stores in flight ---

    def add(self, op_id: OpId, blocks: BlockIds, holder: str | None = None) -> None:
        """Watches blocks that a live request holds.

        Args:
            holder: the request, where it holds them until `release`; None where the engine may take them back before.
        """
        self._watch(self._enter(op_id, blocks))
        if holder is None:
            self._count_unheld(op_id)
        else:
            self._ops_of_holder.setdefault(holder, set()).add(op_id)
            self._holder_of_op[op_id] = holder

    def add_free(self, op_id: OpId, blocks: BlockIds) -> None:
        """Watches blocks that lie in the engine's free queue with their hash, without moving them in it."""
        self._free[op_id] = [(block, block.block_hash) for block in self._enter(op_id, blocks)]
        self._unheld += len(blocks)

    def add_held(self, op_id: OpId, blocks: BlockIds) -> None:
        """Watches blocks of a hold that are `still_held`, without moving them in the engine's free queue."""
        self._enter(op_id, blocks)
        self._count_unheld(op_id)

    def release(self, holder: str) -> None:
        """The request holds its blocks no more, or is about to lose them: they count from now on."""
        for op_id in self._ops_of_holder.pop(holder, ()):
            del self._holder_of_op[op_id]
            self._count_unheld(op_id)

    def end(self, op_id: OpId) -> None:
        """The store has ended everywhere."""
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
        """Blocks handed out since the last call: op -> positions in the op."""
        watchers = self._pool._reuse_watchers
        for op_id, watched in self._watched.items():
            # Ours is gone when it was called, and then the block is known, or when another took its place unchained.
            lost = {block for block in watched if watchers.get(block) is not self._callback}
            if lost:
                self._reused.setdefault(op_id, set()).update(lost)
                self._watched[op_id] = [block for block in watched if block not in lost]
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

    # --- blocks that wait for a store ---

    def hold(self, block_ids: Sequence[int]) -> HeldBlocks:
        """Watches blocks that a request is about to lose, until `end_hold`. They stay free for the engine to take."""
        held = HeldBlocks(block_ids)
        self._watch([self._pool.blocks[block] for block in block_ids])
        for block in block_ids:
            self._held.setdefault(block, []).append(held)
        return held

    def end_hold(self, held: HeldBlocks) -> None:
        for block in held.block_ids:
            # By identity: a block is held once for each request that has left it.
            others = [other for other in self._held.get(block, ()) if other is not held]
            if others:
                self._held[block] = others
            else:
                self._held.pop(block, None)

    def still_held(self, block_ids: Sequence[int]) -> int:
        """How many leading blocks still have our callback. A callback that replaced ours does not call it."""
        watchers = self._pool._reuse_watchers
        for number, block in enumerate(block_ids):
            if watchers.get(block) is not self._callback:
                return number
        return len(block_ids)

    # --- life ---

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

    def _watch(self, blocks: list[KVCacheBlock]) -> None:
        for block in blocks:
            other = self._pool._reuse_watchers.get(block.block_id)
            if other is not None and other is not self._callback:
                self._others[block.block_id] = other
        # A reference that is taken and given back at once leaves the count as it was and the callback behind.
        self._pool.touch(blocks)
        self._pool.unpin_blocks(blocks, self._callback)

    def _count_unheld(self, op_id: OpId) -> None:
        self._watched[op_id] = self.ops[op_id].tolist()
        self._unheld += len(self.ops[op_id])

    def _on_reuse(self, block: KVCacheBlock) -> None:
        op_id = self._op_of_block.get(block.block_id)
        if op_id is not None:
            self._reused.setdefault(op_id, set()).add(block.block_id)
        for held in self._held.pop(block.block_id, ()):
            held.lost.add(block.block_id)
            # A block that is handed out has left the free queue by now; a reset leaves it there.
            held.was_reset = held.was_reset or block.next_free_block is not None
        other = self._others.pop(block.block_id, None)
        if other is not None:
            other(block)

    def _positions(self, op_id: OpId, ids: Iterable[int]) -> list[int]:
        wanted = set(ids)
        return [position for position, block in enumerate(self.ops[op_id].tolist()) if block in wanted]
