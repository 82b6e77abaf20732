"""The cache of segments: their pages are in flexkv's host pool and optionally on disk."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from flexkv.blend.base import PLANES, Hit, KvShape, Tokens
from flexkv.blend.keys import GROUP, SegmentKeys, SegmentKeyScheme
from flexkv.blend.rotation import KeyRotation, RowPlaces, TurnTable
from flexkv.blend.segment_fetch import SegmentFetch
from flexkv.blend.segment_load import SegmentLoad
from flexkv.blend.segment_lookup import MOST_HITS, READS_A_HIT, SegmentLookup
from flexkv.blend.segment_moves import SegmentMoves
from flexkv.blend.segment_store import SegmentStore
from flexkv.blend.segment_unit import FLUSH_LOOK_S, SegmentFolders, SegmentUnit
from flexkv.blend.staging import StagingPool
from flexkv.errors import CapacityError, ContractError, TransferError
from flexkv.transfer.engine import TransferEngine
from flexkv.transfer.layerwise.base import PREFETCH_LAYERS

DISK_SHARE = 0.5
"""Share of the time for `close` that is reserved for the disks, even if closing the transfer engine takes long."""


class SegmentCache:
    """Caches the keys and values of segments. Each segment is computed alone, and cached as if it began at position 0.

    Not thread-safe. Must be closed.

    Args:
        shape: shape of the model's KV.
        namespace: everything that separates callers: model, weights, LoRA, salt. `shape` is added.
        slots: number of pages of `block_tokens` tokens that the host pool holds; the least recently used pages are
            evicted first.
        staging_tokens: how many tokens may be loaded or stored at the same time, rounded up to full blocks. This limits
            the cached tokens of one prompt.
        block_tokens: tokens per block.
        deadline_s: how long each wait may last, in seconds.
        prefetch_layers: see `LoadPipeline`.
        folders: folders that keep pages after they have left host memory, and after the process has exited.

    Raises:
        CapacityError: the pool does not fit into the available memory.
        FolderLockedError: another cache with this namespace uses a folder.
        FlexKVError: a folder cannot be used. The message says which one and why.
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
        folders: SegmentFolders = SegmentFolders(),  # noqa: B008 - frozen
    ) -> None:
        self.shape, self.block_tokens, self.deadline_s = shape, block_tokens, deadline_s
        self.prefetch_layers = prefetch_layers
        self.scheme = SegmentKeyScheme(namespace, block_tokens, shape)
        blocks = -(-staging_tokens // block_tokens)
        self.staging = StagingPool(shape, blocks, block_tokens)
        self.unit = SegmentUnit(
            shape,
            block_tokens,
            slots,
            self.staging.view,
            max(1, blocks),
            self.scheme.namespace,
            folders,
            READS_A_HIT * MOST_HITS,
            deadline_s,
        )
        live = self.unit.live
        self.manager, self.pool = live.manager, live.pool
        self._requests = itertools.count()
        try:
            self.engine = TransferEngine()
            (place,) = live.places[0]
            assert place.digests is not None, "segments are verified"
            self.engine.attach_view(
                GROUP, self.staging.view, self.pool, place.stripe, place.digests, owners=[self.staging.rows]
            )
        except BaseException:
            self.unit.close(self.unit.close_s)
            raise
        self._moves = SegmentMoves(self.unit, self.engine, self.staging)
        self._lookup = SegmentLookup(self.unit, self._moves, self.scheme)

    # --- lookups ---

    def begin_load(self, segments: Sequence[Tokens | None], caller: str = "") -> SegmentLoad:
        """Starts loading the cached leading part of each segment.

        A segment is a miss if the staging pool has too few free blocks for it. Full blocks on disk are loaded layer by
        layer while they are being read. This method waits until the tokens after the last full block are in host
        memory, at most `disk.wait_s` and at most `deadline_s`. If it raises, it frees all staging blocks except those
        of copies in flight. The latter are freed when the copies have finished.

        Args:
            segments: tokens of each segment; None for a segment to skip.
            caller: name of the caller; only segments that were stored for the same caller are found.
        """
        self._moves.free_late()
        hits = self._lookup.begin(segments, self.deadline_s, caller)
        return SegmentLoad(self._moves, hits, self.deadline_s)

    def load_staged(self, tokens: int) -> SegmentLoad:
        """Returns a load object for `tokens` tokens whose rows the caller itself writes to the staging pool. The
        object's only hit lists the blocks to write to.

        Raises:
            CapacityError: the staging pool has too few free blocks.
        """
        blocks = self.staging.take(-(-tokens // self.block_tokens))
        if blocks is None:
            raise CapacityError(f"{tokens} tokens: the staging pool has {len(self.staging.free)} free blocks")
        return SegmentLoad(self._moves, [Hit(0, tokens, blocks, (), ())], self.deadline_s)

    def begin_fetch(self, segments: Sequence[Tokens], caller: str = "") -> SegmentFetch:
        """Starts reading the cached leading part of each segment into host memory. The returned object then loads the
        parts from there. No call waits: the caller repeatedly calls the returned object's `begin_load`, and this
        cache's `poll` in between.

        Precondition: if there are folders, `SegmentFolders.asks_again` is set.

        Args:
            caller: see `begin_load`.
        """
        self._moves.free_late()
        reads_s = self.unit.wait_s if self.unit.streams else None
        return SegmentFetch(self._lookup, self._moves, segments, self.deadline_s, caller, reads_s)

    def poll(self) -> None:
        """Advances reads and writes of the disks. Never waits."""
        if self.unit.live.has_tiers:
            self._moves.free_late()

    @property
    def busy(self) -> bool:
        """Whether `poll` has to be called again, because reads, writes or a `begin_forget` have not finished."""
        return self.unit.live.busy

    # --- stores ---

    def store(
        self,
        tokens: Tokens,
        layers: Callable[[int], tuple[object, object]],
        rotation: KeyRotation,
        first_position: int = 0,
        caller: str = "",
    ) -> int:
        """Stores a segment, with its keys rotated to positions from 0 on, and waits until it is stored. Returns the
        number of the segment's leading tokens that lookups can find now.

        Args:
            layers: returns a layer's keys and values, each [heads, tokens, head_dim], contiguous, in host memory, as
                arrays or tensors of any library.
            rotation: the rotation of the model's keys.
            first_position: position at which the first key was computed.
            caller: name of the caller; loads for a different caller do not find the segment.

        Raises:
            CapacityError: the staging pool has too few free blocks for the segment.
            TransferError: copies are still in flight at the deadline. Their staging blocks are freed after they have
                finished.
        """
        store = self.begin_store(tokens, layers, rotation, first_position, caller)
        if not store.advance(wait=True):
            store.leave()
            raise TransferError(f"a store still moves after {self.deadline_s:g} s")
        return self.cached_of(store.keys)

    def begin_store(
        self,
        tokens: Tokens,
        layers: Callable[[int], tuple[object, object]],
        rotation: KeyRotation,
        first_position: int = 0,
        caller: str = "",
    ) -> SegmentStore:
        """Starts storing a segment, for a caller that must not wait. The segment's rows have been copied to the staging
        pool when this returns. The arguments are those of `store`.

        Raises:
            CapacityError: the staging pool has too few free blocks for the segment.
        """
        self._moves.free_late()
        keys = self.scheme.keys(tokens, caller)
        pages = len(keys.whole) + (keys.tail is not None)
        if rotation.row_bytes != self.shape.row_bytes:
            raise ContractError(
                f"rows of {rotation.row_bytes} bytes, the cache's have {self.shape.row_bytes}"
            )
        blocks = self.staging.take(pages)
        if blocks is None:
            raise CapacityError(
                f"a segment of {pages} blocks: the staging pool has {len(self.staging.free)} free ones"
            )
        try:
            self._fill(len(tokens), blocks, layers, rotation, first_position)
        except BaseException:
            self.staging.give(blocks.tolist())
            raise
        return SegmentStore(
            self._moves, self.manager, keys, blocks, self.block_tokens, self._store_name, self.deadline_s
        )

    def _store_name(self) -> str:
        return f"store-{next(self._requests)}"

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
                rotation.apply(rows, source, self.staging.rows[layer], target, table)

    def cached_tokens(self, tokens: Tokens) -> int:
        """Returns the number of leading tokens of a segment that are cached in host memory or on disk. Asks only the
        index.
        """
        return self.cached_of(self.scheme.keys(tokens))

    def cached_of(self, keys: SegmentKeys) -> int:
        """See `cached_tokens`; the segment is given by its keys."""
        pages, whole = self._lookup.pages(keys), len(keys.whole)
        tail_tokens = int(keys.tail.tokens[0]) if keys.tail is not None and pages > whole else 0
        return min(pages, whole) * self.block_tokens + tail_tokens

    def forget(self) -> None:
        """Permanently forgets everything that is cached, because the caller is about to change the model's weights.
        Waits until the deletion is durable, so that no page comes back after a crash. A disk that does not confirm the
        deletion in time is taken out of use.
        """
        self._moves.free_late()
        self.manager.reset()

    def begin_forget(self) -> None:
        """Like `forget`, but does not wait. When this returns, lookups find none of the pages that were cached before.
        Later calls of `poll` make the deletion durable on disk.
        """
        self._moves.free_late()
        self.manager.begin_reset()

    def flush(self) -> bool:
        """Makes all cached pages durable on disk, within the deadline. Returns whether all of them would survive a
        crash.

        Returns False if there is no disk, the disk is lost or full, a page could not be written, or copies are still in
        flight at the deadline.
        """
        if not self.unit.live.has_tiers:
            return False
        ends_s = time.monotonic() + self.deadline_s
        while self.manager.inflight_ops():  # pages that a load leases would not be written
            self._moves.free_late()
            self._moves.take_results()
            if not self.manager.inflight_ops():
                break
            if time.monotonic() >= ends_s:
                return False
            time.sleep(FLUSH_LOOK_S)
        return self.unit.flush(max(0.0, ends_s - time.monotonic()))

    def close(self, close_s: float | None = None) -> bool:
        """Closes the cache. If there is a disk, first writes the pages that only host memory has, and makes them
        durable.

        Args:
            close_s: how long the call may take, in seconds. If None, `SegmentFolders.close_s` applies; if that is None
                too, `deadline_s`.

        Returns:
            Whether all cached pages survive on disk; False if there is no disk.

        Raises:
            TransferError: copies are still in flight after the deadline. The caller should call `close` again.
        """
        close_s = self.unit.close_s if close_s is None else close_s
        ends_s = time.monotonic() + close_s
        if not self.engine.close((1 - DISK_SHARE) * close_s):
            # The host pool is kept, because copies may still write to it. As many of its pages as possible are made
            # durable.
            self.unit.flush(max(0.0, ends_s - time.monotonic()))
            raise TransferError(f"pages of segments still move after {close_s:g} s")
        self._moves.take_results()
        return self.unit.close(max(0.0, ends_s - time.monotonic()))
