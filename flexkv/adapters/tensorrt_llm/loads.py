"""Promises of tokens that the engine need not compute, and the loads that keep them."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from flexkv.adapters.common.load_job import LoadJob
from flexkv.adapters.tensorrt_llm.messages import CancelOrder, LoadOrder
from flexkv.adapters.tensorrt_llm.rank_coordinator import Joined, RankCoordinator
from flexkv.adapters.tensorrt_llm.requests import (
    NO_BLOCKS,
    NO_TOKENS,
    RequestTracker,
    blocks_of,
    still_wanted,
    tokens_of,
)
from flexkv.cache.base import NO_BLOCK, MatchResult
from flexkv.errors import TransferError
from flexkv.facts.keys import Keys
from flexkv.observe import Counters
from flexkv.transfer.graph import NO_OPS

READ_LOOK_S = 0.0005
"""Seconds between two polls of a lookup that waits for reads from the tiers behind host memory."""


class Loads:
    """Lookups and loads of one unit.

    Args:
        sync: loads run inside the step that needs them, not between steps.
        by_layer: such a step waits for each layer just before it reads the layer.
        lease_s: `load.lease_s`.
        wait_s: `load.lookup_wait_s`: the longest time that all lookups between two steps wait together.
    """

    def __init__(
        self,
        ranks: RankCoordinator,
        counters: Counters,
        sync: bool,
        by_layer: bool,
        lease_s: float,
        wait_s: float,
    ) -> None:
        self._ranks = ranks
        self._counters = counters
        self._sync = sync
        self._by_layer = by_layer
        self._lease_s = lease_s
        self._wait_s = self._wait_left_s = wait_s
        self._planned: list[LoadJob] = []
        """Loads inside the next step that were not sent to the ranks yet."""

    # --- lookups ---

    def match(self, joined: Joined, request: Any, computed_tokens: int) -> int:
        """Leases and promises tokens that can be loaded beyond `computed_tokens`; returns their number.

        Only pages verified in host memory are promised. Pages in the tiers behind it are read first, and this waits for
        them, because the engine cannot be asked to come back; pages that arrive too late serve later lookups. Nothing
        is promised while ranks may still handle an earlier load of the request: see `RequestTracker.spent`.
        """
        tracker = joined.requests.of(request)
        # The engine asks only for requests that hold no block, so tokens computed in earlier blocks do not count.
        tracker.offer, tracker.wanted = NO_BLOCKS, NO_TOKENS
        tracker.step_loaded = tracker.computed = 0
        tokens = request.get_tokens(0)
        tracker.prompt_tokens = len(tokens)
        tracker.offer = self._look_up(joined, tracker, tokens, computed_tokens)
        tracker.wanted = tokens_of(tracker.offer, joined.block_tokens)
        tracker.told = len(tracker.wanted)
        tracker.unsettled |= bool(tracker.told) and not self._sync
        return tracker.told

    def _look_up(
        self, joined: Joined, tracker: RequestTracker, tokens: Sequence[int], computed_tokens: int
    ) -> range:
        """Leases the blocks that can be promised, and returns them."""
        if not self._ranks.usable or tracker.keys is None or computed_tokens % joined.block_tokens:
            return NO_BLOCKS
        if tracker.ordered:
            return NO_BLOCKS
        unit, request_id = joined.unit, str(tracker.request_id)
        unit.grow()
        # The engine must compute at least one token to sample from.
        end = (len(tokens) - 1) // joined.block_tokens
        start = computed_tokens // joined.block_tokens
        if start >= end:
            return NO_BLOCKS
        keys = tracker.keys.of(tokens)[:end]
        match = self._match(joined, request_id, keys, computed_tokens)
        self._counters.add("flexkv_lookup_tokens_total", (end - start) * joined.block_tokens)
        if not match.blocks:
            unit.manager.release(request_id)
        return range(start, start + match.blocks)

    def _match(self, joined: Joined, request_id: str, keys: Keys, computed_tokens: int) -> MatchResult:
        """Matches until the tiers behind host memory have answered, or the time to wait is over.

        All ranks stand still meanwhile, and so do the running requests.
        """
        manager = joined.unit.manager
        match = manager.match(request_id, [keys], computed_tokens)
        joined.unit.poll()
        ends_s = time.monotonic() + self._wait_left_s
        while not match.is_final and (now_s := time.monotonic()) < ends_s:
            while self._ranks.usable and manager.waits(request_id) and now_s < ends_s:
                time.sleep(READ_LOOK_S)
                self._ranks.poll()
                now_s = time.monotonic()
            match = manager.match(request_id, [keys], computed_tokens)
            self._ranks.poll()
            self._wait_left_s = max(0.0, ends_s - now_s)
        return match

    # --- loads ---

    def allocated(self, joined: Joined, request: Any, block_ids: list[int]) -> None:
        """Called when the engine has given the request its blocks: orders the load that was promised.

        A load between steps is sent to the ranks at once: no step's metadata has its request, and there may be no step.

        Raises:
            TransferError: see `_renew`.
        """
        tracker = joined.requests.of(request)
        offer, taken = tracker.offer, tracker.wanted
        tracker.offer, tracker.wanted = NO_BLOCKS, NO_TOKENS
        wanted = blocks_of(taken, joined.block_tokens)
        if not wanted:
            # The engine handed back the whole offer, or it asked again and got none: its wait for a load can be ended.
            # If a reset took the promise away instead, the engine counts on KV that never comes: it must go on waiting.
            if offer or (tracker.unsettled and tracker.told == 0):
                self._excuse(tracker)
            return
        self._renew(joined, tracker, request, offer)
        # The engine may have found fewer blocks than it takes.
        given = block_ids[wanted.start : wanted.stop]
        targets = np.full(len(offer), NO_BLOCK, np.int32)
        first = wanted.start - offer.start
        targets[first : first + len(given)] = given
        graph = joined.unit.manager.begin_load(str(tracker.request_id), [targets])
        self._counters.add("flexkv_hit_tokens_total", len(given) * joined.block_tokens)
        if self._sync:
            if graph is not None:
                graph = graph.layerwise() if self._by_layer else graph
                self._planned.append(LoadJob(str(tracker.request_id), graph, sync=True))
            tracker.step_loaded = (wanted.start + len(given)) * joined.block_tokens
            return
        if graph is not None:
            tracker.load, tracker.loading = frozenset(op.op_id for op in graph.ops), taken
        else:
            # No rank will report the end of this load.
            tracker.spent = True
        tracker.unsettled = False
        job = LoadJob(str(tracker.request_id), NO_OPS if graph is None else graph, sync=False)
        self._ranks.order(LoadOrder(tracker.request_id, job))

    def _excuse(self, tracker: RequestTracker) -> None:
        """Orders a load of nothing, because the engine may still wait for the end of a load that it was promised
        between steps."""
        if not self._sync:
            tracker.spent, tracker.unsettled = True, False
            job = LoadJob(str(tracker.request_id), NO_OPS, sync=False)
            self._ranks.order(LoadOrder(tracker.request_id, job))

    def _renew(self, joined: Joined, tracker: RequestTracker, request: Any, offer: range) -> None:
        """Leases the promised blocks again, if their lease expired before the engine took up the promise.

        Raises:
            TransferError: the blocks are gone. The engine counts the tokens as loaded, and cannot be told otherwise.
        """
        assert tracker.keys is not None
        manager, request_id = joined.unit.manager, str(tracker.request_id)
        if manager.leased_pages(request_id):
            return
        keys = tracker.keys.of(request.get_tokens(0))[: offer.stop]
        if manager.match(request_id, [keys], offer.start * joined.block_tokens).blocks < len(offer):
            manager.release(request_id)
            raise TransferError(
                f"request {request_id}: the engine took up a promise of {len(offer)} blocks after more than "
                f"load.lease_s={self._lease_s:g} s, and they are not there any more"
            )

    def take_planned(self) -> tuple[LoadJob, ...]:
        """Takes the loads inside the next step. Later lookups may wait again."""
        self._wait_left_s = self._wait_s
        planned, self._planned = tuple(self._planned), []
        return planned

    # --- taken back ---

    def cancel(self, joined: Joined, tracker: RequestTracker, start: int, end: int | None) -> None:
        """The engine hands back prompt tokens [start, end) of its promise; None stands for all from `start` on.

        A load under way can be cancelled only as a whole: its blocks stay in use until the ranks return its id.
        """
        end = sys.maxsize if end is None else end
        if tracker.offer:
            tracker.wanted = still_wanted(tracker.wanted, start, end)
            if not tracker.wanted:
                joined.unit.manager.release(str(tracker.request_id))
        elif tracker.load:
            tracker.loading = still_wanted(tracker.loading, start, end)
            if not tracker.loading:
                tracker.spent = True
                joined.unit.manager.abandon_loads(str(tracker.request_id))
                self._ranks.order(CancelOrder(tracker.request_id))

    def drop_planned(self, request_id: int) -> list[LoadJob]:
        """Removes and returns the request's loads inside the next step, because its blocks are freed."""
        mine = [job for job in self._planned if job.request_id == str(request_id)]
        self._planned = [job for job in self._planned if job.request_id != str(request_id)]
        return mine
