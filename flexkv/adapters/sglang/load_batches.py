"""Loads of a forward batch, layer by layer: SGLang's KV pools wait for each layer before they read it."""

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
"""The batch number that tells SGLang that a forward waits for no load."""


@dataclass(frozen=True, slots=True)
class QueuedLoad:
    """A promise that the engine took up: `blocks[i]` will hold the page of `keys[i]`."""

    keys: Keys
    blocks: BlockIds
    settings: RequestSettings = NO_SETTINGS


@dataclass(slots=True)
class LoadBatch:
    """The loads that one forward pass reads.

    Attributes:
        ends_s: when a layer that is not in place is given up (`time.monotonic`).
        pages: number of pages that the batch loads.
        jobs: the loads, one for each request.
        failed: number of those pages that are known to have failed.
        layers: number of layers in place, from the first on.
        lost: why the batch is incomplete; empty while all of it may arrive.
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
    """Batches under way. This is the `layer_done_counter` of SGLang's pools, which call `set_consumer` and then
    `wait_until` for each layer.

    A failed layer raises no error in the forward pass that waits for it: the forward pass runs with whatever its slots
    hold, and `finish` returns False before the output is used.

    Attributes:
        num_layers: layers of the pool.
        consumer_index: number of the batch whose forward pass runs; NO_BATCH for none.
    """

    def __init__(self, cache: RankCache) -> None:
        self._cache = cache
        self.num_layers = cache.views[0].num_layers
        self.consumer_index = NO_BATCH
        self._numbers = count()
        self._batches: dict[int, LoadBatch] = {}
        self._failed = FailedOps(logger)

    # --- the engine's side: called by its pools ---

    def set_consumer(self, index: int) -> None:
        """Sets the batch that the next forward pass reads."""
        self.consumer_index = index

    def wait_until(self, layer: int) -> None:
        """Returns once this layer of the batch is in place, or is lost. On a device, it returns once work enqueued from
        now on starts after the layer's copies."""
        batch = self._batches.get(self.consumer_index)
        if batch is None or layer < batch.layers or batch.lost:
            return
        for job in batch.jobs:
            if not self._cache.wait_layer(job, layer, batch.ends_s, self._cache.current_stream()):
                batch.lost = PAST_DEADLINE
                return
        batch.layers = layer + 1

    # --- the linker's side ---

    def start(self, queued: dict[str, QueuedLoad], stream: int | None) -> int:
        """Starts the loads of a forward pass together; returns the number of their batch."""
        ends_s = time.monotonic() + self._cache.config.load.deadline_s
        batch = LoadBatch(tuple(queued), ends_s, sum(len(load.blocks) for load in queued.values()))
        index = next(self._numbers)
        self._batches[index] = batch
        # If direct loads have failed for others meanwhile, promised pages on disk are read into host memory first. The
        # engine stands still during that, so all requests of the batch share one wait.
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
        # Looked up again, because the lease may be gone, or may belong to a later lookup that the engine did not act
        # upon.
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
        """Waits until no copy of the batch is under way; returns whether every page arrived in time.

        Raises:
            ClosedError: a copy neither ended nor could be recalled: its pages may be written at any time, so the engine
                can neither use nor free them.
        """
        batch = self._batches.get(index)
        if batch is None:
            return True
        cache = self._cache
        cache.finish_load(*batch.jobs)
        del self._batches[index]
        for request_id in batch.requests:
            # The engine ends all requests of a batch that failed, without a call to its caches.
            cache.manager.end_request(request_id)
        if batch.lost:
            name = f"of {len(batch.requests)} request(s), which the engine ends"
            # If no op lost a page, a layer arrived after the forward pass had read it, so all pages count.
            failed = batch.failed or batch.pages
            self._failed.warn("load of a forward", name, failed, batch.pages, batch.lost)
        return not batch.lost

    def log_left_out(self) -> None:
        """Once the current minute is over, logs how many of its failures got no log line."""
        self._failed.flush()

    def reset(self) -> None:
        """Ends all batches; no copy of them is under way when this returns."""
        for index in list(self._batches):
            self.finish(index)
        self._failed.flush(at_end=True)
        self.consumer_index = NO_BATCH
