"""One rank's part in blending: carries out the scheduler's orders, and gives each forward its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
from flexkv.adapters.vllm.blend.forward import BlendForward, ReusedRows, TakenRows
from flexkv.adapters.vllm.blend.model import model_of
from flexkv.adapters.vllm.blend.orders import BlendOrders, ChunkOrder, NewSegment, RequestId, Reuse
from flexkv.adapters.vllm.blend.pages import BlendPages, has_rows, segment_rows
from flexkv.adapters.vllm.blend.rows import BatchRows
from flexkv.adapters.vllm.blend.selftest import SelfTest
from flexkv.adapters.vllm.blend.spec import PAGE_TOKENS, most_pages
from flexkv.blend.cache import SegmentCache
from flexkv.config import FlexKVConfig
from flexkv.errors import FlexKVError
from flexkv.observe import Counters, get_logger

logger = get_logger(__name__)


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
        groups: int,
        num_blocks: int,
        counters: Counters,
    ) -> None:
        self._counters = counters
        self._pages: BlendPages | None = None
        self._model: Any = None
        self.refusal = self._start(vllm_config, settings, rank, groups, num_blocks)
        if self.refusal:
            self.close()
            logger.warning(
                "blending is off, and requests that ask for it are computed fully: %s", self.refusal
            )

    def _start(
        self, vllm_config: Any, settings: FlexKVConfig, rank: int, groups: int, num_blocks: int
    ) -> str:
        if refusal := engine_refusal(vllm_config):
            return refusal
        self._model = model = model_of(vllm_config)
        if refusal := model_refusal(model, groups, settings.blend):
            return refusal
        try:
            rotation, shape = rotation_of(model, vllm_config), shape_of(model)
            page_bytes = 2 * PAGE_TOKENS * shape.layers * shape.row_bytes
            cache = SegmentCache(
                shape,
                {"rank": rank},  # in this process's memory alone, so nothing else needs to be told apart
                slots=max(1, settings.blend.bytes // page_bytes),
                staging_tokens=most_pages(vllm_config) * PAGE_TOKENS,
                block_tokens=PAGE_TOKENS,
                deadline_s=settings.load.deadline_s,
            )
        except FlexKVError as error:
            return str(error)
        pool = model.model.layers[0].self_attn.attn.kv_cache
        self._pages = BlendPages(cache, rotation, pool.dtype, pool.device, self._counters)
        self.forward = BlendForward(model, vllm_config, settings.blend.check_layer)
        return SelfTest(model, self.forward, vllm_config, num_blocks).refusal()

    def begin_step(self, orders: BlendOrders | None) -> None:
        """Called before a step's forward."""
        if self._pages is None:
            return
        self._model.blend_step = None
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

    def take_arrived(self) -> dict[RequestId, tuple[int, ...]]:
        """See `BlendPages.take_arrived`."""
        return {} if self._pages is None else self._pages.take_arrived()

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
            return None
        reused: list[ReusedRows] = []
        taken: list[TakenRows] = []
        captured: list[tuple[ChunkOrder, NewSegment, int]] = []
        found = [self._find(batch, chunk) for chunk in self._chunks]
        for chunk, row in zip(self._chunks, self._agreed(found), strict=True):
            if row is None:
                self._counters.add("flexkv_blend_rows_total", len(chunk.slots), kind="unplaced")
            elif isinstance(chunk.asks, Reuse):
                reused.append(self._reused(chunk, chunk.asks, row))
            else:
                end = min(chunk.first + len(chunk.slots), len(chunk.asks.tokens))
                rows = row + np.arange(end - chunk.first, dtype=np.int64)
                taken.append(TakenRows(rows, self._taker(chunk)))
                captured.append((chunk, chunk.asks, end))
        if not reused and not taken:
            return None
        hidden, keep = self._forward.run(input_ids, positions, batch, reused, taken)
        for each in reused:
            computed = int(np.count_nonzero(keep[each.rows]))
            self._counters.add("flexkv_blend_rows_total", computed, kind="computed")
            self._counters.add("flexkv_blend_rows_total", len(each.rows) - computed, kind="reused")
        for chunk, asks, end in captured:
            self._pages.end_capture(chunk.request, asks, end)
        return hidden

    def _find(self, batch: BatchRows, chunk: ChunkOrder) -> int | None:
        """The chunk's first row in the batch; None if it is not there, or this rank lacks what it is for."""
        asks, end = chunk.asks, chunk.first + len(chunk.slots)
        if isinstance(asks, Reuse):
            ready = self._pages.holds(chunk.request) and has_rows(asks, chunk.first, end)
        else:
            ready = self._pages.begin_capture(chunk.request, asks, chunk.first)
        return batch.place(chunk.first, chunk.slots) if ready else None

    def _agreed(self, found: list[int | None]) -> list[int | None]:
        """The rows, without those that some rank did not find: all ranks must compute the same rows."""
        group = get_tp_group()
        if group.world_size == 1:
            return found
        # Numbers of another kind are not summed by every backend.
        here = torch.tensor([row is not None for row in found], dtype=torch.float32, device=group.device)
        there = group.all_reduce(here).cpu().tolist()
        return [row if count == group.world_size else None for row, count in zip(found, there, strict=True)]

    def _reused(self, chunk: ChunkOrder, asks: Reuse, row: int) -> ReusedRows:
        end = chunk.first + len(chunk.slots)
        rows = row + segment_rows(asks.spans, chunk.first, end)
        source = self._pages.rows(chunk.request, asks.spans, chunk.first, end)
        return ReusedRows(rows, source, asks.ratio)

    def _taker(self, chunk: ChunkOrder) -> Any:
        return lambda layer, planes: self._pages.capture(chunk.request, layer, chunk.first, planes)
