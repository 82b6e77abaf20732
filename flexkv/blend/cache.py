"""The cache of segments: pages in flexkv's host pool and optionally on disk, indexed and moved by flexkv."""

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
"""This share of a close's time is the disks', whatever hangs before."""


class SegmentCache:
    """Keys and values of segments, each computed by itself and kept as if it began at position 0.

    Not thread-safe. Must be closed.

    Args:
        shape: shape of the model's cache.
        namespace: everything that separates callers: model, weights, LoRA, salt. `shape` is added.
        slots: pages of `block_tokens` tokens that the host pool holds; the least recently used are evicted first.
        staging_tokens: tokens (in whole blocks) that may be moving at once, which limits the longest prompt.
        deadline_s: seconds that each wait lasts at most.
        prefetch_layers: see `LoadPipeline`.
        folders: folders in which pages outlive host memory and the process.

    Raises:
        CapacityError: the pool does not fit into the available memory.
        FolderLockedError: another cache with this namespace uses a folder.
        FlexKVError: a folder cannot be used; the message says which and why.
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
        """Begins to load the cached leading part of each segment; None stands for a segment to skip.

        A segment for which the staging pool has no room is a miss. Whole blocks on disk are loaded layer by layer while
        they are being read; for the tokens after them this waits up to `disk.wait_s`. After an error, only the blocks
        of transfers that already move stay in use, until these have ended.

        Args:
            caller: only segments stored for the same caller are found.
        """
        self._moves.free_late()
        hits = self._lookup.begin(segments, self.deadline_s, caller)
        return SegmentLoad(self._moves, hits, self.deadline_s)

    def load_staged(self, tokens: int) -> SegmentLoad:
        """A load of `tokens` tokens whose rows the caller itself writes to the staging pool, to the blocks of the
        load's only hit.

        Raises:
            CapacityError: the staging pool has no room.
        """
        blocks = self.staging.take(-(-tokens // self.block_tokens))
        if blocks is None:
            raise CapacityError(f"{tokens} tokens: the staging pool has {len(self.staging.free)} free blocks")
        return SegmentLoad(self._moves, [Hit(0, tokens, blocks, (), ())], self.deadline_s)

    def begin_fetch(self, segments: Sequence[Tokens], caller: str = "") -> SegmentFetch:
        """Begins to bring the cached leading part of each segment to host memory, from which it is then loaded. Never
        waits: the caller queries the result repeatedly, and calls `poll` in between.

        Precondition: `SegmentFolders.asks_again`, if there are folders.

        Args:
            caller: see `begin_load`.
        """
        self._moves.free_late()
        reads_s = self.unit.wait_s if self.unit.streams else None
        return SegmentFetch(self._lookup, self._moves, segments, self.deadline_s, caller, reads_s)

    def poll(self) -> None:
        """Continues reads and writes of the disks. Never waits."""
        if self.unit.live.has_tiers:
            self._moves.free_late()

    @property
    def busy(self) -> bool:
        """Whether `poll` has reads or writes to continue, or a `begin_forget`."""
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
        """Stores a segment, with its keys rotated to positions from 0 on. Returns how many of its tokens are cached
        now, so that lookups find them.

        Args:
            layers: gives a layer's keys and values [heads, tokens, head_dim], contiguous, of any library, in host
                memory.
            first_position: position at which the first key was computed.
            caller: loads for another caller do not find the segment.

        Raises:
            CapacityError: the segment is longer than the staging pool.
            TransferError: the pages still move at the deadline. Their staging blocks are freed once they have stopped.
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
        """Begins to store a segment, for a caller that must not wait: its rows are in the staging pool when this
        returns. The arguments are those of `store`.

        Raises:
            CapacityError: the staging pool has no room for the segment.
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
        """How many leading tokens of a segment are cached, in host memory or on disk. Reads nothing."""
        return self.cached_of(self.scheme.keys(tokens))

    def cached_of(self, keys: SegmentKeys) -> int:
        """See `cached_tokens`; `keys` are the segment's."""
        pages, whole = self._lookup.pages(keys), len(keys.whole)
        tail_tokens = int(keys.tail.tokens[0]) if keys.tail is not None and pages > whole else 0
        return min(pages, whole) * self.block_tokens + tail_tokens

    def forget(self) -> None:
        """Permanently makes everything cached a miss, because the model's weights change. Waits until no crash can
        bring it back; disks that do not confirm this in time are taken out of use.
        """
        self._moves.free_late()
        self.manager.reset()

    def begin_forget(self) -> None:
        """Does what `forget` does, for a caller that must not wait: everything cached is a miss from now on, and `poll`
        continues the work that makes this permanent.
        """
        self._moves.free_late()
        self.manager.begin_reset()

    def flush(self) -> bool:
        """Makes all cached pages durable on disk, within the deadline. Returns whether all of them would survive a
        crash.

        Also returns False if there is no disk, it is lost or full, a page could not be written, or pages still move.
        """
        if not self.unit.live.has_tiers:
            return False
        ends_s = time.monotonic() + self.deadline_s
        while self.manager.inflight_ops():  # loads lease pages, which are then not written
            self._moves.free_late()
            self._moves.take_results()
            if not self.manager.inflight_ops():
                break
            if time.monotonic() >= ends_s:
                return False
            time.sleep(FLUSH_LOOK_S)
        return self.unit.flush(max(0.0, ends_s - time.monotonic()))

    def close(self, close_s: float | None = None) -> bool:
        """Closes the cache. With a disk, writes what only host memory has and makes it durable.

        Args:
            close_s: how long all of this may take; None for the time that the folders say.

        Returns:
            The same as `flush`: whether all cached pages survive. False if there is no disk.

        Raises:
            TransferError: some bytes still move after the deadline; call again.
        """
        close_s = self.unit.close_s if close_s is None else close_s
        ends_s = time.monotonic() + close_s
        if not self.engine.close((1 - DISK_SHARE) * close_s):
            # The pool stays, because copies may still write to it; what the disks have becomes durable.
            self.unit.flush(max(0.0, ends_s - time.monotonic()))
            raise TransferError(f"pages of segments still move after {close_s:g} s")
        self._moves.take_results()
        return self.unit.close(max(0.0, ends_s - time.monotonic()))
