"""One rank's part in blending: carries out the scheduler's orders, and gives each forward its rows."""

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
from flexkv.adapters.vllm.blend.forward_rows import ReusedRows, TakenRows
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
from flexkv.config import FlexKVConfig
from flexkv.errors import FlexKVError
from flexkv.observe import BlendResult, Counters, get_logger

logger = get_logger(__name__)

ANOTHER = "another rank cannot blend: see its log"


class BlendWorker:
    """
    Attributes:
        refusal: why blending is off; empty if it is on.
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
        except Exception as error:  # what is called here is vLLM's, and promised by nobody
            logger.warning("blending cannot be prepared", exc_info=True)
            refusal = f"{type(error).__name__}: {error}"
        # Here, because the test computes with all ranks, and waits for one that does not take part.
        alone = vllm_config.parallel_config.tensor_parallel_size == 1
        all_can = [test is not None] if alone else _on_all_ranks([test is not None])
        return test.refusal() if test is not None and all(all_can) else refusal

    def _prepare(
        self, vllm_config: Any, settings: FlexKVConfig, rank: int, geometry: PoolGeometry
    ) -> SelfTest:
        """Takes what this rank needs to blend. Calls no other rank.

        Raises:
            FlexKVError: the engine or its model cannot be blended, or there is no room for segments; says why.
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
            self._pages = BlendPages(cache, rotation, pool.dtype, pool.device, self._counters)
        except BaseException:
            cache.close()
            raise
        check_turning(self._pages)
        self.forward = BlendForward(model, vllm_config, settings.blend.check_layer)
        return SelfTest(model, self.forward, vllm_config, geometry.num_blocks)

    def begin_step(self, orders: BlendOrders | None) -> None:
        """Called before a step's forward."""
        if self._pages is None:
            return
        missed, self._model.blend_step = self._model.blend_step, None
        if missed is not None:
            self._count_missed(missed)
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

    def _count_missed(self, step: BlendStep) -> None:
        """Counts the rows of a step that the model's forward was not called for, and warns once."""
        step.count_unplaced()
        if not self._warned:
            self._warned = True
            logger.warning(
                "vLLM computed a step without a call of the model's forward, so nothing of it was blended; "
                "flexkv_blend_rows_total counts the rows of such steps as unplaced"
            )

    def take_arrived(self) -> dict[RequestId, Arrival]:
        """See `BlendPages.take_arrived`."""
        return {} if self._pages is None else self._pages.take_arrived()

    def take_stored(self) -> dict[int, BlendResult]:
        """See `BlendPages.take_stored`."""
        return {} if self._pages is None else self._pages.take_stored()

    @property
    def disk_busy(self) -> bool:
        """Whether segments are being stored, read from disk or written to it, which needs further steps."""
        return self._pages is not None and self._pages.busy

    def close(self) -> None:
        """Idempotent."""
        if self._model is not None:
            self._model.blend_step = None
        if self._pages is not None:
            self._pages.close()
        self._pages = self._model = None


@dataclass(frozen=True, slots=True)
class BlendStep:
    """What one forward blends.

    Args:
        chunks: the same on every rank.
    """

    _forward: BlendForward
    _pages: BlendPages
    _chunks: Sequence[ChunkOrder]
    _counters: Counters

    def forward(self, input_ids: Any, positions: Any) -> Any:
        """The model's hidden states; None if the model itself must compute the step."""
        batch = self._forward.batch(positions)
        if batch is None:
            self.count_unplaced()
            return None
        reused: list[ReusedRows] = []
        taken: list[TakenRows] = []
        captured: list[tuple[ChunkOrder, NewSegment, int]] = []
        lost: dict[RequestId, Exception] = {}
        found = [self._find_or_warn(batch, chunk) for chunk in self._chunks]
        there = _on_all_ranks([place is not None for place in found])
        for chunk, place, everywhere in zip(self._chunks, found, there, strict=True):
            if place is None or not everywhere:
                self._count_unplaced(chunk)
            elif isinstance(place, ReusedRows):
                reused.append(place)
            elif isinstance(chunk.asks, NewSegment):
                row = place
                end = min(chunk.first + len(chunk.slots), len(chunk.asks.tokens))
                rows = row + np.arange(end - chunk.first, dtype=np.int64)
                lose = partial(lost.__setitem__, chunk.request)
                taken.append(TakenRows(rows, self._taker(chunk), lose))
                captured.append((chunk, chunk.asks, end))
        if not reused and not taken:
            return None
        hidden, keep = self._forward.run(input_ids, positions, batch, reused, taken)
        for each in reused:
            computed = int(np.count_nonzero(keep[each.rows]))
            self._counters.add("flexkv_blend_rows_total", computed, kind="computed")
            self._counters.add("flexkv_blend_rows_total", len(each.rows) - computed, kind="reused")
        for chunk, asks, end in captured:
            if (error := lost.get(chunk.request)) is None:
                self._pages.end_capture(chunk.request, asks, end)
            else:
                self._pages.break_capture(chunk.request, asks, end, error)
        return hidden

    def count_unplaced(self) -> None:
        """Counts all its rows as not found."""
        for chunk in self._chunks:
            self._count_unplaced(chunk)

    def _count_unplaced(self, chunk: ChunkOrder) -> None:
        self._counters.add("flexkv_blend_rows_total", _covered(chunk), kind="unplaced")
        asks = chunk.asks
        if isinstance(asks, NewSegment) and chunk.first + len(chunk.slots) >= len(asks.tokens):
            self._pages.lose_capture(asks)

    def _find_or_warn(self, batch: BatchRows, chunk: ChunkOrder) -> int | ReusedRows | None:
        """See `_find`; also None if that fails, because the other ranks wait for this one."""
        try:
            return self._find(batch, chunk)
        except Exception:  # torch's own, too
            logger.warning("rows of a step cannot be blended", exc_info=True)
            return None

    def _find(self, batch: BatchRows, chunk: ChunkOrder) -> int | ReusedRows | None:
        """The rows that the chunk reuses, or the first row in the batch of one to be captured; None if it is not there,
        or this rank lacks what it is for."""
        asks, end = chunk.asks, chunk.first + len(chunk.slots)
        if isinstance(asks, Reuse):
            ready = self._pages.holds(chunk.request) and asks.covers(chunk.first, end)
        else:
            ready = self._pages.begin_capture(chunk.request, asks, chunk.first)
        row = batch.place(chunk.first, chunk.slots) if ready else None
        return self._reused(chunk, asks, row) if row is not None and isinstance(asks, Reuse) else row

    def _reused(self, chunk: ChunkOrder, asks: Reuse, row: int) -> ReusedRows:
        end = chunk.first + len(chunk.slots)
        rows = row + segment_rows(asks.spans, chunk.first, end)
        source = self._pages.rows(chunk.request, asks.spans, chunk.first, end)
        return ReusedRows(rows, source, asks.ratio)

    def _taker(self, chunk: ChunkOrder) -> Any:
        return lambda layer, planes: self._pages.capture(chunk.request, layer, chunk.first, planes)


def _on_all_ranks(here: list[bool]) -> list[bool]:
    """What is true on every rank. Waits for all ranks: each must call this with as many."""
    group = get_tp_group()
    if group.world_size == 1:
        return here
    # Numbers of another kind are not summed by every backend.
    flags = torch.tensor(here, dtype=torch.float32, device=group.device)
    return [count == group.world_size for count in group.all_reduce(flags).cpu().tolist()]


def _covered(chunk: ChunkOrder) -> int:
    """How many of a chunk's rows cached segments cover: often none of the last chunk of a prompt."""
    asks = chunk.asks
    return (
        len(segment_rows(asks.spans, chunk.first, chunk.first + len(chunk.slots)))
        if isinstance(asks, Reuse)
        else 0
    )
