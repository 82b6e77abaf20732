"""One rank's part in blending: executes the scheduler's orders, and blends the model's forward passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from vllm.distributed import get_tp_group

from flexkv.adapters.vllm.blend.contract import (
    engine_refusal,
    model_refusal,
    rotation_of,
    shape_of,
)
from flexkv.adapters.vllm.blend.folders import segment_folders, segment_namespace
from flexkv.adapters.vllm.blend.forward import BlendForward
from flexkv.adapters.vllm.blend.forward_rows import ReusedRows, RowLayers, RowsLost, TakenRows
from flexkv.adapters.vllm.blend.model import model_of
from flexkv.adapters.vllm.blend.orders import Arrival, BlendOrders, ChunkOrder, NewSegment, RequestId, Reuse
from flexkv.adapters.vllm.blend.pages import BlendPages, segment_rows
from flexkv.adapters.vllm.blend.rows import BatchRows
from flexkv.adapters.vllm.blend.selftest import SelfTest
from flexkv.adapters.vllm.blend.spec import PAGE_TOKENS, most_pages
from flexkv.adapters.vllm.blend.turn_check import check_turning
from flexkv.adapters.vllm.pool_geometry import PoolGeometry
from flexkv.blend.cache import SegmentCache
from flexkv.blend.registry import NotBlendable
from flexkv.config import BlendConfig, FlexKVConfig
from flexkv.errors import FlexKVError
from flexkv.observe import BlendResult, Counters, get_logger

logger = get_logger(__name__)

ANOTHER = "another rank cannot blend: see its log"

GPU_RUN_ROWS = 16
"""Number of rows in a run on a GPU. Attention kernels read all keys once per tile of queries, and their smallest tile
has this many queries. The effect was not measured."""


def run_rows_of(blend: BlendConfig, device: Any) -> int:
    """Returns the length, in rows, of the runs in which an engine on this torch device recomputes reused rows."""
    if blend.run_tokens is not None:
        return blend.run_tokens
    return 1 if device.type == "cpu" else GPU_RUN_ROWS


class BlendWorker:
    """One rank's part in blending. If the engine cannot blend, blending is off, and `refusal` says why.

    Attributes:
        refusal: why blending is off; empty if it is on.
        may_begin_again: whether the step's forward pass may begin again after some layers have run, so that the KV that
            these layers wrote is not final.
    """

    def __init__(
        self,
        vllm_config: Any,
        settings: FlexKVConfig,
        rank: int,
        geometry: PoolGeometry,
        counters: Counters,
    ) -> None:
        self._counters = counters
        self._pages: BlendPages | None = None
        self._model: Any = None
        self._warned = False
        self.may_begin_again = False
        self.refusal = self._start(vllm_config, settings, rank, geometry)
        if self.refusal:
            self.close()
            logger.warning(
                "blending is off, and requests that ask for it are computed fully: %s", self.refusal
            )

    def _start(self, vllm_config: Any, settings: FlexKVConfig, rank: int, geometry: PoolGeometry) -> str:
        test, refusal = None, ANOTHER
        try:
            test = self._prepare(vllm_config, settings, rank, geometry)
        except FlexKVError as error:
            refusal = str(error)
        except Exception as error:  # vLLM's internal code, which is called here, may raise anything
            logger.warning("blending cannot be prepared", exc_info=True)
            refusal = f"{type(error).__name__}: {error}"
        # All ranks first agree whether they can blend, because the test computes on all ranks, and would wait for a
        # rank that does not take part.
        alone = vllm_config.parallel_config.tensor_parallel_size == 1
        all_can = [test is not None] if alone else _on_all_ranks([test is not None])
        return test.refusal() if test is not None and all(all_can) else refusal

    def _prepare(
        self, vllm_config: Any, settings: FlexKVConfig, rank: int, geometry: PoolGeometry
    ) -> SelfTest:
        """Prepares this rank for blending: the cache of segments, the rotation and the forward pass. Returns the test
        that has to run next. Does not communicate with other ranks.

        Raises:
            FlexKVError: the engine or its model cannot be blended, or there is no memory for segments; the message says
                why.
        """
        if refusal := engine_refusal(vllm_config):
            raise NotBlendable(refusal)
        self._model = model = model_of(vllm_config)
        if refusal := model_refusal(model, len(geometry.groups), settings.blend):
            raise NotBlendable(refusal)
        rotation, shape = rotation_of(model, vllm_config), shape_of(model)
        page_bytes = 2 * PAGE_TOKENS * shape.layers * shape.row_bytes
        cache = SegmentCache(
            shape,
            segment_namespace(vllm_config, geometry, settings, rank),
            slots=max(1, settings.blend.bytes // page_bytes),
            staging_tokens=most_pages(vllm_config) * PAGE_TOKENS,
            block_tokens=PAGE_TOKENS,
            deadline_s=settings.load.deadline_s,
            prefetch_layers=settings.load.prefetch_layers,
            folders=segment_folders(vllm_config, settings, rank),
        )
        pool = model.model.layers[0].self_attn.attn.kv_cache
        try:
            first_layers = settings.blend.check_layer + settings.load.prefetch_layers
            self._pages = BlendPages(cache, rotation, pool.dtype, pool.device, self._counters, first_layers)
        except BaseException:
            cache.close()
            raise
        check_turning(self._pages)
        run_rows = run_rows_of(settings.blend, pool.device)
        self.forward = BlendForward(model, vllm_config, settings.blend.check_layer, run_rows)
        return SelfTest(model, self.forward, vllm_config, geometry.num_blocks)

    def begin_step(self, orders: BlendOrders | None) -> None:
        """Executes a step's orders, and prepares the model for its forward pass. Called before each forward pass."""
        if self._pages is None:
            return
        missed, self._model.blend_step = self._model.blend_step, None
        if missed is not None:
            self._count_missed(missed)
        self.may_begin_again = False
        if orders is None:
            return
        if orders.forget:
            self._pages.forget()
        for request in orders.release:
            self._pages.release(request)
        for order in orders.load:
            self._pages.begin_load(order)
        if orders.chunks:
            self._model.blend_step = BlendStep(self.forward, self._pages, orders.chunks, self._counters)
            self.may_begin_again = self._pages.streams

    def _count_missed(self, step: BlendStep) -> None:
        """Counts the rows of a step in which vLLM did not call the model's forward pass, and warns once."""
        step.count_unplaced()
        if not self._warned:
            self._warned = True
            logger.warning(
                "vLLM computed a step without a call of the model's forward, so nothing of it was blended; "
                "flexkv_blend_rows_total counts the rows of such steps as unplaced"
            )

    def take_arrived(self) -> dict[RequestId, Arrival]:
        """Returns the loads that have ended since the last call; see `BlendPages.take_arrived`."""
        return {} if self._pages is None else self._pages.take_arrived()

    def take_stored(self) -> dict[int, BlendResult]:
        """Returns the results of store operations that have ended since the last call; see `BlendPages.take_stored`."""
        return {} if self._pages is None else self._pages.take_stored()

    @property
    def disk_busy(self) -> bool:
        """Whether segments are being stored, read from disk or written to disk, so that the engine has to run further
        steps."""
        return self._pages is not None and self._pages.busy

    def close(self) -> None:
        """Turns blending off on this rank, and closes the segments' cache. Idempotent."""
        if self._model is not None:
            self._model.blend_step = None
        if self._pages is not None:
            self._pages.close()
        self._pages = self._model = None


@dataclass(frozen=True, slots=True)
class BlendStep:
    """The blending work of one forward pass. Its chunks are equal on all ranks."""

    _forward: BlendForward
    _pages: BlendPages
    _chunks: Sequence[ChunkOrder]
    _counters: Counters

    def forward(self, input_ids: Any, positions: Any) -> Any:
        """Computes the model's hidden states. If segments are lost meanwhile, begins again without them. Returns None
        if the model's own forward pass must compute the step."""
        batch = self._batch_or_warn(positions)
        for waits in (False, True):
            try:
                return self._blend(input_ids, positions, batch, waits)
            except RowsLost as lost:
                logger.warning("a step's forward begins again without the segments that are lost: %s", lost)
        self.count_unplaced()
        return None

    def _blend(self, input_ids: Any, positions: Any, batch: BatchRows | None, waits: bool) -> Any:
        """Computes the hidden states once. Returns None if no row is reused or captured.

        Args:
            waits: whether to wait until each segment has arrived completely or is lost, and to reuse only complete
                segments.

        Raises:
            RowsLost: some rank has lost segments. All ranks raise this.
        """
        reused: list[ReusedRows] = []
        taken: list[TakenRows] = []
        captured: list[tuple[ChunkOrder, NewSegment, int]] = []
        lost: dict[RequestId, Exception] = {}
        unplaced, lost_rows = [], 0
        for chunk, place, spans in self._agree(batch, waits):
            asks, end = chunk.asks, chunk.first + len(chunk.slots)
            if place is None:
                unplaced.append(chunk)
            elif isinstance(asks, Reuse):
                lost_rows += _covered(chunk) - len(segment_rows(spans, chunk.first, end))
                if Reuse(spans, asks.ratio).covers(chunk.first, end):
                    reused.append(self._reused(chunk, spans, asks.ratio, place))
            else:
                end = min(end, len(asks.tokens))
                rows = place + np.arange(end - chunk.first, dtype=np.int64)
                lose = partial(lost.__setitem__, chunk.request)
                taken.append(TakenRows(rows, self._taker(chunk), lose))
                captured.append((chunk, asks, end))
        hidden = None
        if reused or taken:
            assert batch is not None
            hidden, keep = self._forward.run(input_ids, positions, batch, reused, taken)
        for chunk in unplaced:
            self._count_unplaced(chunk)
        self._count_rows(lost_rows, "lost")
        for each in reused:
            computed = int(np.count_nonzero(keep[each.rows]))
            self._count_rows(computed, "computed")
            self._count_rows(len(each.rows) - computed, "reused")
        for chunk, asks, end in captured:
            if (error := lost.get(chunk.request)) is None:
                self._pages.end_capture(chunk.request, asks, end)
            else:
                self._pages.break_capture(chunk.request, asks, end, error)
        return hidden

    def _agree(
        self, batch: BatchRows | None, waits: bool
    ) -> list[tuple[ChunkOrder, int | None, tuple[tuple[int, int], ...]]]:
        """Returns for each chunk its first row in the batch and the spans that it reuses. The row is None if some rank
        does not find the chunk in the batch or lacks its rows. A span that some rank has lost has 0 tokens. Waits for
        all ranks."""
        found = [self._find_or_warn(batch, chunk, waits) for chunk in self._chunks]
        flags = [place is not None for place, _ in found]
        flags += [
            span in left
            for chunk, (_, left) in zip(self._chunks, found, strict=True)
            for span in _spans(chunk)
        ]
        there = iter(_on_all_ranks(flags))
        places = [place if next(there) else None for place, _ in found]
        return [
            (
                chunk,
                place,
                tuple((first, tokens if next(there) else 0) for first, tokens in _spans(chunk).values()),
            )
            for chunk, place in zip(self._chunks, places, strict=True)
        ]

    def _count_rows(self, rows: int, kind: str) -> None:
        self._counters.add("flexkv_blend_rows_total", rows, kind=kind)

    def count_unplaced(self) -> None:
        """Counts all rows of the step as `unplaced`, because they were not found in the batch."""
        for chunk in self._chunks:
            self._count_unplaced(chunk)

    def _count_unplaced(self, chunk: ChunkOrder) -> None:
        self._counters.add("flexkv_blend_rows_total", _covered(chunk), kind="unplaced")
        asks = chunk.asks
        if isinstance(asks, NewSegment) and chunk.first + len(chunk.slots) >= len(asks.tokens):
            self._pages.lose_capture(chunk.request, asks)

    def _batch_or_warn(self, positions: Any) -> BatchRows | None:
        """Returns the rows of the forward pass; None if the engine does not describe them as one batch. Also returns
        None if an error occurs, instead of raising it, because the other ranks wait for this one.
        """
        try:
            return self._forward.batch(positions)
        except Exception:  # catches errors of torch and vLLM, too
            logger.warning("the rows of a step cannot be read", exc_info=True)
            return None

    def _find_or_warn(
        self, batch: BatchRows | None, chunk: ChunkOrder, waits: bool
    ) -> tuple[int | None, set[int]]:
        """Returns the result of `_find`. If `_find` raises, returns no row instead of raising, because the other ranks
        wait for this one.
        """
        try:
            return (None, set()) if batch is None else self._find(batch, chunk, waits)
        except Exception:  # catches torch's errors, too
            logger.warning("rows of a step cannot be blended", exc_info=True)
            return None, set()

    def _find(self, batch: BatchRows, chunk: ChunkOrder, waits: bool) -> tuple[int | None, set[int]]:
        """Returns the chunk's first row in the batch, and the numbers of the request's segments that this rank has. The
        row is None if the chunk is not in the batch or this rank lacks its rows."""
        asks, left = chunk.asks, set[int]()
        if isinstance(asks, Reuse):
            left = self._pages.drop_lost(chunk.request, waits)
            ready = self._pages.holds(chunk.request) and asks.covers(
                chunk.first, chunk.first + len(chunk.slots)
            )
        else:
            ready = self._pages.begin_capture(chunk.request, asks, chunk.first)
        return batch.place(chunk.first, chunk.slots) if ready else None, left

    def _reused(
        self, chunk: ChunkOrder, spans: Sequence[tuple[int, int]], ratio: float, row: int
    ) -> ReusedRows:
        end = chunk.first + len(chunk.slots)
        rows = row + segment_rows(spans, chunk.first, end)
        return ReusedRows(rows, RowsWhenOpened(self._pages, chunk, spans), ratio)

    def _taker(self, chunk: ChunkOrder) -> Any:
        return lambda layer, planes: self._pages.capture(chunk.request, layer, chunk.first, planes)


@dataclass(frozen=True, slots=True)
class RowsWhenOpened:
    """A `RowSource` for a chunk's spans. The rows are looked up only when it is opened, so that a failure of the lookup
    is handled like a failure of a load, in the same way on all ranks."""

    pages: BlendPages
    chunk: ChunkOrder
    spans: Sequence[tuple[int, int]]

    def open(self, first: int) -> RowLayers:
        chunk = self.chunk
        end = chunk.first + len(chunk.slots)
        return self.pages.rows(chunk.request, self.spans, chunk.first, end).open(first)


def _spans(chunk: ChunkOrder) -> dict[int, tuple[int, int]]:
    """Returns the spans that a chunk's request reuses, by the numbers of their segments; none if it reuses nothing."""
    return dict(enumerate(chunk.asks.spans)) if isinstance(chunk.asks, Reuse) else {}


def _on_all_ranks(here: list[bool]) -> list[bool]:
    """Returns for each value whether it is true on every rank. Waits for all ranks, which must pass equally many
    values."""
    group = get_tp_group()
    if group.world_size == 1:
        return here
    # The flags are summed as float32, because some backends cannot sum other types.
    flags = torch.tensor(here, dtype=torch.float32, device=group.device)
    return [count == group.world_size for count in group.all_reduce(flags).cpu().tolist()]


def _covered(chunk: ChunkOrder) -> int:
    """Returns how many rows of a chunk are covered by cached segments; often 0 for the last chunk of a prompt."""
    asks = chunk.asks
    return (
        len(segment_rows(asks.spans, chunk.first, chunk.first + len(chunk.slots)))
        if isinstance(asks, Reuse)
        else 0
    )
