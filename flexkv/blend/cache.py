"""The pages of segments: in flexkv's host pool, under keys in its index, moved by its transfer engine."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flexkv.blend.keys import GROUP, SegmentKeyScheme
from flexkv.blend.kv_shape import PLANES, KvShape
from flexkv.blend.rotation import KeyRotation, RowPlaces, TurnTable
from flexkv.blend.segment_load import Hit, SegmentLoad
from flexkv.blend.segments import Tokens
from flexkv.c_ext import KvView, SlotImage
from flexkv.cache.base import Completion, GroupSpec, ManagerLimits
from flexkv.cache.manager import LocalCacheManager
from flexkv.errors import CapacityError, ContractError, TransferError
from flexkv.transfer.base import Ticket
from flexkv.transfer.engine import TransferEngine
from flexkv.transfer.graph import OpResult, TransferGraph
from flexkv.transfer.host_pool import HostPool
from flexkv.transfer.layerwise.base import PREFETCH_LAYERS
from flexkv.transfer.trailer import digest_areas

MOST_HITS = 256
"""Segments of one prompt that are loaded at once; each takes queue places of the transfer engine."""


@dataclass(frozen=True, slots=True)
class LateBlocks:
    """Staging blocks of a transfer that nobody waits for any more; taken until it has ended.

    Attributes:
        request_id: of a store, whose pages the manager keeps until then; empty for a load.
    """

    ticket: Ticket
    blocks: NDArray[np.int32]
    request_id: str = ""


class SegmentCache:
    """Keys and values of segments, each computed by itself and kept as if it began at position 0.

    Not for several threads at once. To be closed.

    Args:
        shape: of the model's cache.
        namespace: whatever keeps two callers apart: model, weights, LoRA, salt.
        slots: pages of `block_tokens` tokens that the host pool holds; the least recently used go first.
        staging_tokens: tokens (in whole blocks) that may be on their way at once: the longest prompt.
        deadline_s: of each wait.
        prefetch_layers: see `LoadPipeline`.

    Raises:
        CapacityError: the pool does not fit the memory that is there.
    """

    def __init__(
        self,
        shape: KvShape,
        namespace: Mapping[str, bytes | str | int],
        *,
        slots: int,
        staging_tokens: int,
        block_tokens: int = 16,
        deadline_s: float = 60.0,
        prefetch_layers: int = PREFETCH_LAYERS,
    ) -> None:
        self.shape, self.block_tokens, self.deadline_s = shape, block_tokens, deadline_s
        self.prefetch_layers = prefetch_layers
        self.scheme = SegmentKeyScheme(namespace, block_tokens)
        blocks = -(-staging_tokens // block_tokens)
        self.staging = np.zeros(
            (shape.layers, blocks, PLANES, block_tokens, shape.heads, shape.head_dim), shape.carrier
        )
        view = self._view(blocks)
        trailer_bytes, (digests,) = digest_areas([len(view.runs)])
        image = SlotImage([view.stripe_bytes], trailer_bytes)
        self.pool = HostPool(image.total_bytes, slots)
        if not self.pool.wait_ready(slots, deadline_s):
            raise CapacityError(f"the pool for {slots} pages did not come up: {self.pool.stopped_reason}")
        self.engine = TransferEngine()
        self.engine.attach_view(
            GROUP, view, self.pool, 0, image.trailer_offset + digests, owners=[self.staging]
        )
        limits = ManagerLimits(
            ranks=1, inflight_load_pages=max(1, blocks), inflight_store_pages=max(1, blocks)
        )
        self.manager = LocalCacheManager([GroupSpec(block_tokens, slots)], limits)
        self.manager.grow(GROUP, slots)
        self._free = list(range(blocks - 1, -1, -1))
        self._late: list[LateBlocks] = []
        self._requests = itertools.count()

    def _view(self, blocks: int) -> KvView:
        run_bytes = PLANES * self.block_tokens * self.shape.row_bytes
        rows = [
            [self.staging[layer].ctypes.data, run_bytes, run_bytes, layer * run_bytes, layer]
            for layer in range(self.shape.layers)
        ]
        return KvView(np.array(rows, np.int64), blocks, self.shape.layers * run_bytes)

    # --- lookups ---

    def begin_load(self, segments: Sequence[Tokens | None]) -> SegmentLoad:
        """Begins to load what is cached of each segment, from its first token on; None is looked up for nothing.

        What finds no room in the staging pool is a miss.
        """
        self._free_late()
        hits: list[Hit] = []
        for number, tokens in enumerate(segments):
            if tokens is not None and len(hits) < MOST_HITS:
                hit = self._load_one(number, tokens)
                hits += [] if hit is None else [hit]
        return SegmentLoad(self, hits)

    def _load_one(self, number: int, tokens: Tokens) -> Hit | None:
        request_id = f"load-{next(self._requests)}"
        keys = self.scheme.keys(tokens)
        match = self.manager.match(request_id, [keys.whole], 0, [keys.tail])
        pages = match.blocks + (match.tail_tokens > 0)
        ticket, blocks = None, np.empty(0, np.int32)
        if pages and pages <= len(self._free):
            blocks = np.array([self._free.pop() for _ in range(pages)], np.int32)
            graph = self.manager.begin_load(request_id, [blocks], tail=match.tail_tokens > 0)
            ticket = None if graph is None else self._submit(graph)
        self.manager.release(request_id)
        if ticket is None:
            self._free.extend(blocks.tolist())
            return None
        return Hit(number, match.blocks * self.block_tokens + match.tail_tokens, blocks, ticket)

    def _submit(self, graph: TransferGraph) -> Ticket | None:
        """Layer by layer, so that the first layers can be used while the last ones move. None: no queue place."""
        layered = graph.layerwise()
        ticket = self.engine.submit(layered)
        if ticket is None:
            self._cancel(layered)
        return ticket

    def _cancel(self, graph: TransferGraph) -> None:
        """Tells the manager that a graph found no queue place and never moves."""
        for op in graph.ops:
            self.manager.complete(0, OpResult.cancelled(op.op_id, op.pages, "no queue place"))

    def finish(self, hit: Hit, wait_s: float) -> bool:
        """Frees a hit's staging blocks; False: after `wait_s` seconds something moves, and they are freed later."""
        if not self.engine.wait(hit.ticket, wait_s):
            self._late.append(LateBlocks(hit.ticket, hit.blocks))
            return False
        self._take_results()
        self._free.extend(hit.blocks.tolist())
        return True

    def _take_results(self) -> list[Completion]:
        done: list[Completion] = []
        while results := self.engine.poll():
            completions = (self.manager.complete(0, result) for result in results)
            done += [completion for completion in completions if completion is not None]
        return done

    def _free_late(self) -> None:
        """Frees what has ended since its deadline passed."""
        ended = [late for late in self._late if self.engine.wait(late.ticket, 0.0)]
        if not ended:
            return
        self._take_results()
        tickets = {late.ticket for late in ended}
        self._late = [late for late in self._late if late.ticket not in tickets]
        for late in ended:
            if late.request_id:
                self.manager.release(late.request_id)
            self._free.extend(late.blocks.tolist())

    # --- stores ---

    def store(
        self,
        tokens: Tokens,
        layers: Callable[[int], tuple[object, object]],
        rotation: KeyRotation,
        first_position: int = 0,
    ) -> int:
        """Stores a segment; its keys are turned to positions from 0 on. Returns how many of its tokens are cached now.

        Args:
            layers: of a layer, keys and values [heads, tokens, head_dim], contiguous, of any library, in host memory.
            first_position: at which the keys were computed.

        Raises:
            CapacityError: the segment is longer than the staging pool.
            TransferError: the pages still move at the deadline. Their staging blocks are freed once they do not.
        """
        self._free_late()
        keys = self.scheme.keys(tokens)
        pages = len(keys.whole) + (keys.tail is not None)
        if pages > len(self._free):
            raise CapacityError(
                f"a segment of {pages} blocks: the staging pool has {len(self._free)} free ones"
            )
        if rotation.row_bytes != self.shape.row_bytes:
            raise ContractError(
                f"rows of {rotation.row_bytes} bytes, the cache's have {self.shape.row_bytes}"
            )
        blocks = np.array([self._free.pop() for _ in range(pages)], np.int32)
        try:
            self._fill(len(tokens), blocks, layers, rotation, first_position)
            whole = len(keys.whole)
            cached = self._publish(keys.whole, blocks[:whole], 0, self.block_tokens)
            if keys.tail is not None and cached == whole * self.block_tokens:
                cached += self._publish(keys.tail.keys, blocks[whole:], whole, int(keys.tail.tokens[0]))
            return cached
        finally:
            moving = {block for late in self._late for block in late.blocks.tolist()}
            self._free.extend(block for block in blocks.tolist() if block not in moving)

    def _fill(
        self,
        tokens: int,
        blocks: NDArray[np.int32],
        layers: Callable[[int], tuple[object, object]],
        rotation: KeyRotation,
        first_position: int,
    ) -> None:
        row_bytes = self.shape.row_bytes
        head_bytes = row_bytes // self.shape.heads
        at = np.arange(tokens, dtype=np.int64)
        source = RowPlaces(at * head_bytes, tokens * head_bytes)
        in_block = blocks.astype(np.int64)[at // self.block_tokens] * (PLANES * self.block_tokens)
        turned = rotation.table(at + first_position, at)
        for layer in range(self.shape.layers):
            keys, values = layers(layer)
            for plane, (rows, table) in enumerate(((keys, turned), (values, TurnTable.copies(tokens)))):
                row = in_block + plane * self.block_tokens + at % self.block_tokens
                target = RowPlaces(row * row_bytes, head_bytes)
                rotation.apply(rows, source, self.staging[layer], target, table)

    def _publish(self, keys: NDArray[np.uint8], blocks: NDArray[np.int32], first: int, tokens: int) -> int:
        """Returns how many tokens of these blocks are in the cache afterwards."""
        if not len(keys):
            return 0
        request_id = f"store-{next(self._requests)}"
        plan = self.manager.begin_store(request_id, GROUP, keys, blocks, first, tokens)
        published = plan.known
        if plan.graph is not None:
            ticket = self.engine.submit(plan.graph)
            if ticket is None:
                self._cancel(plan.graph)
            elif not self.engine.wait(ticket, self.deadline_s):
                self._late.append(LateBlocks(ticket, blocks, request_id))
                raise TransferError(f"a store still moves after {self.deadline_s:g} s")
            ops = {op.op_id for op in plan.graph.ops}
            published += sum(len(done.published) for done in self._take_results() if done.op_id in ops)
        self.manager.release(request_id)
        return published * tokens

    def cached_tokens(self, tokens: Tokens) -> int:
        """How many leading tokens of a segment are cached."""
        request_id = f"look-{next(self._requests)}"
        keys = self.scheme.keys(tokens)
        match = self.manager.match(request_id, [keys.whole], 0, [keys.tail])
        self.manager.release(request_id)
        return match.blocks * self.block_tokens + match.tail_tokens

    def close(self) -> None:
        """
        Raises:
            TransferError: something still moves after the deadline; call again.
        """
        if not self.engine.close(self.deadline_s):
            raise TransferError(f"pages of segments still move after {self.deadline_s:g} s")
        self.pool.close()
