"""Loads one rank's cached segments for requests, and captures new segments from forward passes."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from flexkv.adapters.vllm.blend.loaded_rows import LoadedRows, Planes, device_of
from flexkv.adapters.vllm.blend.orders import Arrival, NewSegment, RequestId, SegmentOrder
from flexkv.adapters.vllm.blend.rows import Numbers
from flexkv.blend.cache import DISK_SHARE, SegmentCache
from flexkv.blend.rotation import KeyRotation
from flexkv.blend.segment_fetch import SegmentFetch
from flexkv.blend.segment_load import LATE, SegmentLoad
from flexkv.blend.segment_store import SegmentStore
from flexkv.blend.turned_rows import Stretch, TurnedRows
from flexkv.errors import CapacityError, FlexKVError
from flexkv.observe import BlendResult, Counters, PageLoss, get_logger
from flexkv.transfer.layerwise.host_device import HostDevice

logger = get_logger(__name__)

RESULTS_OF = {
    PageLoss.SEGMENT_LATE: BlendResult.LATE,
    PageLoss.SEGMENT_NO_ROOM: BlendResult.LATE,
    PageLoss.SEGMENT_UNREADABLE: BlendResult.LOST,
}
"""Reason why pages are missing -> the result that is counted for a request if none of its segments arrived."""


@dataclass(slots=True)
class Capture:
    """A segment whose rows are being captured from forward passes.

    Attributes:
        planes: the keys and values of the segment's tokens, [layers, 2, heads, tokens, head_dim] in host memory; None
            if the capture is broken.
        done: how many leading tokens are captured in every layer.
        is_broken: whether some rows could not be captured; if so, this was logged.
    """

    planes: Any
    done: int = 0
    is_broken: bool = False


class BlendPages:
    """One rank's segments: those in the cache, those being loaded, and those being captured.

    Args:
        cache: the rank's cache of segments.
        rotation: rotates keys to other positions.
        dtype: torch's dtype of the engine's KV cache.
        device: the device of the engine's pool.
        first_layers: if layers are streamed from disk, a segment counts as arrived when this many of its layers have
            arrived; None if all layers must arrive.

    Attributes:
        cache, rotation, dtype, device: as in the arguments.

    Raises:
        NotBlendable: torch has no streams on the device.
    """

    def __init__(
        self,
        cache: SegmentCache,
        rotation: KeyRotation,
        dtype: Any,
        device: Any,
        counters: Counters,
        first_layers: int | None = None,
    ) -> None:
        self.cache, self.rotation = cache, rotation
        self.dtype, self.device = dtype, device
        self._rows_on = device_of(torch.device(device), dtype)
        self._counters = counters
        self._first_layers = None
        if first_layers is not None and cache.unit.streams and first_layers < cache.shape.layers:
            self._first_layers = first_layers
        self._fetches: dict[RequestId, SegmentFetch] = {}
        """The fetch of each request's segments to host memory. When it has ended, the request's load begins."""
        self._loads: dict[RequestId, SegmentLoad] = {}
        self._coming: dict[RequestId, SegmentOrder] = {}
        """The load orders, by request, whose outcome has not been reported yet."""
        self._captures: dict[RequestId, Capture] = {}
        self._stores: dict[SegmentStore, NewSegment] = {}
        """The captured segments that are being stored in host memory, in the order in which the store operations
        began."""
        self._stored: dict[int, BlendResult] = {}
        """The results of the store operations that have ended since the last `take_stored`, by the segment's number."""
        self._after: dict[RequestId, list[SegmentStore]] = {}
        """By request, the store operations of its segments that were in flight when its load was ordered. The request's
        fetch begins after these operations have ended."""
        self._room_after: dict[RequestId, list[SegmentStore]] = {}
        """By request, the store operations that were in flight when the request first lacked free staging blocks. The
        request's load begins after these operations have ended, even if blocks are still missing."""

    # --- loads ---

    def begin_load(self, order: SegmentOrder) -> None:
        """Starts loading the cached pages of a request's segments. Never raises, because the other ranks would wait for
        this one in the step's next collective. If an error occurs, the segments are lost instead.
        """
        self._coming[order.request] = order
        self._advance_stores()
        try:
            behind = self._stores_of(order)
        except Exception as error:  # catches NumPy's errors, too
            _warn_of("segments of a request cannot be loaded: %s", error)
            return
        if behind:
            self._after[order.request] = behind
        else:
            self._begin_fetch(order)

    def _stores_of(self, order: SegmentOrder) -> list[SegmentStore]:
        """Returns the store operations in flight whose segment begins with the same block as one of the request's
        segments."""
        if not self._stores:
            return []
        wanted = {self.cache.scheme.keys(tokens, order.caller).first for tokens in order.segments}
        return [store for store in self._stores if store.keys.first in wanted]

    def _begin_fetch(self, order: SegmentOrder) -> None:
        try:
            self._fetches[order.request] = self.cache.begin_fetch(order.segments, order.caller)
        except Exception as error:  # catches NumPy's errors, too
            _warn_of("segments of a request cannot be loaded: %s", error)

    def take_arrived(self) -> dict[RequestId, Arrival]:
        """Advances the store operations, the loads, and the disks' reads and writes. Returns, by request, the loads
        that have ended since the last call, or that now have enough layers for a forward pass to begin."""
        self.cache.poll()
        self._advance_stores()
        arrived = {}
        for request, order in list(self._coming.items()):
            if request in self._after:
                if any(store in self._stores for store in self._after[request]):
                    continue
                del self._after[request]
                self._begin_fetch(order)
            if request in self._fetches and not self._has_arrived(order):
                continue
            arrived[request] = self._arrival(order)
            del self._coming[request]
            self._room_after.pop(request, None)
        self._count_disk()
        return arrived

    def _has_arrived(self, order: SegmentOrder) -> bool:
        """Begins a request's load if its segments are in host memory or being streamed there. Returns whether enough
        layers have arrived for a forward pass to begin.
        """
        request = order.request
        if request not in self._loads:
            fetch = self._fetches[request]
            try:
                # `advance` comes first and is called every time, because each call keeps the request's place in the
                # queue for free host slots.
                load = fetch.begin_load() if fetch.advance() and not self._wait_for_room(order) else None
            except Exception as error:  # catches NumPy's errors, too
                fetch.give_up()
                _warn_of("segments of a request cannot be loaded: %s", error)
                return True
            if load is None:
                return False
            self._loads[request] = load
        load = self._loads[request]
        if self._first_layers is None:
            return not load.moves
        has_come = load.has_layers(self._first_layers)
        # `_drop_lost` comes after `has_layers`, because `has_layers` counts a failed read as arrived.
        self._drop_lost(load)
        return has_come

    def _wait_for_room(self, order: SegmentOrder) -> bool:
        """Returns whether a request has to wait until store operations free staging blocks. There may be too few free
        blocks: the scheduler stops counting the blocks of a new segment when the segment's prompt has been computed,
        but the store operation may still use them. The request waits only for operations that were in flight when it
        first lacked blocks, because later ones may follow without end.
        """
        if self._has_room(order):
            return False
        ahead = self._room_after.setdefault(order.request, list(self._stores))
        return any(store in self._stores for store in ahead)

    def _has_room(self, order: SegmentOrder) -> bool:
        """Whether the staging pool has enough free blocks for all segments of a request."""
        staging = self.cache.staging
        pages = sum(-(-len(tokens) // staging.block_tokens) for tokens in order.segments)
        return pages <= len(staging.free)

    def _arrival(self, order: SegmentOrder) -> Arrival:
        fetch, load = self._fetches.pop(order.request, None), self._loads.get(order.request)
        # `load` is None if the load could not begin.
        tokens, missing = [0] * len(order.segments), BlendResult.LOST if load is None else BlendResult.MISS
        for why, pages in fetch.missed.items() if fetch is not None else ():
            why.count(self._counters, pages)
            if why is not PageLoss.SEGMENT_ABSENT and missing is not BlendResult.LATE:
                missing = RESULTS_OF[why]
        if load is not None:
            self._drop_lost(load)
            if load.lost:
                missing = BlendResult.LATE if LATE in load.lost.values() else BlendResult.LOST
            for hit in load.hits:
                tokens[hit.segment] = hit.tokens
        return Arrival(order.load, tuple(tokens), missing)

    def _drop_lost(self, load: SegmentLoad, wait: bool = False) -> None:
        """Drops the segments of a load that are lost, and counts them.

        Args:
            wait: whether to wait until each segment has arrived or is lost.
        """
        dropped = load.drop_lost(wait)
        self._counters.add("flexkv_blend_lost_segments_total", len(dropped))
        for lost in dropped:
            if lost.why is not None:
                lost.why.count(self._counters, len(lost.hit.blocks))

    def _count_disk(self) -> None:
        for direction, pages in self.cache.unit.take_moved().items():
            self._counters.add("flexkv_blend_disk_pages_total", pages, direction=direction)

    def rows(self, request: RequestId, spans: Sequence[tuple[int, int]], first: int, end: int) -> LoadedRows:
        """Returns the loaded rows of a request at positions [first, end), in the order of `spans`.

        Raises:
            KeyError: no segments are loaded for the request.
        """
        load = self._loads[request]
        hits = {hit.segment: hit for hit in load.hits}
        stretches = []
        for segment, (start, tokens) in enumerate(spans):
            low, high = max(start, first), min(start + tokens, end)
            if low < high:
                stretches.append(Stretch(hits[segment], low - start, high - low, low))
        return self.loaded_rows(load, stretches)

    def loaded_rows(self, load: SegmentLoad, stretches: Sequence[Stretch]) -> LoadedRows:
        """Returns rows of a load, which are rotated to the positions of the stretches when they are read."""
        rows = TurnedRows(self.cache, self.rotation, load, stretches)
        return LoadedRows(rows, self._rows_on, self.dtype, self.device)

    def holds(self, request: RequestId) -> bool:
        """Whether the request's segments have been loaded and reported, and have not been released since."""
        return request in self._loads and request not in self._coming

    def drop_lost(self, request: RequestId, wait: bool = False) -> set[int]:
        """Drops those of the request's segments that were lost after their arrival was reported. Returns the numbers of
        the segments that are left.

        Args:
            wait: whether to wait until each segment has arrived completely or is lost.
        """
        if not self.holds(request):
            return set()
        load = self._loads[request]
        self._drop_lost(load, wait)
        return {hit.segment for hit in load.hits}

    @property
    def streams(self) -> bool:
        """Whether a forward pass may begin while later layers of its segments are still being read from disk."""
        return self._first_layers is not None

    # --- captures ---

    def begin_capture(self, request: RequestId, asks: NewSegment, first: int) -> bool:
        """Prepares to capture rows of a segment from position `first` on. Returns False if earlier rows are missing."""
        if first == 0:
            shape = self.cache.shape
            room = (shape.layers, 2, shape.heads, len(asks.tokens), shape.head_dim)
            self._captures[request] = Capture(torch.empty(room, dtype=self.dtype))
        capture = self._captures.get(request)
        return capture is not None and capture.done == first and not capture.is_broken

    def capture(self, request: RequestId, layer: int, first: int, planes: Planes) -> None:
        """Copies a layer's fresh keys and values of consecutive rows, from position `first` on, to host memory."""
        room = self._captures[request].planes
        end = min(first + len(planes[0]), room.shape[3])
        for plane, rows in enumerate(planes):
            room[layer, plane, :, first:end] = rows[: end - first].transpose(0, 1)

    def end_capture(self, request: RequestId, asks: NewSegment, end: int) -> None:
        """Records that all rows before position `end` are captured in all layers. If the segment is complete, starts
        storing it. Never raises, because the other ranks would wait for this one in the next step's collectives. If an
        error occurs, the segment is lost instead.
        """
        capture = self._captures[request]
        capture.done = end
        if end < len(asks.tokens):
            return
        del self._captures[request]
        try:
            self._stores[self._begin_store(asks, capture.planes)] = asks
        except CapacityError as error:
            self._not_kept(asks, BlendResult.NO_ROOM, error)
        except Exception as error:  # catches errors of NumPy and torch, too
            self._not_kept(asks, BlendResult.LOST, error)
        self._advance_stores()

    def break_capture(self, request: RequestId, asks: NewSegment, end: int, error: Exception) -> None:
        """Gives a segment up, because `capture` failed. Called in place of `end_capture`. Later rows of the segment are
        not captured."""
        if end < len(asks.tokens):
            _warn_of(f"a segment of {len(asks.tokens)} tokens is not kept: %s", error)
            self._captures[request] = Capture(None, is_broken=True)
            return
        self._captures.pop(request, None)
        self._not_kept(asks, BlendResult.LOST, error)

    def lose_capture(self, request: RequestId, asks: NewSegment) -> None:
        """Reports a segment as lost, because its last rows were not found in the batch or earlier rows were not
        captured. Called in place of the segment's last `end_capture`."""
        capture = self._captures.pop(request, None)
        if capture is not None and capture.is_broken:
            self._stored[asks.number] = BlendResult.LOST
        else:
            self._not_kept(asks, BlendResult.LOST, "its rows were not found in a step")

    def _not_kept(self, asks: NewSegment, result: BlendResult, reason: str | Exception) -> None:
        self._stored[asks.number] = result
        _warn_of(f"a segment of {len(asks.tokens)} tokens is not kept: %s", reason)

    def take_stored(self) -> dict[int, BlendResult]:
        """Returns the results of the segments whose store operations have ended since the last call, by the segments'
        numbers: STORED if all tokens of the segment are cached, otherwise the reason why not."""
        stored, self._stored = self._stored, {}
        return stored

    def _begin_store(self, asks: NewSegment, planes: Any) -> SegmentStore:
        """Starts storing a segment. If there are too few free staging blocks, first waits for earlier store operations.

        Raises:
            CapacityError: there are too few staging blocks even if no other segment is being stored.
        """

        def begin() -> SegmentStore:
            return self.cache.begin_store(
                asks.tokens,
                lambda layer: (planes[layer, 0], planes[layer, 1]),
                self.rotation,
                caller=asks.caller,
            )

        self._advance_stores()  # frees the blocks of store operations that have ended
        try:
            return begin()
        except CapacityError:
            if not self._stores:
                raise
            self._advance_stores(wait=True)
            return begin()

    def _advance_stores(self, wait: bool = False, until_s: float = math.inf) -> None:
        """Advances all store operations, and records the results of those that have ended.

        Args:
            wait: whether to wait for each operation until its deadline.
            until_s: when to stop waiting, on the monotonic clock.
        """
        for store, asks in list(self._stores.items()):
            try:
                if store.advance(wait, until_s):
                    self._end_store(store, asks)
                elif store.is_late:
                    store.leave()
                    reason = f"it still moves after {self.cache.deadline_s:g} s"
                    self._not_kept(asks, BlendResult.LATE, reason)
                else:
                    continue
            except Exception as error:  # catches NumPy's errors, too
                self._not_kept(asks, BlendResult.LOST, error)
            del self._stores[store]

    def _end_store(self, store: SegmentStore, asks: NewSegment) -> None:
        cached = self.cache.cached_of(store.keys)
        if cached == len(asks.tokens):
            self._stored[asks.number] = BlendResult.STORED
        elif store.failure:
            self._not_kept(asks, BlendResult.LOST, f"{cached} tokens of it are: {store.failure}")
        else:
            self._not_kept(asks, BlendResult.NO_ROOM, f"blend.bytes has room for {cached} tokens of it")

    @property
    def busy(self) -> bool:
        """Whether store operations or the disks' reads and writes are unfinished, so that `take_arrived` must be called
        again."""
        return bool(self._stores) or self.cache.busy

    # --- ends ---

    def release(self, request: RequestId) -> None:
        """Drops a request's loaded segments and captured rows. Does not wait for pages in flight."""
        self._coming.pop(request, None)
        self._after.pop(request, None)
        self._room_after.pop(request, None)
        self._captures.pop(request, None)
        if (fetch := self._fetches.pop(request, None)) is not None:
            fetch.give_up()
        if (load := self._loads.pop(request, None)) is not None:
            load.abandon()

    def forget(self) -> None:
        """Drops all segments, because the weights change. Does not wait for disks; see `SegmentCache.begin_forget`."""
        for request in [*self._coming, *self._loads, *self._captures]:
            self.release(request)
        for store, asks in self._stores.items():
            store.leave()
            self._stored[asks.number] = BlendResult.RESET
        self._stores.clear()
        self.cache.begin_forget()

    def close(self) -> None:
        """Ends all work within `transfer.close_s`, and closes the cache.

        Raises:
            TransferError: see `SegmentCache.close`.
        """
        begun_s, close_s = time.monotonic(), self.cache.unit.close_s
        ends_s = begun_s + (1 - DISK_SHARE) * close_s
        for fetch in self._fetches.values():
            fetch.give_up()
        self._fetches.clear()
        for load in self._loads.values():
            load.abandon()
        self._loads.clear()
        device = self._rows_on.device
        if isinstance(device, HostDevice) and not device.close(max(0.0, ends_s - time.monotonic())):
            logger.warning("a thread that turns cached rows has not ended")
        self._advance_stores(wait=True, until_s=ends_s)
        for store in self._stores:
            store.leave()
        self.cache.close(max(0.0, begun_s + close_s - time.monotonic()))


def _warn_of(message: str, reason: str | Exception) -> None:
    """Logs a failure. Adds the traceback if `reason` is an exception that flexkv does not raise itself."""
    if isinstance(reason, FlexKVError | str):
        logger.warning(message, reason)
    else:
        logger.warning(message, f"{type(reason).__name__}: {reason}", exc_info=reason)


def segment_rows(spans: Sequence[tuple[int, int]], first: int, end: int) -> Numbers:
    """Returns the positions in [first, end) that the spans cover, relative to `first`, in the order of
    `BlendPages.rows`."""
    parts = [np.arange(max(start, first), min(start + tokens, end)) for start, tokens in spans]
    return np.concatenate([np.empty(0, np.int64), *parts]).astype(np.int64) - first
