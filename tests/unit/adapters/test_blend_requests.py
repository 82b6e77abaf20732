"""Tests the scheduler's side of blending: which requests are blended, how long they wait, and when their loads and
stores are ordered.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flexkv.adapters.vllm.blend import requests as module
from flexkv.adapters.vllm.blend.orders import Arrival, NewSegment, Reuse
from flexkv.adapters.vllm.blend.requests import BlendRequests
from flexkv.adapters.vllm.blend.spec import BlendSpec
from flexkv.cache.stores.kept_out import KeptOut
from flexkv.config import BlendConfig
from flexkv.facts.blend_ask import BlendAsk
from flexkv.facts.request_settings import NO_SETTINGS, RequestSettings
from flexkv.observe import BlendResult, Counters

BLOCK = 4
PROMPT = list(range(100, 164))
SPANS = ((4, 24), (30, 50))
SEPARATOR = np.array([9, 9])


class World:
    """A scheduler's side with a clock that tests set, and stand-ins for vLLM's requests."""

    def __init__(self, ranks: int = 1, most_pages: int = 8) -> None:
        self.now_s = 0.0
        self.counters = Counters()
        settings = BlendConfig(enabled=True, min_tokens=8)
        self.side = BlendRequests(
            BlendSpec(settings, (SEPARATOR,), most_pages, 5.0),
            BLOCK,
            ranks,
            self.counters,
            lambda: self.now_s,
        )
        self.side.take_verdicts([""] * ranks)
        self._made = 0

    def enter(
        self,
        ask: BlendAsk | None = None,
        salt: str | None = "",
        ttl_s: int | None = None,
        **fields: Any,
    ) -> Any:
        """Makes a request that enters the engine's queue. If `salt` is empty, the request gets a salt of its own."""
        self._made += 1
        request = SimpleNamespace(
            request_id=f"r{self._made}",
            cache_salt=f"flexkv-blend:{self._made}" if salt == "" else salt,
            prompt_token_ids=PROMPT,
            prompt_embeds=None,
            has_encoder_inputs=False,
            lora_request=None,
            resumable=False,
            num_preemptions=0,
            skip_reading_prefix_cache=False,
            sampling_params=SimpleNamespace(prompt_logprobs=None),
        )
        vars(request).update(fields)
        tracker: Any = SimpleNamespace(
            request=request,
            request_id=request.request_id,
            asked=RequestSettings(blend=ask, ttl_s=ttl_s),
            settings=NO_SETTINGS,
            kept_out=KeptOut(),
            first_namespace="",
            tables=[SimpleNamespace(ids=list(range(10, 30)))],
            computed=0,
            step_end=len(PROMPT),
        )
        self.side.enter(tracker)
        return tracker

    def blended(self, **fields: Any) -> Any:
        return self.enter(BlendAsk(SPANS), **fields)

    def match(self, tracker: Any, computed: int = 0) -> bool | None:
        return self.side.match(tracker.request, computed)

    def orders(self) -> Any:
        return self.side.take_orders()

    @property
    def results(self) -> dict[str, float]:
        return dict(self.counters.data.get("flexkv_blend_requests_total", {}))


@pytest.fixture
def world() -> World:
    return World()


def make_ready(world: World, tracker: Any, tokens: tuple[int, ...] = (20, 20)) -> None:
    assert world.match(tracker) is None
    (order,) = world.orders().load
    world.side.take_arrived(0, {tracker.request_id: Arrival(order.load, tokens)})
    assert world.match(tracker) is True


def compute(world: World, tracker: Any) -> None:
    """Lets the engine compute the complete prompt in one step, and the first generated token in the next step."""
    world.side.chunk(tracker)
    tracker.computed, tracker.step_end = len(PROMPT), len(PROMPT) + 1
    world.side.chunk(tracker)


def test_a_request_waits_until_its_segments_are_there(world: World) -> None:
    tracker = world.blended()
    assert world.match(tracker) is None
    (order,) = world.orders().load
    assert [segment.tolist() for segment in order.segments] == [PROMPT[4:24], PROMPT[30:50]]
    assert world.match(tracker) is None
    world.side.take_arrived(0, {tracker.request_id: Arrival(1, (20, 16))})
    assert world.match(tracker) is True
    assert world.results == {}
    tracker.computed, tracker.step_end = 8, 40
    world.side.chunk(tracker)
    (chunk,) = world.orders().chunks
    assert chunk.asks == Reuse(((4, 20), (30, 16)), 0.15)
    assert chunk.slots.tolist() == list(range(48, 80)), "blocks 12 to 19"
    assert world.results == {"blended": 1}


def test_nothing_of_it_is_stored_or_loaded(world: World) -> None:
    tracker = world.blended()
    assert (tracker.settings.skip_save, tracker.settings.skip_load) == (True, True)
    assert tracker.kept_out.asked
    assert not tracker.request.skip_reading_prefix_cache, "vLLM would not wait for its pages"


def test_only_what_every_rank_has_is_reused() -> None:
    world = World(ranks=2)
    tracker = world.blended()
    world.match(tracker)
    world.orders()
    world.side.take_arrived(0, {tracker.request_id: Arrival(1, (20, 16))})
    assert world.match(tracker) is None
    world.side.take_arrived(1, {tracker.request_id: Arrival(1, (0, 20))})
    assert world.match(tracker) is True
    world.side.chunk(tracker)
    assert world.orders().chunks[0].asks.spans == ((4, 0), (30, 16))


def test_a_request_without_a_cached_segment_is_computed(world: World) -> None:
    tracker = world.blended()
    world.match(tracker)
    world.orders()
    world.side.take_arrived(0, {tracker.request_id: Arrival(1, (0, 0))})
    assert world.match(tracker) is False
    assert world.orders().release == [tracker.request_id]
    assert world.results == {"miss": 1}


@pytest.mark.parametrize("missing", [BlendResult.LATE, BlendResult.LOST])
def test_a_request_whose_cached_segments_did_not_come_is_counted_so(missing: BlendResult) -> None:
    world = World(ranks=2)
    tracker = world.blended()
    world.match(tracker)
    world.orders()
    world.side.take_arrived(0, {tracker.request_id: Arrival(1, (20, 0))})
    world.side.take_arrived(1, {tracker.request_id: Arrival(1, (0, 0), missing)})
    assert world.match(tracker) is False
    assert world.results == {missing.result: 1}


def test_ranks_that_write_to_disk_keep_the_engine_at_work() -> None:
    world = World(ranks=2)
    assert not world.side.has_work
    world.side.take_disk_busy(0, True)
    world.side.take_disk_busy(1, True)
    world.side.take_disk_busy(0, False)
    assert world.side.has_work
    world.side.take_disk_busy(1, False)
    assert not world.side.has_work


def test_pages_that_come_too_late_are_not_waited_for(world: World) -> None:
    tracker = world.blended()
    world.match(tracker)
    world.now_s = 5.1
    assert world.match(tracker) is False
    assert world.orders() is None, "the load was not sent yet, so nothing is to be released"
    assert world.results == {"late": 1}
    world.side.take_arrived(0, {tracker.request_id: Arrival(1, (20, 20))})
    assert world.match(tracker) is False


def test_requests_wait_for_room_in_turn() -> None:
    world = World(most_pages=5)
    first, second = world.blended(), world.blended()
    make_ready(world, first)
    assert world.match(second) is None
    assert world.orders() is None
    world.side.end(first.request_id)
    assert world.match(second) is None
    orders = world.orders()
    assert (orders.release, [order.request for order in orders.load]) == (["r1"], ["r2"])


def test_pages_are_given_back_after_the_prompt_and_loaded_again_after_a_preemption(world: World) -> None:
    tracker = world.blended()
    make_ready(world, tracker)
    compute(world, tracker)
    assert world.orders().release == [tracker.request_id]
    world.side.preempted(tracker.request_id)
    tracker.request.num_preemptions = 1
    world.now_s = 100.0
    assert world.match(tracker, 16) is None
    (order,) = world.orders().load
    world.side.take_arrived(0, {tracker.request_id: Arrival(order.load, (20, 20))})
    assert world.match(tracker, 16) is True
    assert world.results == {"blended": 1}


def test_a_segment_is_captured_whole(world: World) -> None:
    tracker = world.enter(BlendAsk(store=True))
    assert world.match(tracker) is True
    tracker.step_end = 40
    world.side.chunk(tracker)
    assert world.results == {}
    tracker.computed, tracker.step_end = 40, len(PROMPT)
    world.side.chunk(tracker)
    chunk = world.orders().chunks[1]
    assert isinstance(chunk.asks, NewSegment)
    assert chunk.asks.tokens.tolist() == PROMPT


@pytest.mark.parametrize(
    ("second", "counted"),
    [(BlendResult.STORED, "stored"), (BlendResult.NO_ROOM, "no_room"), (BlendResult.LATE, "late")],
)
def test_a_segment_is_stored_if_every_rank_keeps_it(world: World, second: BlendResult, counted: str) -> None:
    world.side._ranks = 2
    tracker = world.enter(BlendAsk(store=True))
    assert world.match(tracker) is True
    compute(world, tracker)
    number = world.orders().chunks[0].asks.number
    world.side.end(tracker.request_id)
    world.side.take_stored(0, {number: BlendResult.STORED})
    assert world.results == {}, "the other rank has not kept it yet"
    world.side.take_stored(1, {number: second})
    assert world.results == {counted: 1}
    world.side.take_stored(1, {number: second})
    assert world.results == {counted: 1}, "of a preempted prompt, which is computed twice"


def test_segments_of_which_nobody_reports_do_not_pile_up(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_STORES", 2)
    for number in range(3):
        tracker = world.enter(
            BlendAsk(store=True), request_id=f"r{number}", cache_salt=f"flexkv-blend:{number}"
        )
        assert world.match(tracker) is True
        compute(world, tracker)
        world.side.end(tracker.request_id)
    assert world.results == {"late": 1}
    assert len(world.side._storing) == 2


@pytest.mark.parametrize(
    ("result", "ask", "fields"),
    [
        ("salt", BlendAsk(SPANS), {"salt": None}),
        ("salt", BlendAsk(SPANS), {"salt": "another"}),
        ("segments", BlendAsk(((4, 24), (20, 30))), {}),
        ("segments", BlendAsk(((4, 65),)), {}),
        ("segments", BlendAsk(((-1, 20),)), {}),
        ("segments", BlendAsk(((20, 20),)), {}),
        ("no_segments", BlendAsk(()), {}),
        ("no_segments", BlendAsk(), {}),
        ("short", BlendAsk(((4, 11),)), {}),
        ("inputs", BlendAsk(SPANS), {"has_encoder_inputs": True}),
        ("inputs", BlendAsk(SPANS), {"prompt_embeds": "some"}),
        ("lora", BlendAsk(SPANS), {"lora_request": "one"}),
        ("pooling", BlendAsk(SPANS), {"sampling_params": None}),
        ("prompt_logprobs", BlendAsk(SPANS), {"sampling_params": SimpleNamespace(prompt_logprobs=1)}),
        (
            "prompt_logprobs",
            BlendAsk(SPANS),
            {"sampling_params": SimpleNamespace(prompt_logprobs=None, prompt_logprob_token_ids=[[7]])},
        ),
        ("session", BlendAsk(SPANS), {"resumable": True}),
        ("time_to_live", BlendAsk(store=True), {"ttl_s": 60}),
    ],
)
def test_what_cannot_be_blended_is_computed_and_counted(
    world: World, result: str, ask: BlendAsk, fields: dict[str, Any]
) -> None:
    tracker = world.enter(ask, **fields)
    assert world.match(tracker) is False
    assert world.results == {result: 1}
    assert world.orders() is None
    assert tracker.settings is NO_SETTINGS
    salted = (tracker.request.cache_salt or "").startswith("flexkv-blend:")
    assert tracker.request.skip_reading_prefix_cache is salted


def test_what_is_stored_already_may_be_blended_into_a_request_with_a_time_to_live(world: World) -> None:
    make_ready(world, world.enter(BlendAsk(SPANS), ttl_s=60))


def test_without_a_rank_that_can_blend_nothing_is(world: World) -> None:
    for verdicts in ([], ["", "its test failed"], [None]):
        world.side.take_verdicts(verdicts)
        assert world.match(world.blended()) is False
    assert world.results == {"off": 3}


def test_a_salt_serves_once_in_a_table_of_bounded_size(monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    monkeypatch.setattr(module, "MOST_SALTS", 2)
    one, two, three = (f"flexkv-blend:{name}" for name in ("a", "b", "c"))
    for salt in (one, one, two, three, one):
        world.blended(salt=salt)
    assert world.results == {"used_salt": 1}
    assert len(world.side._salts) == 2


def test_a_hit_under_a_salt_that_was_forgotten_is_not_used(world: World) -> None:
    """If vLLM's own cache has a hit under a salt that flexkv no longer remembers, the request does not use it. vLLM
    finds the hit before the connector can forbid it, so the request waits one step.
    """
    tracker = world.blended()
    assert world.match(tracker, computed=16) is None
    assert world.match(tracker, computed=16) is None
    assert not tracker.request.skip_reading_prefix_cache
    world.orders()
    assert tracker.request.skip_reading_prefix_cache
    assert world.match(tracker) is False
    assert world.results == {"used_salt": 1}


def test_a_hit_after_its_segments_came_is_not_used(world: World) -> None:
    """A request does not use a hit in vLLM's own cache that appears while its segments are being loaded. Another
    request with the same salt has started in the meantime, so vLLM has blocks for that salt.
    """
    tracker = world.blended()
    make_ready(world, tracker)
    assert world.match(tracker, computed=16) is None
    assert world.results == {"used_salt": 1}
    assert world.orders().release == [tracker.request_id]


def test_a_request_counts_as_blended_with_its_first_rows_that_segments_cover(world: World) -> None:
    tracker = world.blended()
    make_ready(world, tracker)
    counted = []
    for tracker.computed, tracker.step_end in ((0, 4), (4, 8), (8, 64)):
        world.side.chunk(tracker)
        counted.append(dict(world.results))
    assert counted == [{}, {"blended": 1}, {"blended": 1}]


def test_a_late_arrival_for_a_request_whose_id_was_used_again_is_dropped(world: World) -> None:
    first = world.blended()
    world.match(first)
    (old,) = world.orders().load
    world.side.end(first.request_id)
    again = world.enter(BlendAsk(SPANS[:1]), request_id=first.request_id)
    assert world.match(again) is None
    (new,) = world.orders().load
    world.side.take_arrived(0, {first.request_id: Arrival(old.load, (20, 20))})
    assert world.match(again) is None
    world.side.take_arrived(0, {first.request_id: Arrival(new.load, (20,))})
    assert world.match(again) is True


def test_an_idle_step_may_wait_while_segments_are_loaded() -> None:
    world = World(most_pages=12)
    tracker = world.blended()
    assert not world.side.moves_pages
    make_ready(world, tracker)
    assert not world.side.moves_pages
    waiting, given_up = world.blended(), world.blended()
    for each in (waiting, given_up):
        world.match(each)
    world.orders()
    assert world.side.moves_pages
    assert not world.side.has_work, "the engine steps for its requests"
    world.side.take_arrived(0, {waiting.request_id: Arrival(2, (20, 20))})
    assert world.side.moves_pages
    world.side.end(given_up.request_id)
    assert not world.side.moves_pages


def test_whoever_uses_such_a_salt_reads_no_prefix_cache(world: World) -> None:
    assert world.enter(None, salt="flexkv-blend:x").request.skip_reading_prefix_cache
    assert not world.enter(None, salt="another").request.skip_reading_prefix_cache
    assert world.results == {}


def test_separators_give_the_longest_pieces(world: World) -> None:
    prompt = [*range(20, 40), 9, 9, *range(40, 70), 9, 9, 71]
    tracker = world.enter(BlendAsk(), prompt_token_ids=prompt)
    world.match(tracker)
    (order,) = world.orders().load
    assert [len(segment) for segment in order.segments] == [20, 30, 1]


def test_an_erased_namespace_drops_all_segments(world: World) -> None:
    ready = world.blended()
    make_ready(world, ready)
    world.side.on_erase("a namespace")
    assert world.orders().forget
    assert world.match(ready) is False


def test_a_reset_ends_all_blending(world: World) -> None:
    running, ready, waiting = world.blended(), world.blended(), world.blended()
    for each in (running, ready):
        make_ready(world, each)
    world.side.chunk(running)
    world.match(waiting)
    world.side.reset()
    orders = world.orders()
    assert orders.forget
    assert orders.release == [running.request_id, ready.request_id]
    for each in (running, ready, waiting):
        assert world.match(each) is False
    assert world.results == {"blended": 1, "reset": 2}
