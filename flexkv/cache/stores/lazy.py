"""Plans lazy stores: blocks are stored when the engine is about to reuse them, which the engine's free queue shows.
When a request ends, its blocks that the next step may reuse before the queue is read again are stored too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from flexkv.cache.base import CacheListener
from flexkv.cache.keys import EngineKeyChain
from flexkv.cache.stores.base import (
    GROUP,
    BlocksByGroup,
    PoolBlock,
    StepBlocks,
    StoreOrders,
    StoreParts,
    StoreRequest,
)
from flexkv.cache.stores.planner import RequestStores
from flexkv.facts.keys import KEY_BYTES, Keys
from flexkv.observe import PageLoss, get_logger, warn_once
from flexkv.transfer.graph import BlockIds, TransferGraph

logger = get_logger(__name__)

STEPS_AHEAD = 2
"""Number of full steps whose blocks are stored in advance: the blocks that these steps will take from the free queue.
One step is too few, because the next step may take its blocks before the copies that are planned now have ended."""

LAZY_REQUEST = "flexkv-lazy"


class LazyStores(RequestStores, CacheListener):
    """Offers the blocks at the head of the engine's free queue. A block is offered once, and again if its store was not
    published or the cache no longer has it. Between `reset` and `pool_emptied`, a block is not offered again.

    Attributes:
        suspects: by block number, the hash under which the block must not be stored: the caller keeps the block out of
            the cache, or it is not certain that the block's KV was computed. A hash is no proof of that, because the
            engine sets the hash when it plans to compute the block.
    """

    def __init__(self, parts: StoreParts) -> None:
        super().__init__(parts)
        # At most half of the host slots are used: more blocks would evict each other and be stored over and over again.
        step_blocks = -(-parts.step_tokens // self._block_tokens)
        self._most = max(1, parts.slots // 2)
        self._ahead = min(STEPS_AHEAD * step_blocks, self._most)
        self._step_blocks = min(step_blocks, parts.slots)
        self._seen: tuple[int, int] = (-1, -1)
        self._offered: dict[int, tuple[bytes, bytes]] = {}
        self._block_of_key: dict[bytes, int] = {}
        # Blocks that were computed before the planner was made are suspects, because their callers' settings are not
        # known.
        self.suspects: dict[int, bytes] = parts.watch.hashes()
        self._only_left = False
        """Whether only blocks in `_left` are offered, because other free blocks may have KV of replaced weights: the
        requests that computed them may have no record here."""
        self._key_parts: dict[int, tuple[bytes, bytes, bytes]] = {}
        """For each block whose hash does not identify its content: the hash, and the namespace and engine's key from
        which its key is made. These come from the last request that had the block."""
        self._passed_over: dict[int, bytes] = {}
        self._left: dict[int, bytes] = {}
        """The hash of each certain block that an ended or preempted request has left in the engine and that was not
        offered yet, by block number, oldest first. If the block no longer has this hash, it is lost: reused by a step
        or by another connector's load, or dropped in the engine's own reset."""

    def plan_step(
        self, requests: Iterable[StoreRequest], step: StepBlocks, orders: StoreOrders, idle: bool
    ) -> None:
        # Live requests are not examined: only blocks in the engine's free queue are offered.
        self._count_missed()
        graph = self._plan_head()
        if graph is not None:
            orders.early.append(graph)

    def plan_before_load(self, blocks: int) -> TransferGraph | None:
        """Plans stores of the free blocks that the engine may give to the load. A load may take more blocks than a
        step. If the load takes blocks before they are stored, a later step counts them as missed.
        """
        return self._plan_free(blocks + self._ahead)

    def preempted(self, request: StoreRequest) -> None:
        self._settle(request)
        if not request.stale and request.settings.ttl_s is None:
            self._count_preempted(request)

    def ended(self, request: StoreRequest, blocks: BlocksByGroup | None = None) -> list[TransferGraph]:
        self._settle(request)
        graph = self._plan_end(request)
        return [graph] if graph is not None else []

    def load_failed(self, blocks: Iterable[int]) -> None:
        # These blocks may have been free and offered when the last steps were planned. So all lazy stores in flight are
        # revoked; blocks with valid KV are offered again.
        self._manager.discard_from(LAZY_REQUEST, 0)
        self._suspect(blocks)

    def unpublished(self, blocks: BlockIds) -> None:
        """Lets these blocks be offered again."""
        for block in blocks.tolist():
            self._withdraw(block)
        if len(blocks):
            self._seen = (-1, -1)

    def on_evict(self, group: int, keys: Keys) -> None:
        """Called when blocks were removed from host memory. If the engine still has a removed block, the block is
        offered again when the engine's free queue changes."""
        if self._block_of_key:
            for row in keys:
                if (block := self._block_of_key.get(row.tobytes())) is not None:
                    self._withdraw(block)

    def reset(self, stale_hashes: dict[int, bytes]) -> None:
        self._only_left = True
        self._stale_hashes = stale_hashes
        self.suspects = dict(stale_hashes)
        self._offered.clear()
        self._block_of_key.clear()
        self._passed_over.clear()
        self._left.clear()
        self._seen = (-1, -1)

    def pool_emptied(self) -> None:
        super().pool_emptied()
        self.suspects = {}
        self._only_left = False

    def _settle(self, request: StoreRequest) -> None:
        """Called when a request loses its blocks. Blocks that must not be stored under their hash become suspects; the
        others are recorded to be offered."""
        if request.stale:
            self._suspect(request.block_ids)
            self.taint(request, request.block_ids)
            return
        good = max(0, request.certain) // self._block_tokens
        if request.suspect_from is not None:
            for block in request.block_ids[request.suspect_from : good]:
                self.suspects.pop(block, None)  # The block was computed again after the failed load.
        self._note_key_parts(request)
        # Blocks that the caller or `store.tokens` keeps out must not be stored. Blocks after one that the caller keeps
        # out are not stored either, because no lookup reaches them. But blocks before `own_from` came from the engine's
        # own cache and belong to other requests too, so this request's settings do not apply to them.
        first = good if request.settings.max_store_tokens is None else max(good, request.own_from)
        if request.settings.ttl_s is not None:
            # A block's time to live would begin when the block is stored, which may be much later. So none of the
            # request's own blocks is stored.
            first = min(first, request.own_from)
        if kept := request.kept_out.within(0, len(request.block_ids) * self._block_tokens):
            first = min(first, max(request.own_from, kept[0] // self._block_tokens))
        self._suspect(request.block_ids[first:])
        self._note_left(reversed(request.block_ids[:first]))  # The engine reuses the last block first.

    def _note_left(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._left.pop(block, None)
            block_hash, offered = self._watch.hash_of(block), self._offered.get(block)
            if block_hash is None or self.suspects.get(block) == block_hash:
                continue
            if offered is None or offered[0] != block_hash:
                self._left[block] = block_hash

    def _note_key_parts(self, request: StoreRequest) -> None:
        """Records how to make the keys of the blocks that the request did not find in the engine's own cache. This is
        needed because a block's hash does not always identify its content. The hash contains neither the content of a
        LoRA adapter nor the caller's namespace, and the names of inputs that it contains may be valid only in this run
        of the engine."""
        own = request.block_ids[request.own_from :]
        if not request.has_own_names:
            for block in own if self._key_parts else ():
                if self._key_parts.pop(block, None) is not None:
                    self._withdraw(block)
            return
        for number, block in enumerate(own, request.own_from):
            if (block_hash := self._watch.hash_of(block)) is not None:
                parts = (block_hash, *request.key_part(number, block_hash))
                if self._key_parts.get(block) != parts:
                    self._key_parts[block] = parts
                    self._withdraw(block)

    def _keys(self, blocks: Sequence[PoolBlock]) -> Keys:
        """Returns the key of each block, shape [blocks, KEY_BYTES], in the namespace of the request that left it."""
        positions: dict[bytes, list[int]] = {}
        engine_keys: list[bytes] = []
        for position, (number, block_hash) in enumerate(blocks):
            noted = self._key_parts.get(number) if self._key_parts else None
            if noted is not None and noted[0] == block_hash:
                _, namespace, engine_key = noted
            else:
                namespace, engine_key = self.parts.namespace, self._watch.engine_key(block_hash)
            positions.setdefault(namespace, []).append(position)
            engine_keys.append(engine_key)
        keys = np.empty((len(blocks), KEY_BYTES), np.uint8)
        for namespace, those in positions.items():
            chain = EngineKeyChain(namespace, GROUP)
            chain.extend([engine_keys[position] for position in those])
            keys[those] = chain.keys
        return keys

    def _suspect(self, blocks: Iterable[int]) -> None:
        """Makes blocks suspects: they must not be stored under the hash that they have now."""
        for block in blocks:
            if (block_hash := self._watch.hash_of(block)) is not None:
                self.suspects[block] = block_hash
                self._left.pop(block, None)
                self._passed_over.pop(block, None)

    def _plan_head(self) -> TransferGraph | None:
        """Plans stores of the blocks at the head of the free queue, if the queue has changed since the last call."""
        seen = self._watch.free_head
        if seen == self._seen:
            return None
        self._seen = seen
        return self._plan_free(self._ahead)

    def _plan_free(self, count: int) -> TransferGraph | None:
        """Plans stores of the blocks among the first `count` in the free queue that were not offered yet, as many as
        limits and queue entries allow."""
        candidates = [block for block in self._watch.free_blocks(count) if self._is_new(block)]
        room = max(0, min(self._watch.room, self._most)) if self.places > 0 else 0
        if len(candidates) > room:
            self._pass_over(candidates[room:])
            del candidates[room:]
        if not candidates:
            return None
        # In the free queue, the last block of a conversation comes first. Among blocks that were stored together, the
        # cache evicts the last one first. So the order is reversed.
        candidates.reverse()
        graph = self._offer(candidates)
        for op in graph.ops if graph is not None else ():
            self._watch.add_free(op.op_id, op.blocks)
        return graph

    def _plan_end(self, request: StoreRequest) -> TransferGraph | None:
        """Plans stores of an ending request's last blocks, as many as the engine may reuse in the next step before the
        free queue is read again. In a small pool these may be all its blocks. `store.max_reference_share` limits
        neither the number of these blocks nor that of live requests' blocks.
        """
        if request.stale:
            return None
        ids = request.block_ids
        end = min(request.certain // self._block_tokens, len(ids))
        # The request's blocks after its certain whole blocks are freed too, and are reused before them.
        _, free = self._watch.free_head
        first = max(0, end - max(0, self._step_blocks - free - len(ids) + end))
        if first == end:
            return None
        blocks = [block for block in self._watch.whole_blocks(ids[first:end]) if self._is_new(block)]
        if not blocks:
            return None
        if self.places < 1:
            self._pass_over(blocks)
            return None
        graph = self._offer(blocks)
        for op in graph.ops if graph is not None else ():
            self._watch.add(op.op_id, op.blocks)
        return graph

    def _offer(self, blocks: list[PoolBlock]) -> TransferGraph | None:
        """Offers blocks, and returns the graph of their stores. Blocks for which there is no slot or queue entry are
        offered again later.

        Args:
            blocks: blocks in the order of their prompts: an earlier block of a prompt comes first.
        """
        keys = self._keys(blocks)
        ids = np.array([block.number for block in blocks], dtype=np.int32)
        plan = self._manager.begin_store(LAZY_REQUEST, GROUP, keys, ids, 0)
        cached = self._manager.known(GROUP, keys) if plan.dropped else np.ones(len(blocks), np.bool_)
        for block, key, is_cached in zip(blocks, keys, cached.tolist(), strict=True):
            self._withdraw(block.number)
            self._left.pop(block.number, None)
            if is_cached:
                self._offered[block.number] = (block.block_hash, key.tobytes())
                self._block_of_key[key.tobytes()] = block.number
            else:
                self._pass_over([block])
        if self.parts.events is not None:
            hashes = [self._watch.engine_key(block.block_hash) for block in blocks]
            self.parts.events.planned_by_hash(plan, keys, hashes)
        self._manager.release(LAZY_REQUEST)
        return plan.graph

    def _pass_over(self, blocks: Iterable[PoolBlock]) -> None:
        """Records blocks that could not be stored now, so that the next step offers them again if the engine still has
        them."""
        self._passed_over.update(blocks)
        self._seen = (-1, -1)

    def _count_missed(self) -> None:
        """Counts recorded blocks that no longer have their hash and that the cache does not have: the engine has reused
        or dropped them before they were stored. Blocks that requests have left are checked from the oldest block up to
        the first block that still has its hash. Later calls check the remaining blocks.
        """
        gone: list[PoolBlock] = []
        for number, block_hash in self._passed_over.items():
            if self._watch.hash_of(number) == block_hash:
                self._left.setdefault(number, block_hash)
            else:
                gone.append(PoolBlock(number, block_hash))
                self._left.pop(number, None)
        self._passed_over.clear()
        while self._left:
            number, block_hash = next(iter(self._left.items()))
            if self._watch.hash_of(number) == block_hash:
                break
            del self._left[number]
            gone.append(PoolBlock(number, block_hash))
        missed = int(np.count_nonzero(~self._manager.known(GROUP, self._keys(gone)))) if gone else 0
        if missed:
            self.count(missed, PageLoss.LAZY_MISSED)
            warn_once(
                logger,
                "lazy-missed",
                "lazy stores do not keep up: the engine evicted or dropped %d blocks before they were stored; what is "
                "missed is counted in flexkv_lazy_missed_pages_total. A larger store.max_reference_share or host.bytes "
                "helps, or store.mode=eager",
                missed,
            )

    def _count_preempted(self, request: StoreRequest) -> None:
        """Counts as lost a preempted request's blocks that the engine has already reused and that were not offered."""
        keys, ids = request.tables[0].keys.keys(), request.block_ids
        end = min(max(0, request.certain) // self._block_tokens, len(ids), len(keys))
        if kept := request.kept_out.within(0, end * self._block_tokens):
            end = kept[0] // self._block_tokens
        hashes = [(block, self._watch.hash_of(block)) for block in ids[:end]]
        hashed = [PoolBlock(block, block_hash) for block, block_hash in hashes if block_hash is not None]
        there = {key.tobytes() for key in self._keys(hashed)}
        gone = {key.tobytes() for key in keys[:end]} - there - self._block_of_key.keys()
        self.count(len(gone), PageLoss.PREEMPTED)

    def _withdraw(self, block: int) -> None:
        """Removes the record that a block was offered."""
        if (offered := self._offered.pop(block, None)) is not None:
            self._block_of_key.pop(offered[1], None)

    def _is_new(self, block: PoolBlock) -> bool:
        """Whether a block may be stored, and was not offered yet."""
        number, block_hash = block
        if (offered := self._offered.get(number)) is not None and offered[0] == block_hash:
            return False
        if self.suspects and self.suspects.get(number) == block_hash:
            return False
        return not self._only_left or self._left.get(number) == block_hash
