"""The scheduler's side of blending: decides which requests are blended, waits for their pages, and tells the ranks
where their rows are.

A blended request goes through these steps: `enter` when it enters the engine's queue; `match` when the engine looks it
up, repeatedly until every rank has loaded its segments; `chunk` in each step that computes a part of its prompt; `end`.
Its cached tokens are never promised to the engine, which therefore schedules all of them; the model computes fewer of
their rows in most layers.
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
"""Salts that are remembered; 16 bytes each. Where an older one is used again, the engine's own hit shows it."""


MOST_STORES = 1 << 12
"""Segments whose ranks have not all reported yet; a rank reports within `load.deadline_s`."""


class Phase(Enum):
    """The state of a blended request's segments."""

    NEW = "new"
    """No rank holds them."""
    LOADING = "loading"
    READY = "ready"
    """Every rank holds them, or the same part of them."""


@dataclass(slots=True, eq=False)
class BlendedRequest:
    """A request that was accepted.

    Attributes:
        tracker: its tracker, whose block table follows the engine's.
        spans: the segments of its prompt; none if the prompt itself will be kept as a segment.
        prompt: its prompt's tokens.
        asked_s: when its segments were first requested, monotonic.
        pages: number of pages of its segments.
        load: number of its last load.
        store: number of the segment as which its prompt is kept; see `NewSegment`.
        loaded: what each rank has loaded.
        reuse: what every rank has loaded.
        is_counted: its outcome is counted.
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
    """The requests of an engine that are blended, on the scheduler's side.

    Args:
        block_tokens: tokens of the engine's block.
        ranks: number of workers.
        clock: returns monotonic seconds.
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
        """Requests whose salt turned out to be used before; they read no prefix cache from the next step on."""
        self._salts: dict[bytes, None] = {}
        self._held_pages = 0
        self._loads = itertools.count(1)
        self._loading: set[RequestId] = set()
        self._stores = itertools.count(1)
        self._storing: dict[int, dict[int, BlendResult]] = {}
        """Segments that were computed: what each rank has reported of them, until all have."""
        self._disk_busy: set[int] = set()
        """Ranks that read segments from disk or write them."""
        self.orders = BlendOrders()

    def take_verdicts(self, refusals: Sequence[str | None]) -> None:
        """Takes each rank's refusal to blend, if any; see `BlendWorker.refusal`."""
        self._is_on = bool(refusals) and all(each == "" for each in refusals)

    # --- a request's life ---

    def enter(self, tracker: RequestTracker) -> None:
        """Called when a request enters the engine's queue: accepts it, or counts why not.

        A request that is not blended reads no block of the engine's prefix cache if its salt was used by a blended
        request, because that request may have left the block there.
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
        # vLLM does not let a request wait for its pages if it skips the prefix cache, as a caller may demand. Under a
        # salt of its own there is nothing to skip.
        request.skip_reading_prefix_cache = False
        # Its KV is not exact, so none of it may serve other requests.
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
        # Also remembered for a request that is refused below: its blocks are exact but have this salt.
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
        """Remembers a salt. Returns False if it was used before."""
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
        """Called when the engine looks a request up. Returns whether the request is blended, or None if it must wait;
        then the engine asks again.

        Args:
            computed_tokens: tokens that the engine has in its own prefix cache.
        """
        blended = self._live.get(request.request_id)
        if blended is None:
            return None if request.request_id in self._spoiled else False
        if computed_tokens and not request.num_preemptions:
            # Blocks of another request that used this request's own salt.
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
        """Reserves room for the request's pages, if there is any, and orders their load."""
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
        """Takes a rank's report; see `BlendPages.take_arrived`."""
        for request_id, arrival in arrived.items():
            blended = self._live.get(request_id)
            if blended is None or blended.phase is not Phase.LOADING or blended.load != arrival.load:
                continue
            blended.loaded[rank] = arrival
            if len(blended.loaded) == self._ranks:
                self._agree(blended)

    def _await_store(self, number: int) -> None:
        """Counts a segment once every rank has reported its outcome."""
        self._storing[number] = {}
        if len(self._storing) > MOST_STORES:
            del self._storing[next(iter(self._storing))]
            self._count(BlendResult.LATE)

    def take_stored(self, rank: int, stored: Mapping[int, BlendResult]) -> None:
        """Takes a rank's report; see `BlendPages.take_stored`."""
        for number, result in stored.items():
            reported = self._storing.get(number)
            if reported is None:
                continue  # a preempted prompt, computed twice
            reported[rank] = result
            if len(reported) == self._ranks:
                del self._storing[number]
                lost = [each for each in reported.values() if each is not BlendResult.STORED]
                self._count(lost[0] if lost else BlendResult.STORED)

    def take_disk_busy(self, rank: int, is_busy: bool) -> None:
        """Takes a rank's report of whether its disks have work."""
        if is_busy:
            self._disk_busy.add(rank)
        else:
            self._disk_busy.discard(rank)

    def _agree(self, blended: BlendedRequest) -> None:
        """Called when every rank has answered: only rows that all ranks have loaded are reused."""
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
        """Called in each step that computes tokens of a request, whose tracker has the step's tokens and blocks."""
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
        """Called when the engine has taken a request's blocks: its prompt is computed again."""
        if (blended := self._live.get(request_id)) is not None:
            blended.asked_s = None

    def end(self, request_id: RequestId) -> None:
        """Called when a request has ended."""
        self._spoiled.pop(request_id, None)
        if (blended := self._live.pop(request_id, None)) is not None:
            self._release(blended)

    def reset(self) -> None:
        """Called when the weights change: no live request is blended any more."""
        for blended in list(self._live.values()):
            self._give_up(blended, BlendResult.RESET)
        self.orders.forget = True

    def on_erase(self, name: str) -> None:
        """Drops all segments, because ranks do not know their namespaces."""
        self.reset()

    # --- the step ---

    def take_orders(self) -> BlendOrders | None:
        """The orders given since the last step; None if there are none."""
        for request in self._spoiled.values():
            request.skip_reading_prefix_cache = True
        self._spoiled.clear()
        if not self.orders:
            return None
        orders, self.orders = self.orders, BlendOrders()
        return orders

    @property
    def has_work(self) -> bool:
        """Whether the ranks need another step, for orders or to continue the work of their disks."""
        return bool(self.orders) or self.disk_busy

    @property
    def disk_busy(self) -> bool:
        """Whether some rank reads segments from disk or writes them."""
        return bool(self._disk_busy)

    @property
    def moves_pages(self) -> bool:
        """Whether ranks load segments, or read them from disk or write them."""
        return self.disk_busy or bool(self._loading)

    # --- ends ---

    def _give_up(self, blended: BlendedRequest, why: BlendResult) -> None:
        """Computes the request fully from now on. Its blocks are still kept out of the cache."""
        del self._live[blended.request_id]
        self._release(blended)
        self._count_once(blended, why)

    def _release(self, blended: BlendedRequest) -> None:
        """Gives the request's pages back; after a preemption they are loaded again."""
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
