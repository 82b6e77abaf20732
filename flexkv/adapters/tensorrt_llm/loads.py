"""Looks up the tokens that the engine need not compute, promises them to the engine, and orders the ranks to load their
KV."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from flexkv.adapters.common.load_job import LoadJob
from flexkv.adapters.common.waiting_lookup import match_and_wait
from flexkv.adapters.tensorrt_llm.messages import CancelOrder
from flexkv.adapters.tensorrt_llm.rank_coordinator import RankCoordinator
from flexkv.adapters.tensorrt_llm.requests import (
    NO_BLOCKS,
    NO_TOKENS,
    RequestTracker,
    blocks_of,
    still_wanted,
    tokens_of,
)
from flexkv.cache.base import NO_BLOCK
from flexkv.config import LoadConfig
from flexkv.errors import TransferError
from flexkv.observe import Counters
from flexkv.transfer.graph import NO_OPS, OpResult, TransferGraph


class Loads:
    """Lookups and loads of one unit.

    Args:
        by_layer: whether a step waits for each layer of its loads separately; see `SchedulerSide`.

    Attributes:
        sync: True if loads run inside the step that needs them, False if they run between steps.
    """

    def __init__(self, load: LoadConfig, ranks: RankCoordinator, counters: Counters, by_layer: bool) -> None:
        self.sync = load.mode != "async"
        self._load = load
        self._ranks = ranks
        self._counters = counters
        self._by_layer = by_layer
        self._wait_left_s = load.lookup_wait_s
        self._planned: list[LoadJob] = []
        """Loads for the next step's metadata, if `sync`."""

    # --- lookups ---

    def match(self, tracker: RequestTracker, tokens: Sequence[int], computed_tokens: int) -> int:
        """Leases and promises tokens that can be loaded beyond `computed_tokens`; returns their number.

        Only pages in host memory are promised. Pages in the tiers behind it are read into host memory first. This
        method waits for them, because the engine cannot be asked to repeat the lookup later; pages that arrive too late
        serve later lookups. Nothing is promised while ranks may still handle an earlier load of the request (see
        `RequestTracker.spent`).
        """
        # When the engine asks, the request holds no blocks. It has lost the blocks of the tokens that it computed
        # earlier, so these tokens do not count.
        tracker.offer, tracker.wanted = NO_BLOCKS, NO_TOKENS
        tracker.step_loaded = tracker.computed = 0
        tracker.prompt_tokens = len(tokens)
        tracker.offer = self._look_up(tracker, tokens, computed_tokens)
        tracker.wanted = tokens_of(tracker.offer, self._ranks.block_tokens)
        tracker.told = len(tracker.wanted)
        tracker.unsettled |= bool(tracker.told) and not self.sync
        return tracker.told

    def _look_up(self, tracker: RequestTracker, tokens: Sequence[int], computed_tokens: int) -> range:
        """Leases the blocks that can be promised; returns their numbers within the request."""
        unit, block_tokens = self._ranks.unit, self._ranks.block_tokens
        if not self._ranks.usable or tracker.keys is None or tracker.ordered:
            return NO_BLOCKS
        unit.grow()
        start, within = divmod(computed_tokens, block_tokens)
        # The engine must compute at least one token, because it samples the next token from the output.
        end = (len(tokens) - 1) // block_tokens
        if within or start >= end:
            return NO_BLOCKS
        keys = tracker.keys.of(tokens)[:end]
        # All ranks and running requests are blocked during the wait. So all lookups before a step together wait at most
        # `load.lookup_wait_s`.
        ends_s = time.monotonic() + self._wait_left_s
        match = match_and_wait(
            lambda: unit.manager.match(tracker.name, [keys], computed_tokens),
            unit.manager.waits,
            ends_s,
            self._ranks.poll,
        )
        self._wait_left_s = max(0.0, ends_s - time.monotonic())
        self._counters.add("flexkv_lookup_tokens_total", (end - start) * block_tokens)
        if not match.blocks:
            unit.manager.release(tracker.name)
        return range(start, start + match.blocks)

    # --- loads ---

    def allocated(self, tracker: RequestTracker, request: Any, block_ids: list[int]) -> None:
        """Called when the engine has allocated the request's blocks. Orders the load that was promised.

        A load between steps is sent to the ranks at once, because no step's metadata contains its request and there may
        be no next step.

        Raises:
            TransferError: see `_renew`.
        """
        offer, taken = tracker.offer, tracker.wanted
        tracker.offer, tracker.wanted = NO_BLOCKS, NO_TOKENS
        block_tokens = self._ranks.block_tokens
        wanted = blocks_of(taken, block_tokens)
        if not wanted:
            # If the engine declined the complete offer, or asked again and was promised nothing, it may still wait for
            # a load; an empty load ends this wait. If instead a reset withdrew the promise, an empty load would make
            # the engine use KV that was never loaded, so the request must go on waiting.
            if not self.sync and (offer or (tracker.unsettled and tracker.told == 0)):
                self._order(tracker, None)
            return
        self._renew(tracker, request, offer)
        # The engine may have allocated fewer blocks than it accepted from the offer.
        given = block_ids[wanted.start : wanted.stop]
        targets = np.full(len(offer), NO_BLOCK, np.int32)
        first = wanted.start - offer.start
        targets[first : first + len(given)] = given
        graph = self._ranks.unit.manager.begin_load(tracker.name, [targets])
        self._counters.add("flexkv_hit_tokens_total", len(given) * block_tokens)
        if not self.sync:
            tracker.loading = taken
            self._order(tracker, graph)
            return
        if graph is not None:
            graph = graph.layerwise() if self._by_layer else graph
            self._planned.append(LoadJob(tracker.name, graph, sync=True))
        tracker.step_loaded = (wanted.start + len(given)) * block_tokens

    def _order(self, tracker: RequestTracker, graph: TransferGraph | None) -> None:
        """Orders a load between steps. If the load has no ops, no rank will report its end, so the request gets no
        further load (`spent`)."""
        graph = NO_OPS if graph is None else graph
        tracker.load = frozenset(op.op_id for op in graph.ops)
        tracker.spent |= not tracker.load
        tracker.unsettled = False
        self._ranks.order(LoadJob(tracker.name, graph, sync=False))

    def _renew(self, tracker: RequestTracker, request: Any, offer: range) -> None:
        """Leases the promised blocks again if their lease expired before the engine allocated the request's blocks.

        Raises:
            TransferError: the promised blocks are gone. The engine counts their tokens as loaded, and its interface
                has no way to correct that.
        """
        assert tracker.keys is not None
        manager = self._ranks.unit.manager
        if manager.leased_pages(tracker.name):
            return
        keys = tracker.keys.of(request.get_tokens(0))[: offer.stop]
        if manager.match(tracker.name, [keys], offer.start * self._ranks.block_tokens).blocks < len(offer):
            manager.release(tracker.name)
            raise TransferError(
                f"request {tracker.name}: the engine took up a promise of {len(offer)} blocks after more than "
                f"load.lease_s={self._load.lease_s:g} s, and they are not there any more"
            )

    def take_planned(self) -> tuple[LoadJob, ...]:
        """Removes and returns the loads for the next step. Lookups after this call may wait for the full
        `load.lookup_wait_s` again."""
        self._wait_left_s = self._load.lookup_wait_s
        planned, self._planned = tuple(self._planned), []
        return planned

    # --- declined by the engine ---

    def cancel(self, tracker: RequestTracker, start: int, end: int | None) -> None:
        """Called when the engine declines the promised prompt tokens [start, end). If `end` is None, it declines all
        tokens from `start` on.

        A load in flight is cancelled only when all its tokens have been declined. Its blocks stay in use until the
        ranks return the request's id.
        """
        end = sys.maxsize if end is None else end
        if tracker.offer:
            tracker.wanted = still_wanted(tracker.wanted, start, end)
            if not tracker.wanted:
                self._ranks.unit.manager.release(tracker.name)
        elif tracker.load:
            tracker.loading = still_wanted(tracker.loading, start, end)
            if not tracker.loading:
                tracker.spent = True
                self._ranks.unit.manager.abandon_loads(tracker.name)
                self._ranks.order(CancelOrder(tracker.request_id))

    def drop_planned(self, tracker: RequestTracker) -> None:
        """Drops the request's loads from the next step, because the request's blocks are about to be freed."""
        manager = self._ranks.unit.manager
        manager.abandon_loads(tracker.name)
        mine = [job for job in self._planned if job.request_id == tracker.name]
        self._planned = [job for job in self._planned if job.request_id != tracker.name]
        for op in (op for job in mine for op in job.graph.ops):
            dropped = OpResult.cancelled(op.op_id, op.pages, "the request ended first")
            for rank in range(self._ranks.ranks):
                manager.complete(rank, dropped)
