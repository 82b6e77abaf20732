"""Requests wait in a queue for host slots. Shows in which order they are served, which pages they hold meanwhile, and
when they give up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from flexkv.cache.base import GroupSpec, ManagerLimits, MatchResult, Outcome, TailCandidates
from flexkv.cache.manager import LocalCacheManager
from flexkv.cache.tiers.disk.tier import DiskTraffic
from flexkv.facts.keys import Keys, Rule
from flexkv.observe import MissReason
from flexkv.transfer.graph import OpKind, TransferGraph, TransferOp
from tests.unit.cache.broken_lines import GivesRoomToHalves, KeepsWhatItHasWhileItWaits
from tests.unit.cache.disk_world import BLOCK_TOKENS, DiskWorld, chain, traffic

ASKS_AGAIN = ManagerLimits(asks_again=True)


def queued(prompts: Sequence[Keys], slots: int, **kwargs: Any) -> DiskWorld:
    """Returns a world with all prompts on disk and none in host memory. Its engine repeats its lookups."""
    kwargs.setdefault("manager_limits", ASKS_AGAIN)
    world = DiskWorld(slots=slots, places=512, **kwargs)
    for number, keys in enumerate(prompts):
        for first in range(0, len(keys), slots):
            world.store(keys[first : first + slots], f"w{number}", first=first)
            world.run()
        world.manager.end_request(f"w{number}")
        world.drop_host()
    assert len(world.tier) == sum(map(len, prompts))
    return world


def ask(world: DiskWorld, name: str, keys: Keys) -> MatchResult | None:
    """Looks a request up, as an engine does in each step. Returns None while the request waits."""
    if world.manager.still_waits(name):
        return None
    result = world.look(keys, name)
    if result.outcome is Outcome.ASK_AGAIN:
        assert result.blocks == 0
        assert world.manager.leased_pages(name) + world.manager.held_pages(name) == 0
    return None if result.reads or result.outcome is Outcome.ASK_AGAIN else result


def reads(world: DiskWorld) -> list[TransferOp]:
    return [op for op in world.take() if op.kind is OpKind.DISK_READ]


def end(world: DiskWorld, ops: Sequence[TransferOp]) -> None:
    for op in ops:
        world.end(op)


def blocker(world: DiskWorld, pages: int) -> None:
    """Leases `pages` host slots for another request."""
    keys = chain(pages, seed=99)
    world.store(keys, "b")
    world.run()
    assert world.match(keys, "blocker").blocks == pages


class Engine:
    """Runs queued prompts as vLLM does. Each step looks up waiting prompts, and admits at most `most` of them.

    Attributes:
        loaded: how many blocks of each prompt were loaded, by the prompt's name.
    """

    def __init__(self, world: DiskWorld, prompts: Sequence[Keys], most: int) -> None:
        self.world, self.most = world, most
        self.waiting = {f"p{number}": keys for number, keys in enumerate(prompts)}
        self.loaded: dict[str, int] = {}

    def step(self) -> None:
        loads: list[tuple[str, TransferGraph]] = []
        for name, keys in list(self.waiting.items()):
            if len(loads) == self.most:
                break
            result = ask(self.world, name, keys)
            if result is None:
                continue
            del self.waiting[name]
            self.loaded[name] = result.blocks
            if result.blocks:
                loads.append((name, self.world.begin(list(range(result.blocks)), name)))
        end(self.world, reads(self.world))
        for name, graph in loads:
            self.world.load_ended(graph)
            self.world.manager.end_request(name)
        self.world.now_s += 0.1

    def run(self, steps: int = 400) -> list[int]:
        while self.waiting and steps:
            self.step()
            steps -= 1
        return [self.loaded.get(f"p{number}", 0) for number in range(len(self.loaded) + len(self.waiting))]


PROMPTS = [chain(4, seed) for seed in range(16)]


@pytest.mark.parametrize("most", [1, 4, 16])
def test_all_prompts_of_a_burst_are_served_though_few_fit(most: int) -> None:
    world = queued(PROMPTS, slots=18)
    for number, keys in enumerate(PROMPTS):
        world.manager.prefetch(f"p{number}", [keys])
    assert Engine(world, PROMPTS, most).run() == [4] * 16
    assert (world.tier.counts.no_room, world.tier.counts.no_room_pages, world.tier.counts.late) == (0, 0, 0)


def test_control_a_burst_is_computed_in_part_where_nobody_waits() -> None:
    world = queued(PROMPTS, slots=18, manager_limits=ManagerLimits())
    loaded = Engine(world, PROMPTS, 4).run()
    assert sum(loaded) < 64
    assert world.tier.counts.no_room > 0
    assert world.tier.counts.no_room_pages == 64 - sum(loaded)


def test_prompts_of_all_sizes_are_served() -> None:
    prompts = [chain(2 + number % 6, seed=50 + number) for number in range(12)]
    for limits in (traffic(), traffic(streams=True)):
        world = queued(prompts, slots=8, limits=limits)
        assert Engine(world, prompts, 4).run() == list(map(len, prompts))


def test_two_prompts_of_which_there_is_room_for_a_half_each_do_not_wait_for_each_other() -> None:
    """If two prompts need slots and each could get only half of them, they do not wait for each other for ever. Each
    prompt has seven pages, three of them in host memory. There are too few slots for these six pages and the rest of
    one prompt.
    """
    a, b = chain(7, 1), chain(7, 2)
    world = queued([a, b], slots=8)
    for keys in (a, b):
        assert world.hits(keys[:3], "half") == 3
    blocker(world, 2)
    assert [ask(world, name, keys) for name, keys in (("a", a), ("b", b))] == [None, None]
    world.manager.release("blocker")
    engine = Engine(world, [a, b], 2)
    engine.waiting = {"a": a, "b": b}
    engine.run()
    assert engine.loaded == {"a": 7, "b": 7}


@pytest.mark.parametrize(
    ("manager_class", "served"),
    [(GivesRoomToHalves, False), (LocalCacheManager, True)],
    ids=["halves", "whole"],
)
def test_control_a_prompt_that_took_the_room_for_a_half_is_computed(
    manager_class: type[LocalCacheManager], served: bool
) -> None:
    prompts = [chain(6, 1), chain(6, 2)]
    world = queued(prompts, slots=8, manager_class=manager_class)
    blocker(world, 4)
    engine = Engine(world, prompts, 2)
    engine.run(3)
    world.manager.release("blocker")
    engine.run()
    assert (engine.loaded == {"p0": 6, "p1": 6}) == served


def test_control_two_halves_that_are_kept_wait_for_each_other() -> None:
    a, b = chain(7, 1), chain(7, 2)
    world = queued([a, b], slots=8, manager_class=KeepsWhatItHasWhileItWaits)
    for keys in (a, b):
        assert world.hits(keys[:3], "half") == 3
    world.store(chain(2, 9), "c")
    assert world.manager.match("c", [chain(2, 9)], 0).blocks == 2
    for name, keys in (("a", a), ("b", b)):
        assert world.manager.match(name, [keys], 0).outcome is Outcome.ASK_AGAIN
    world.manager.release("c")
    for _ in range(4):
        assert all(
            world.manager.match(name, [keys], 0).outcome is Outcome.ASK_AGAIN
            for name, keys in (("a", a), ("b", b))
        )


def test_what_was_prefetched_of_a_prompt_that_has_to_wait_is_in_nobodys_way() -> None:
    a, b = chain(6, 1), chain(7, 2)
    world = queued([a, b], slots=8)
    assert world.manager.prefetch("b", [b]) == 1
    end(world, reads(world))
    assert world.manager.held_pages("b") == 2
    engine = Engine(world, [a, b], 2)
    assert engine.run() == [6, 7]


def test_what_another_prompt_has_fetched_is_not_evicted_before_its_engine_has_taken_it() -> None:
    a, b = chain(6, 1), chain(6, 2)
    world = queued([a, b], slots=8)
    assert ask(world, "a", a) is None
    assert ask(world, "b", b) is None
    end(world, reads(world))
    for _ in range(3):
        assert ask(world, "b", b) is None, "the pages are kept for the other one"
        assert reads(world) == []
    result = ask(world, "a", a)
    assert result is not None
    assert result.blocks == 6
    assert ask(world, "b", b) is None, "they are promised"
    graph = world.begin(list(range(6)), "a")
    assert ask(world, "b", b) is None, "they are being loaded"
    assert reads(world) == []
    world.load_ended(graph)
    assert ask(world, "b", b) is None
    assert [op.pages for op in reads(world)] == [6]


def test_a_prompt_behind_an_aborted_one_has_its_turn() -> None:
    a, b = chain(8, 1), chain(3, 2)
    world = queued([a, b], slots=8)
    blocker(world, 4)
    for _ in range(3):
        assert (ask(world, "a", a), ask(world, "b", b)) == (None, None)
        assert reads(world) == [], "a small prompt does not pass a large one"
    world.manager.end_request("a")
    assert ask(world, "b", b) is None
    assert [op.pages for op in reads(world)] == [3]


def test_a_small_prompt_passes_one_that_the_engine_does_not_ask_for() -> None:
    a, b = chain(8, 1), chain(3, 2)
    world = queued([a, b], slots=8)
    blocker(world, 4)
    for name, keys in (("a", a), ("b", b), ("b", b), ("a", a), ("b", b), ("b", b)):
        assert ask(world, name, keys) is None
        assert reads(world) == []
    assert ask(world, "b", b) is None, "asked for three times in a row"
    assert [op.pages for op in reads(world)] == [3]


def test_who_waits_is_served_in_the_order_of_the_first_question() -> None:
    prompts = [chain(6, seed) for seed in range(4)]
    world = queued(prompts, slots=8)
    blocker(world, 4)
    names = list("abcd")
    for name, keys in zip(names, prompts, strict=True):
        assert ask(world, name, keys) is None
    world.manager.release("blocker")
    order = []
    while names:
        for name in reversed(names):
            if ask(world, name, prompts["abcd".index(name)]) is not None:
                order.append(name)
                names.remove(name)
                world.load_ended(world.begin(list(range(6)), name))
                break
        end(world, reads(world))
    assert order == list("abcd")


def waited_in_vain(wait_s: float, **kwargs: Any) -> tuple[DiskWorld, Keys]:
    """Returns a world in which request "a" waits for host slots that another request's lease never frees."""
    keys = chain(6, 1)
    world = queued([keys], slots=8, limits=traffic(wait_s=wait_s), **kwargs)
    blocker(world, 4)
    assert ask(world, "a", keys) is None
    return world, keys


def test_a_lease_that_never_ends_is_waited_for_as_long_as_the_disk_and_counted() -> None:
    world, keys = waited_in_vain(wait_s=5.0)
    steps = 0
    while (result := ask(world, "a", keys)) is None:
        world.now_s += 0.5
        steps += 1
        assert world.tier.counts.no_room == 0
    assert 10 <= steps <= 12
    assert (result.blocks, result.outcome, result.miss) == (0, Outcome.MISS, MissReason.NO_ROOM)
    assert (world.tier.counts.no_room, world.tier.counts.no_room_pages) == (1, 6)
    world.manager.release("a")
    again = ask(world, "a", keys)
    assert again is not None, "it does not wait again"
    assert again.blocks == 0
    assert world.tier.counts.no_room == 1, "counted once"
    world.manager.end_request("a")
    assert ask(world, "a", keys) is None, "another request of that name waits anew"


def test_control_a_lease_that_ends_in_time_is_not_counted() -> None:
    world, keys = waited_in_vain(wait_s=5.0)
    world.now_s += 0.5
    world.manager.release("blocker")
    assert ask(world, "a", keys) is None
    end(world, reads(world))
    result = ask(world, "a", keys)
    assert result is not None
    assert result.blocks == 6
    assert world.tier.counts.no_room == 0


def test_time_in_which_the_engine_does_not_ask_is_no_wait() -> None:
    world, keys = waited_in_vain(wait_s=5.0)
    for _ in range(4):
        world.now_s += 100.0
        assert ask(world, "a", keys) is None
    world.manager.expire()
    assert world.manager.leased_pages("blocker") == 0
    assert ask(world, "a", keys) is None
    assert [op.pages for op in reads(world)] == [6]


def test_room_that_came_at_the_end_of_the_wait_is_taken() -> None:
    world, keys = waited_in_vain(wait_s=1.0)
    world.now_s += 2.0
    world.manager.release("blocker")
    assert ask(world, "a", keys) is None
    assert [op.pages for op in reads(world)] == [6]
    assert world.tier.counts.no_room == 0


@pytest.mark.parametrize(("token_s", "waits"), [(0.001, False), (10.0, True)])
def test_a_prompt_that_is_computed_soon_does_not_wait_for_longer(token_s: float, waits: bool) -> None:
    keys = chain(6, 1)
    world = queued([keys], slots=8)
    blocker(world, 4)
    for number in range(8):
        world.manager.cost.compute.see(16 + number, token_s * (16 + number), world.now_s)
    assert ask(world, "a", keys) is None
    world.now_s += 1.0
    assert (ask(world, "a", keys) is None) == waits


def test_a_prompt_larger_than_host_memory_takes_what_it_can_at_once_and_is_counted() -> None:
    keys = chain(12, 1)
    world = queued([keys], slots=8)
    assert ask(world, "a", keys) is None
    assert world.look(keys, "a").outcome is not Outcome.ASK_AGAIN
    end(world, reads(world))
    for _ in range(3):
        result = ask(world, "a", keys)
        assert result is not None
        assert result.blocks == 8
        assert result.miss is MissReason.NO_ROOM
    assert (world.tier.counts.no_room, world.tier.counts.no_room_pages) == (1, 4)


def test_a_prompt_larger_than_host_memory_takes_nothing_that_others_wait_for() -> None:
    large, small = chain(12, 1), chain(6, 2)
    world = queued([large, small], slots=8)
    blocker(world, 4)
    assert ask(world, "small", small) is None
    result = ask(world, "large", large)
    assert result is not None
    assert (result.blocks, reads(world)) == (0, [])
    assert (world.tier.counts.no_room, world.tier.counts.no_room_pages) == (1, 12)


def test_what_is_there_is_promised_whoever_waits() -> None:
    large, there = chain(6, 1), chain(2, 2)
    world = queued([large], slots=8)
    world.store(there, "w")
    world.run()
    blocker(world, 4)
    assert ask(world, "large", large) is None
    result = ask(world, "r", there)
    assert result is not None
    assert result.blocks == 2


def test_pages_on_their_way_for_another_are_joined_whoever_waits() -> None:
    shared, large = chain(4, 1), chain(6, 2)
    world = queued([shared, large], slots=8)
    assert [ask(world, name, keys) for name, keys in (("a", shared), ("l", large), ("b", shared))] == [
        None
    ] * 3
    end(world, reads(world))
    for name in "ab":
        result = ask(world, name, shared)
        assert result is not None
        assert result.blocks == 4


def test_prefetches_leave_the_room_to_those_who_wait() -> None:
    large, other = chain(6, 1), chain(4, 2)
    world = queued([large, other], slots=8)
    blocker(world, 4)
    assert ask(world, "large", large) is None
    assert world.manager.prefetch("other", [other]) == 0
    world.manager.end_request("large")
    assert world.manager.prefetch("other", [other]) == 1


@pytest.mark.parametrize("limits", [traffic(fetch_pages=6), traffic(fetch_ops=1)], ids=["pages", "ops"])
def test_a_place_among_the_reads_in_flight_is_waited_for_too(limits: DiskTraffic) -> None:
    a, b = chain(4, 1), chain(4, 2)
    world = queued([a, b], slots=16, limits=limits)
    assert (ask(world, "a", a), ask(world, "b", b)) == (None, None)
    first = reads(world)
    assert [op.pages for op in first] == [4]
    end(world, first)
    assert ask(world, "b", b) is None
    assert [op.pages for op in reads(world)] == [4]


def test_more_than_may_be_read_at_once_is_read_in_parts() -> None:
    keys = chain(6, 1)
    world = queued([keys], slots=16, limits=traffic(fetch_pages=4))
    assert ask(world, "a", keys) is None
    assert [op.pages for op in world.lane.ops.values()] or [op.pages for op in reads(world)] == [4]
    end(world, list(world.lane.ops.values()))
    assert ask(world, "a", keys) is None
    end(world, reads(world))
    result = ask(world, "a", keys)
    assert result is not None
    assert result.blocks == 6
    assert world.tier.counts.no_room == 0


def test_streamed_prompts_wait_for_room_and_are_promised_whole() -> None:
    keys = chain(6, 1)
    world = queued([keys], slots=8, limits=traffic(streams=True))
    blocker(world, 4)
    assert ask(world, "a", keys) is None
    world.manager.release("blocker")
    result = ask(world, "a", keys)
    assert result is not None
    assert (result.blocks, world.manager.leased_pages("a")) == (6, 6)


@pytest.mark.parametrize("rule", [(Rule.FULL, 0), (Rule.WINDOW, 2)])
def test_groups_have_room_together_or_wait(rule: tuple[Rule, int]) -> None:
    groups = (GroupSpec(BLOCK_TOKENS, 8), GroupSpec(BLOCK_TOKENS, 8, *rule))
    world = DiskWorld(groups=groups, manager_limits=ASKS_AGAIN)
    keys = [chain(6, 1), chain(6, 2)]
    for group, of_group in enumerate(keys):
        world.store(of_group, "w", group=group)
        world.run()
    world.manager.end_request("w")
    world.drop_host()
    # Another request has leased seven of the second group's eight slots, so only the first group has enough slots.
    others = chain(7, 3)
    world.store(others, "o", group=1)
    world.run()
    entries = world.manager.hub.index.find(1, others)
    world.manager.hub.index.pin(entries)
    assert world.manager.match("a", keys, 0).outcome is Outcome.ASK_AGAIN
    assert world.manager.still_waits("a")
    assert world.take() == []
    world.manager.hub.index.unpin(entries)
    assert not world.manager.still_waits("a")
    assert world.manager.match("a", keys, 0).reads == 2
    world.run()
    assert world.manager.match("a", keys, 0).blocks == 6


def test_a_tail_without_a_slot_is_counted_and_keeps_nobody_waiting() -> None:
    keys, tail = chain(6, 1), chain(1, 5)
    world = queued([keys], slots=6)
    world.store(tail, "t", first=6, tokens=2)
    world.run()
    world.drop_host()
    assert world.hits(keys) == 6
    candidates = TailCandidates(tail, np.array([2], np.int32), 6)
    result = world.manager.match("r", [keys], 0, [candidates])
    assert (result.blocks, result.tail_tokens, result.reads, result.outcome is Outcome.ASK_AGAIN) == (
        6,
        0,
        0,
        False,
    )
    assert (world.tier.counts.no_room, world.tier.counts.no_room_pages) == (1, 1)


def test_a_reset_ends_the_line() -> None:
    world, keys = waited_in_vain(wait_s=30.0)
    world.manager.reset()
    assert not world.manager.still_waits("a")
    result = ask(world, "a", keys)
    assert result is not None
    assert result.blocks == 0


def test_a_disk_that_goes_ends_the_wait_for_it() -> None:
    world, keys = waited_in_vain(wait_s=30.0)
    world.tier.go_down("broken on purpose")
    result = ask(world, "a", keys)
    assert result is not None
    assert result.blocks == 0


def test_without_an_engine_that_asks_again_room_is_taken_as_far_as_it_goes() -> None:
    keys = chain(6, 1)
    world = queued([keys], slots=8, manager_limits=ManagerLimits())
    blocker(world, 4)
    result = world.look(keys, "a")
    assert (result.reads, result.outcome) == (1, Outcome.COMING)
    assert not world.manager.promises.line._without
    world.run()
    assert world.match(keys, "a").blocks == 4
    assert (world.tier.counts.no_room, world.tier.counts.no_room_pages) == (1, 2)
    world.manager.release("a")
    assert not world.manager.promises.line._without


def test_the_line_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexkv.cache.promise.room_line.MAX_IN_LINE", 2)
    prompts = [chain(6, seed) for seed in range(3)]
    world = queued(prompts, slots=8)
    blocker(world, 4)
    answers = [ask(world, name, keys) for name, keys in zip("abc", prompts, strict=True)]
    assert answers[:2] == [None, None]
    assert answers[2] is not None
    assert answers[2].blocks == 0


def test_what_is_in_line_costs_no_lookup() -> None:
    world, keys = waited_in_vain(wait_s=30.0)
    lookups = world.manager.stats().lookups
    for _ in range(20):
        assert ask(world, "a", keys) is None
    assert world.manager.stats().lookups == lookups


def test_a_plan_that_breaks_off_leaves_the_line_as_it_was() -> None:
    world, keys = waited_in_vain(wait_s=30.0)
    promises = world.manager.promises
    give_up = promises._give_up

    def broken(*args: Any) -> None:
        raise MemoryError("on purpose")

    promises._give_up = broken  # type: ignore[assignment,method-assign]
    with pytest.raises(MemoryError):
        world.manager.match("a", [keys], 0)
    world.manager.check_integrity()
    promises._give_up = give_up  # type: ignore[method-assign]
    world.manager.release("blocker")
    assert ask(world, "a", keys) is None
    assert [op.pages for op in reads(world)] == [6]


def test_host_memory_that_is_yet_to_come_up_is_waited_for() -> None:
    keys = chain(6, 1)

    class ComesUpLater(LocalCacheManager):
        def grow(self, group: int, slots: int) -> None:
            super().grow(group, min(slots, 4))

    world = DiskWorld(places=512, manager_limits=ASKS_AGAIN, manager_class=ComesUpLater)
    for first in (0, 3):
        world.store(keys[first : first + 3], "w", first=first)
        world.run()
    world.manager.end_request("w")
    world.drop_host()
    assert ask(world, "a", keys) is None
    assert reads(world) == []
    world.manager.hub.grow(0, 8)
    assert ask(world, "a", keys) is None
    assert [op.pages for op in reads(world)] == [6]
