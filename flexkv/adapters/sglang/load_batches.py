"""Layerwise loads of a forward batch. SGLang's KV pools wait for each layer before they read it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import count

from flexkv.adapters.common.load_job import LoadJob
from flexkv.adapters.common.submitted_op import PAST_DEADLINE
from flexkv.adapters.sglang.rank_cache import RankCache
from flexkv.cache.base import Completion
from flexkv.facts.keys import Keys
from flexkv.facts.request_settings import NO_SETTINGS, RequestSettings
from flexkv.observe import FailedOps, get_logger
from flexkv.transfer.graph import BlockIds

logger = get_logger(__name__)

NO_BATCH = -1
"""The batch number that stands for "no batch": SGLang's forward pass then waits for no load."""


@dataclass(frozen=True, slots=True)
class QueuedLoad:
    """A load that the engine has requested and that has not started yet. The page of `keys[i]` goes to `blocks[i]`."""

    keys: Keys
    blocks: BlockIds
    settings: RequestSettings = NO_SETTINGS


@dataclass(slots=True)
class LoadBatch:
    """The loads whose pages one forward pass reads.

    Attributes:
        requests: ids of the requests whose loads are in the batch.
        ends_s: deadline for all layers (`time.monotonic`).
        pages: number of pages that the batch loads.
        jobs: the started loads, at most one per request.
        failed: number of the batch's pages that are known to have failed.
        layers: number of leading layers that are in place.
        lost: why the batch is incomplete; empty while all of it may still arrive.
    """

    requests: tuple[str, ...]
    ends_s: float
    pages: int
    jobs: list[LoadJob] = field(default_factory=list)
    failed: int = 0
    layers: int = 0
    lost: str = ""

    def ended(self, done: Completion) -> None:
        if len(done.failed_blocks):
            self.failed += len(done.failed_blocks)
            self.lost = self.lost or done.reason or "pages failed"


class LoadBatches:
    """The batches of loads in flight. This object is the `layer_done_counter` of SGLang's pools, which call
    `set_consumer` and then `wait_until` for each layer.

    A failed layer raises no error in the forward pass that waits for it. The forward pass runs with whatever its slots
    hold, and then `finish` returns False, before the output is used.

    Attributes:
        num_layers: number of layers of the pool.
        consumer_index: number of the batch that the current forward pass reads; NO_BATCH if it reads none.
    """

    def __init__(self, cache: RankCache) -> None:
        self._cache = cache
        self.num_layers = cache.views[0].num_layers
        self.consumer_index = NO_BATCH
        self._numbers = count()
        self._batches: dict[int, LoadBatch] = {}
        self._failed = FailedOps(logger)

    # --- called by the engine's pools ---

    def set_consumer(self, index: int) -> None:
        """Sets the batch that the next forward pass reads."""
        self.consumer_index = index

    def wait_until(self, layer: int) -> None:
        """Waits until this layer of the current batch is in place or lost. On a device, only ensures that work that is
        enqueued from now on starts after the layer's copies."""
        batch = self._batches.get(self.consumer_index)
        if batch is None or layer < batch.layers or batch.lost:
            return
        for job in batch.jobs:
            if not self._cache.wait_layer(job, layer, batch.ends_s, self._cache.current_stream()):
                batch.lost = PAST_DEADLINE
                return
        batch.layers = layer + 1

    # --- called by the linker ---

    def start(self, queued: dict[str, QueuedLoad], stream: int | None) -> int:
        """Starts the loads of a forward pass together; returns the number of their batch."""
        ends_s = time.monotonic() + self._cache.config.load.deadline_s
        batch = LoadBatch(tuple(queued), ends_s, sum(len(load.blocks) for load in queued.values()))
        index = next(self._numbers)
        self._batches[index] = batch
        # If direct loads from disk have failed since these pages were promised, the pages are read into host memory
        # first. The engine computes nothing during these reads, so all requests of the batch together wait at most
        # `lookup_wait_s`.
        wait_s = self._cache.config.load.lookup_wait_s if self._cache.loads_from_disk else 0.0
        waits_until_s = time.monotonic() + wait_s
        for request_id, load in queued.items():
            left_s = 0.0 if batch.lost else max(0.0, waits_until_s - time.monotonic())
            self._start_one(batch, request_id, load, left_s, stream)
        return index

    def _start_one(
        self, batch: LoadBatch, request_id: str, load: QueuedLoad, wait_s: float, stream: int | None
    ) -> None:
        manager = self._cache.manager
        # The pages are looked up again, because their lease may have expired, or a later lookup that led to no load may
        # have replaced it.
        if self._cache.match(request_id, load.keys, wait_s, settings=load.settings) < len(load.blocks):
            manager.release(request_id)
            batch.lost = "what was promised is not there any more"
            batch.failed += len(load.blocks)
            return
        graph = manager.begin_load(request_id, [load.blocks])
        if graph is None:
            return
        batch.jobs.append(self._cache.load(request_id, graph.layerwise(), batch.ended, stream))
        self._cache.counters.add("flexkv_hit_tokens_total", len(load.blocks) * self._cache.page_tokens)

    def finish(self, index: int) -> bool:
        """Waits until no copy of the batch is in flight; returns whether every page arrived in time.

        Raises:
            ClosedError: a copy neither finished nor could be cancelled. Its pages may be written at any time, so the
                engine can neither use nor free them.
        """
        batch = self._batches.get(index)
        if batch is None:
            return True
        cache = self._cache
        cache.finish_load(*batch.jobs)
        del self._batches[index]
        for request_id in batch.requests:
            # The requests are ended here, because the engine ends those of a failed batch without informing its caches.
            cache.manager.end_request(request_id)
        if batch.lost:
            name = f"of {len(batch.requests)} request(s), which the engine ends"
            # If no op lost a page, a layer arrived after the forward pass had read it, so all pages count as failed.
            failed = batch.failed or batch.pages
            self._failed.warn("load of a forward", name, failed, batch.pages, batch.lost)
        return not batch.lost

    def log_left_out(self) -> None:
        """When a minute is over, logs how many of that minute's failures were not logged."""
        self._failed.flush()

    def reset(self) -> None:
        """Ends all batches. None of their copies is in flight when this returns."""
        for index in list(self._batches):
            self.finish(index)
        self._failed.flush(at_end=True)
        self.consumer_index = NO_BATCH
