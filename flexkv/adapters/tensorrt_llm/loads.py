"""Promises of tokens that the engine need not compute, and the loads that keep them."""

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
        by_layer: see the attribute of `SchedulerSide`.

    Attributes:
        sync: loads run inside the step that needs them, not between steps.
    """

    def __init__(self, load: LoadConfig, ranks: RankCoordinator, counters: Counters, by_layer: bool) -> None:
        self.sync = load.mode != "async"
        self._load = load
        self._ranks = ranks
        self._counters = counters
        self._by_layer = by_layer
        self._wait_left_s = load.lookup_wait_s
        self._planned: list[LoadJob] = []
        """Loads inside the next step that were not sent to the ranks yet."""

    # --- lookups ---

    def match(self, tracker: RequestTracker, tokens: Sequence[int], computed_tokens: int) -> int:
        """Leases and promises tokens that can be loaded beyond `computed_tokens`; returns their number.

        Only pages verified in host memory are promised. Pages in the tiers behind it are read first, and this waits for
        them, because the engine cannot be asked to come back; pages that arrive too late serve later lookups. Nothing
        is promised while ranks may still handle an earlier load of the request: see `RequestTracker.spent`.
        """
        # The engine asks only for requests that hold no block, so tokens computed in earlier blocks do not count.
        tracker.offer, tracker.wanted = NO_BLOCKS, NO_TOKENS
        tracker.step_loaded = tracker.computed = 0
        tracker.prompt_tokens = len(tokens)
        tracker.offer = self._look_up(tracker, tokens, computed_tokens)
        tracker.wanted = tokens_of(tracker.offer, self._ranks.block_tokens)
        tracker.told = len(tracker.wanted)
        tracker.unsettled |= bool(tracker.told) and not self.sync
        return tracker.told

    def _look_up(self, tracker: RequestTracker, tokens: Sequence[int], computed_tokens: int) -> range:
        """Leases the blocks that can be promised, and returns them."""
        unit, block_tokens = self._ranks.unit, self._ranks.block_tokens
        if not self._ranks.usable or tracker.keys is None or tracker.ordered:
            return NO_BLOCKS
        unit.grow()
        start, within = divmod(computed_tokens, block_tokens)
        # The engine must compute at least one token to sample from.
        end = (len(tokens) - 1) // block_tokens
        if within or start >= end:
            return NO_BLOCKS
        keys = tracker.keys.of(tokens)[:end]
        # All ranks stand still during the wait, and so do the running requests, so all lookups before a step share it.
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
        """Called when the engine has given the request its blocks: orders the load that was promised.

        A load between steps is sent to the ranks at once: no step's metadata has its request, and there may be no step.

        Raises:
            TransferError: see `_renew`.
        """
        offer, taken = tracker.offer, tracker.wanted
        tracker.offer, tracker.wanted = NO_BLOCKS, NO_TOKENS
        block_tokens = self._ranks.block_tokens
        wanted = blocks_of(taken, block_tokens)
        if not wanted:
            # The engine handed back the whole offer, or it asked again and got none: its wait for a load can be ended
            # by a load of nothing. If a reset took the promise away instead, the engine counts on KV that never comes,
            # and must go on waiting.
            if not self.sync and (offer or (tracker.unsettled and tracker.told == 0)):
                self._order(tracker, None)
            return
        self._renew(tracker, request, offer)
        # The engine may have found fewer blocks than it takes.
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
        """Orders a load between steps. If it is a load of nothing, no rank will report its end."""
        graph = NO_OPS if graph is None else graph
        tracker.load = frozenset(op.op_id for op in graph.ops)
        tracker.spent |= not tracker.load
        tracker.unsettled = False
        self._ranks.order(LoadJob(tracker.name, graph, sync=False))

    def _renew(self, tracker: RequestTracker, request: Any, offer: range) -> None:
        """Leases the promised blocks again, if their lease expired before the engine took up the promise.

        Raises:
            TransferError: the blocks are gone. The engine counts the tokens as loaded, and cannot be told otherwise.
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
        """Takes the loads inside the next step. Later lookups may wait again."""
        self._wait_left_s = self._load.lookup_wait_s
        planned, self._planned = tuple(self._planned), []
        return planned

    # --- handed back ---

    def cancel(self, tracker: RequestTracker, start: int, end: int | None) -> None:
        """The engine hands back prompt tokens [start, end) of its promise; None stands for all from `start` on.

        A load under way can be cancelled only as a whole: its blocks stay in use until the ranks return its id.
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
        """Ends the request's loads inside the next step, because its blocks are freed."""
        manager = self._ranks.unit.manager
        manager.abandon_loads(tracker.name)
        mine = [job for job in self._planned if job.request_id == tracker.name]
        self._planned = [job for job in self._planned if job.request_id != tracker.name]
        for op in (op for job in mine for op in job.graph.ops):
            dropped = OpResult.cancelled(op.op_id, op.pages, "the request ended first")
            for rank in range(self._ranks.ranks):
                manager.complete(rank, dropped)
