"""The scheduler's side of blending: decides which requests are blended, waits until their segments are loaded, and
orders the ranks to reuse or capture rows of these requests in each step.

The calls for a blended request are, in this order: `enter` when it enters the engine's queue; `match` when the engine
looks it up, repeatedly until every rank has loaded its segments; `chunk` in each step that computes tokens of its
prompt; and `end`. flexkv never promises the engine tokens of a blended request, so the engine schedules all of them.
The model then computes fewer rows in most layers.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from flexkv.adapters.vllm.blend.asks import Span, is_salted, refusal, spans_of, tokens_of
from flexkv.adapters.vllm.blend.orders import (
    Arrival,
    BlendOrders,
    ChunkOrder,
    NewSegment,
    RequestId,
    Reuse,
    SegmentOrder,
)
from flexkv.adapters.vllm.blend.spec import PAGE_TOKENS, BlendSpec
from flexkv.adapters.vllm.requests import RequestTracker
from flexkv.blend.base import Tokens
from flexkv.cache.base import CacheListener
from flexkv.observe import BlendResult, Counters, get_logger

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = get_logger(__name__)

MOST_SALTS = 1 << 16
"""At most this many salts are remembered, in 16 bytes each. If a request uses a forgotten salt again, a hit in the
engine's own prefix cache reveals this."""


MOST_STORES = 1 << 12
"""Largest number of new segments that may wait at the same time until all ranks have reported whether they stored them.
A rank reports within `load.deadline_s`."""


class Phase(Enum):
    """The state of a blended request's segments."""

    NEW = "new"
    """No rank has loaded the segments."""
    LOADING = "loading"
    """The ranks were ordered to load the segments."""
    READY = "ready"
    """Every rank has reported its load, and the rows that all ranks have loaded are known. A request without segments
    to load is READY, too."""


@dataclass(slots=True, eq=False)
class BlendedRequest:
    """A request that was accepted for blending.

    Attributes:
        tracker: the request's tracker, whose block table follows the engine's.
        spans: the segments of its prompt; empty if the prompt itself will be stored as a segment.
        prompt: the prompt's tokens.
        ratio: share of the reused rows that is computed again.
        phase: the state of the request's segments.
        asked_s: when the engine first looked the request up, on the monotonic clock; None before that, and again after
            a preemption.
        pages: number of pages of the segments, or of the prompt if it will be stored.
        load: number of the request's last load; 0 before the first.
        store: number of the new segment, if the prompt will be stored (see `NewSegment`); otherwise 0.
        loaded: for each rank that has reported, which tokens it has loaded.
        reuse: the tokens that all ranks have loaded; None before all ranks have reported.
        is_counted: whether the request's outcome is already counted in the metrics.
    """

    tracker: RequestTracker
    spans: Sequence[Span]
    prompt: Tokens
    ratio: float
    phase: Phase = Phase.NEW
    asked_s: float | None = None
    pages: int = 0
    load: int = 0
    store: int = 0
    loaded: dict[int, Arrival] = field(default_factory=dict)
    reuse: Reuse | None = None
    is_counted: bool = False

    @property
    def request_id(self) -> RequestId:
        return self.tracker.request_id

    @property
    def caller(self) -> str:
        return self.tracker.first_namespace


class BlendRequests(CacheListener):
    """Decides on the scheduler's side which of an engine's requests are blended, and tracks the blended requests.

    Args:
        spec: facts about the engine, and the settings of blending.
        block_tokens: number of tokens in one of the engine's blocks.
        ranks: number of workers.
        clock: returns monotonic seconds.

    Attributes:
        orders: the orders to the ranks since the last step.
    """

    def __init__(
        self,
        spec: BlendSpec,
        block_tokens: int,
        ranks: int,
        counters: Counters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._spec = spec
        self._block_tokens, self._ranks = block_tokens, ranks
        self._counters, self._clock = counters, clock
        self._is_on = False
        self._live: dict[RequestId, BlendedRequest] = {}
        self._spoiled: dict[RequestId, Request] = {}
        """Requests with a salt that another request has used. From the next step on they do not read the engine's
        prefix cache."""
        self._salts: dict[bytes, None] = {}
        self._held_pages = 0
        self._loads = itertools.count(1)
        self._loading: set[RequestId] = set()
        self._stores = itertools.count(1)
        self._storing: dict[int, dict[int, BlendResult]] = {}
        """Number of a new segment -> rank -> the result that the rank has reported. An entry is removed when all ranks
        have reported."""
        self._disk_busy: set[int] = set()
        """The ranks that are reading segments from disk or writing them."""
        self.orders = BlendOrders()

    def take_verdicts(self, refusals: Sequence[str | None]) -> None:
        """Turns blending on if no rank refuses it. `refusals` has each rank's `BlendWorker.refusal`."""
        self._is_on = bool(refusals) and all(each == "" for each in refusals)

    # --- a request's life ---

    def enter(self, tracker: RequestTracker) -> None:
        """Called when a request enters the engine's queue. Accepts the request for blending, or counts why it is not
        accepted.

        If a request is not blended but has a salt for blended requests, flexkv keeps it from reading the engine's
        prefix cache. Otherwise, it could read inexact blocks that a blended request with that salt has left there.
        """
        request, ask = tracker.request, tracker.asked.blend
        if ask is None:
            if is_salted(request):
                request.skip_reading_prefix_cache = True
            return
        found = self._accept(tracker)
        if isinstance(found, BlendResult):
            self._count(found)
            if is_salted(request):
                request.skip_reading_prefix_cache = True
            return
        # A caller's demand to skip the prefix cache is dropped, because vLLM does not let a request with this demand
        # wait for its segments. A request with its own salt finds nothing in the prefix cache anyway.
        request.skip_reading_prefix_cache = False
        # The request's KV is not exact, so other requests must not use it.
        tracker.settings = replace(tracker.settings, skip_save=True, skip_load=True)
        tracker.kept_out.ask(True, 0, 0)
        self._live[found.request_id] = found

    def _accept(self, tracker: RequestTracker) -> BlendedRequest | BlendResult:
        request, ask = tracker.request, tracker.asked.blend
        assert ask is not None
        if not self._is_on:
            return BlendResult.OFF
        if (refused := refusal(request)) is not None:
            return refused
        if ask.store and tracker.asked.ttl_s is not None:
            return BlendResult.TIME_TO_LIVE
        # The salt is remembered even if the request is refused below, because its blocks have this salt in any case.
        if not self._remember(str(request.cache_salt)):
            return BlendResult.USED_SALT
        prompt = tokens_of(request)
        ratio = self._spec.settings.ratio if ask.ratio is None else ask.ratio
        if ask.store:
            pages = self._pages_of([(0, len(prompt))])
            return BlendedRequest(tracker, (), prompt, ratio, pages=pages, store=next(self._stores))
        spans = spans_of(ask, prompt, self._spec.separators, self._spec.settings.min_tokens)
        if isinstance(spans, BlendResult):
            return spans
        return BlendedRequest(tracker, spans, prompt, ratio, pages=self._pages_of(spans))

    def _remember(self, salt: str) -> bool:
        """Remembers a salt. Returns False if it was remembered already."""
        digest = hashlib.sha256(salt.encode("utf-8", "surrogatepass")).digest()[:16]
        if digest in self._salts:
            return False
        self._salts[digest] = None
        if len(self._salts) > MOST_SALTS:
            del self._salts[next(iter(self._salts))]
        return True

    def _pages_of(self, spans: Sequence[Span]) -> int:
        return sum(-(-(end - first) // PAGE_TOKENS) for first, end in spans)

    def match(self, request: Request, computed_tokens: int) -> bool | None:
        """Decides whether a request that the engine looks up is blended. Returns None if the request has to wait; the
        engine then asks again in its next step.

        Args:
            computed_tokens: how many of the request's tokens the engine's own prefix cache has.
        """
        blended = self._live.get(request.request_id)
        if blended is None:
            return None if request.request_id in self._spoiled else False
        if computed_tokens and not request.num_preemptions:
            # The engine has a hit, so another request has used this request's salt.
            self._give_up(blended, BlendResult.USED_SALT)
            self._spoiled[blended.request_id] = request
            return None
        now_s = self._clock()
        if blended.asked_s is None:
            blended.asked_s = now_s
        if blended.phase is Phase.NEW:
            self._begin(blended)
        if blended.phase is Phase.READY:
            return True
        if now_s - blended.asked_s > self._spec.deadline_s:
            self._give_up(blended, BlendResult.LATE)
            return False
        return None

    def _begin(self, blended: BlendedRequest) -> None:
        """Reserves staging blocks for the request's pages and orders the ranks to load them. Does nothing if there are
        too few free blocks."""
        if self._held_pages + blended.pages > self._spec.most_pages:
            return
        self._held_pages += blended.pages
        if not blended.spans:
            blended.phase = Phase.READY
            return
        blended.phase, blended.load = Phase.LOADING, next(self._loads)
        self._loading.add(blended.request_id)
        segments = tuple(blended.prompt[first:end] for first, end in blended.spans)
        self.orders.load.append(SegmentOrder(blended.request_id, blended.load, segments, blended.caller))

    def take_arrived(self, rank: int, arrived: Mapping[RequestId, Arrival]) -> None:
        """Handles a rank's report of the loads that have ended; see `BlendPages.take_arrived`."""
        for request_id, arrival in arrived.items():
            blended = self._live.get(request_id)
            if blended is None or blended.phase is not Phase.LOADING or blended.load != arrival.load:
                continue
            blended.loaded[rank] = arrival
            if len(blended.loaded) == self._ranks:
                self._agree(blended)

    def _await_store(self, number: int) -> None:
        """Starts waiting for all ranks to report whether they stored a new segment. The segment is counted when all
        ranks have reported."""
        self._storing[number] = {}
        if len(self._storing) > MOST_STORES:
            del self._storing[next(iter(self._storing))]
            self._count(BlendResult.LATE)

    def take_stored(self, rank: int, stored: Mapping[int, BlendResult]) -> None:
        """Handles a rank's report of the segments whose store operations have ended; see `BlendPages.take_stored`."""
        for number, result in stored.items():
            reported = self._storing.get(number)
            if reported is None:
                continue  # counted already; a prompt that was preempted is computed and reported again
            reported[rank] = result
            if len(reported) == self._ranks:
                del self._storing[number]
                lost = [each for each in reported.values() if each is not BlendResult.STORED]
                self._count(lost[0] if lost else BlendResult.STORED)

    def take_disk_busy(self, rank: int, is_busy: bool) -> None:
        """Handles a rank's report of whether its disks are busy."""
        if is_busy:
            self._disk_busy.add(rank)
        else:
            self._disk_busy.discard(rank)

    def _agree(self, blended: BlendedRequest) -> None:
        """Determines, after every rank has reported, the rows that all ranks have loaded. Only these rows are
        reused."""
        loaded = list(blended.loaded.values())
        blended.loaded.clear()
        common = [min(tokens) for tokens in zip(*(each.tokens for each in loaded), strict=True)]
        if not any(common):
            missing = [each.missing for each in loaded if each.missing is not BlendResult.MISS]
            self._give_up(blended, missing[0] if missing else BlendResult.MISS)
            return
        spans = tuple((first, tokens) for (first, _), tokens in zip(blended.spans, common, strict=True))
        blended.reuse = Reuse(spans, blended.ratio)
        blended.phase = Phase.READY
        self._loading.discard(blended.request_id)

    def chunk(self, tracker: RequestTracker) -> None:
        """Orders the ranks to reuse or capture a request's rows in this step. Called in each step that computes tokens
        of the request, after its tracker was updated."""
        blended = self._live.get(tracker.request_id)
        if blended is None:
            return
        first, end = tracker.computed, tracker.step_end
        if first >= len(blended.prompt):
            self._release(blended)
            return
        if blended.phase is not Phase.READY:
            return
        asks: Reuse | NewSegment = blended.reuse or NewSegment(blended.prompt, blended.caller, blended.store)
        at = np.arange(first, end, dtype=np.int64)
        blocks = np.asarray(tracker.tables[0].ids, np.int64)
        slots = blocks[at // self._block_tokens] * self._block_tokens + at % self._block_tokens
        self.orders.chunks.append(ChunkOrder(blended.request_id, first, slots, asks))
        if isinstance(asks, NewSegment):
            if end >= len(blended.prompt) and not blended.is_counted:
                blended.is_counted = True
                self._await_store(blended.store)
        elif asks.covers(first, end):
            self._count_once(blended, BlendResult.BLENDED)

    def preempted(self, request_id: RequestId) -> None:
        """Restarts a request's deadline, because the engine has taken its blocks and will compute its prompt again."""
        if (blended := self._live.get(request_id)) is not None:
            blended.asked_s = None

    def end(self, request_id: RequestId) -> None:
        """Drops a request that has ended, and releases its pages."""
        self._spoiled.pop(request_id, None)
        if (blended := self._live.pop(request_id, None)) is not None:
            self._release(blended)

    def reset(self) -> None:
        """Stops blending all live requests, and drops all segments. Called when the weights change."""
        for blended in list(self._live.values()):
            self._give_up(blended, BlendResult.RESET)
        self.orders.forget = True

    def on_erase(self, name: str) -> None:
        """Drops all segments, because the ranks cannot tell which segments belong to the erased namespace."""
        self.reset()

    # --- the step ---

    def take_orders(self) -> BlendOrders | None:
        """Returns the orders given since the last step; None if there are none."""
        for request in self._spoiled.values():
            request.skip_reading_prefix_cache = True
        self._spoiled.clear()
        if not self.orders:
            return None
        orders, self.orders = self.orders, BlendOrders()
        return orders

    @property
    def has_work(self) -> bool:
        """Whether the ranks need another step, to get orders or to continue the work of their disks."""
        return bool(self.orders) or self.disk_busy

    @property
    def disk_busy(self) -> bool:
        """Whether some rank is reading segments from disk or writing them."""
        return bool(self._disk_busy)

    @property
    def moves_pages(self) -> bool:
        """Whether some rank is loading segments, reading them from disk or writing them."""
        return self.disk_busy or bool(self._loading)

    # --- ends ---

    def _give_up(self, blended: BlendedRequest, why: BlendResult) -> None:
        """Stops blending the request, so that the engine computes all its tokens. flexkv still does not store its
        blocks."""
        del self._live[blended.request_id]
        self._release(blended)
        self._count_once(blended, why)

    def _release(self, blended: BlendedRequest) -> None:
        """Releases the request's pages on all ranks. If the engine looks the request up again, its segments are loaded
        again."""
        if blended.phase is not Phase.NEW:
            self._held_pages -= blended.pages
            unsent = [order for order in self.orders.load if order.request == blended.request_id]
            for order in unsent:
                self.orders.load.remove(order)
            if not unsent:
                self.orders.release.append(blended.request_id)
        blended.phase = Phase.NEW
        blended.loaded.clear()
        self._loading.discard(blended.request_id)

    def _count_once(self, blended: BlendedRequest, result: BlendResult) -> None:
        if not blended.is_counted:
            blended.is_counted = True
            self._count(result)

    def _count(self, result: BlendResult) -> None:
        self._counters.add("flexkv_blend_requests_total", result=result.result)
