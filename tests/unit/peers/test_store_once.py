"""With `peers.store: once`, units together keep one copy of each page. If a unit that keeps pages ends, another unit
takes over those pages that it can still read.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flexkv.c_ext import PeerDirectory
from flexkv.cache.moves.store_once import StoreOnce
from flexkv.cache.tiers.routes import StoreOffer
from flexkv.cache.tiers.running_peers import keeper as keeper_module
from flexkv.cache.tiers.running_peers import tier as tier_module
from flexkv.cache.tiers.running_peers.keeper import PeerKeeper
from flexkv.cache.tiers.running_peers.tier import LivePeerTier
from flexkv.peers import share as share_module
from flexkv.peers.share import OnceCounts
from tests.unit.adapters.mini_engine import MiniEngine
from tests.unit.adapters.vllm_objects import make_request
from tests.unit.peers.live_engines import (
    DEADLINE_S,
    PROMPT,
    Make,
    knows,
    live_tiers,
    settings_of,
    share_of,
    wait_for,
)

PAGES = 5
"""Number of complete blocks in PROMPT."""


def once(folder: Path, **more: object) -> dict[str, Any]:
    return settings_of(folder) | {"peers.store": "once"} | more


def counts(engine: MiniEngine) -> OnceCounts:
    found = share_of(engine).once
    assert found is not None
    return found


def host_pages(*engines: MiniEngine) -> int:
    return sum(engine.unit.manager.cached_blocks() for engine in engines)


def compute(engine: MiniEngine, name: str = "computes") -> None:
    """Makes the engine compute the prompt without loading pages from peers."""
    assert engine.run(make_request(PROMPT, name, extra_args={"flexkv.tiers": ["host"]})) == 0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.mark.parametrize("with_disks", [False, True])
@pytest.mark.parametrize(("store", "copies"), [("once", 1), ("own", 8)])
def test_eight_units_with_one_prompt_keep_its_bytes_once(
    make_engine: Make, tmp_path: Path, store: str, copies: int, with_disks: bool
) -> None:
    """Eight units that share a prompt together keep one copy of its pages, although some units load the prompt and
    others compute it. With `own`, the control, each unit keeps a copy."""

    def start(name: str) -> MiniEngine:
        more: dict[str, object] = {"peers.store": store}
        if with_disks:
            more |= {"disk.folders": str(tmp_path / name), "disk.bytes_per_folder": 4 << 20}
        return make_engine(**settings_of(tmp_path / "run") | more)

    units = [start(str(number)) for number in range(8)]
    units[0].run(make_request(PROMPT, "first"))
    for number, unit in enumerate(units[1:]):
        wait_for(lambda unit=unit: bool(known_of(unit, PROMPT).all()))  # type: ignore[misc]
        if number % 2:
            compute(unit)
        else:
            assert unit.run(make_request(PROMPT, "loads")) == 20
    for unit in units:
        unit.until(lambda unit=unit: not unit.unit.busy)  # type: ignore[misc]
    assert host_pages(*units) == copies * PAGES
    assert sum(unit.unit.pool.slot_bytes * host_pages(unit) for unit in units) == (
        copies * PAGES * units[0].unit.pool.slot_bytes
    )
    if with_disks:
        # With `own`, a unit that copied pages from a peer's memory writes them to its own disk only when it closes.
        on_disk = sum(len(tier.presence) for unit in units for tier in disks(unit))
        assert on_disk == (PAGES if store == "once" else 4 * PAGES)
    if store == "once":
        assert [counts(unit).left_out for unit in units] == [0, *[PAGES] * 7]
    for unit in units:
        unit.forget()
        assert unit.run(make_request(PROMPT, "again")) == 20
    assert host_pages(*units) == copies * PAGES


def disks(engine: MiniEngine) -> list[Any]:
    return [tier for tier in engine.unit.manager.tiers if tier.facts.name == "disk"]


def pair(make_engine: Make, folder: Path, **more: object) -> tuple[MiniEngine, MiniEngine]:
    """Starts a unit that keeps the prompt's pages, and another unit that knows these pages. Returns the two units."""
    one, other = make_engine(**once(folder, **more)), make_engine(**once(folder, **more))
    one.run(make_request(PROMPT, "one"))
    wait_for(lambda: knows(other, PAGES))
    return one, other


def deafen(patch: pytest.MonkeyPatch, tier: LivePeerTier) -> None:
    """From this call on, the tier learns nothing about its peers' pages."""
    patch.setattr(tier, "take_news", lambda *_: None)
    patch.setattr(tier, "take_all_news", lambda *_: None)


def test_a_copy_leaves_after_its_load_and_peers_do_not_see_it(make_engine: Make, folder: Path) -> None:
    one, other = pair(make_engine, folder)
    request = make_request(PROMPT, "two")
    assert other.add(request) == 20
    assert host_pages(other) == PAGES, "the load needs them"
    other.step({})
    (row,) = share_of(one).peers()
    assert row["host_pages"] == 0
    other.end_load("two")
    other.step()
    other.check("two")
    assert host_pages(other) == 0
    assert counts(other).left_out == PAGES
    other.unit.manager.check_integrity()


def test_a_copy_that_no_load_uses_leaves_too(make_engine: Make, folder: Path) -> None:
    _, other = pair(make_engine, folder)
    other.add(make_request(PROMPT, "two"))
    other.finish("two")
    other.drain()
    other.until(lambda: host_pages(other) == 0)


def test_a_copy_whose_keeper_evicts_the_page_is_promoted(make_engine: Make, folder: Path) -> None:
    one, other = pair(make_engine, folder)
    other.add(make_request(PROMPT, "two"))
    one.unit.manager.hub.evict(0, PAGES)
    wait_for(lambda: knows(other, 0))
    other.end_load("two")
    other.step()
    other.check("two")
    assert (counts(other).promoted, counts(other).lost) == (PAGES, 0)
    assert host_pages(other) == PAGES
    one.forget()
    wait_for(lambda: knows(one, PAGES))
    assert one.run(make_request(PROMPT, "three")) == 20, "from the unit that has it now"
    assert host_pages(one) == 0


def test_a_copy_is_promoted_although_the_index_still_believes_in_its_keeper(
    make_engine: Make, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = pair(make_engine, folder)
    (tier,) = live_tiers(other)
    other.add(make_request(PROMPT, "two"))
    assert not other.unit.manager.work.moving, "the copies are here, and the load is not"
    deafen(monkeypatch, tier)
    monkeypatch.setattr(share_module, "DEPARTED_S", -1.0)
    one.close()
    wait_for(lambda: not has_holder(other))
    assert tier.present(0, other.keys_of(make_request(PROMPT))).all(), "it believes in the keeper"
    other.end_load("two")
    other.step()
    other.check("two")
    assert (counts(other).promoted, counts(other).lost) == (PAGES, 0)
    assert host_pages(other) == PAGES


def has_holder(engine: MiniEngine) -> bool:
    """Whether the engine's directory of peers has a peer with a page of the prompt."""
    directory = share_of(engine).host
    assert directory is not None
    peers, *_ = directory.find(0, engine.keys_of(make_request(PROMPT)))
    return bool((peers >= 0).any())


def test_a_page_is_stored_although_the_index_still_believes_in_its_keeper(
    make_engine: Make, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = pair(make_engine, folder)
    deafen(monkeypatch, live_tiers(other)[0])
    one.unit.manager.hub.evict(0, PAGES)
    wait_for(lambda: not has_holder(other))
    compute(other)
    assert (host_pages(other), counts(other).left_out) == (PAGES, 0)


def test_pages_that_their_keeper_evicts_are_lost_and_stored_again(make_engine: Make, folder: Path) -> None:
    one, other = pair(make_engine, folder)
    compute(other)
    assert (host_pages(other), counts(other).left_out) == (0, PAGES)
    one.unit.manager.hub.evict(0, 3)
    wait_for(lambda: knows(other, 2))
    assert counts(other).lost == 3
    other.forget()
    assert other.run(make_request(PROMPT, "two")) == 8
    assert (host_pages(one), host_pages(other)) == (2, 3)
    assert counts(other).promoted == 0


@pytest.mark.parametrize("verified", [False, True])
def test_pages_of_a_unit_that_ended_are_promoted_once(
    make_engine: Make, folder: Path, verified: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a keeper ends, two units that used its pages promote them: together they copy each page once, and both can
    load all of them afterwards."""
    one, other = pair(make_engine, folder, **{"host.verify": verified})
    third = make_engine(**once(folder, **{"host.verify": verified}))
    wait_for(lambda: knows(third, PAGES) and share_of(other).joined == 2)
    for unit in (other, third):
        assert unit.run(make_request(PROMPT, "two")) == 20
    # with a shorter turn, a slow machine might copy a page twice
    monkeypatch.setattr(keeper_module, "TURN_S", DEADLINE_S)
    one.close()
    wait_for(lambda: share_of(other).joined == share_of(third).joined == 1)

    def all_there() -> bool:
        for unit in (other, third):
            unit.step({})
        return host_pages(other, third) == PAGES and not share_of(other).departed + share_of(third).departed

    wait_for(all_there)
    assert counts(other).promoted + counts(third).promoted == PAGES
    assert counts(other).lost + counts(third).lost == 0
    for unit in (other, third):
        unit.forget()
        wait_for(lambda unit=unit: knows(unit, PAGES - host_pages(unit)))  # type: ignore[misc]
        assert unit.run(make_request(PROMPT, "three")) == 20
        unit.unit.manager.check_integrity()


def test_control_pages_of_a_unit_whose_memory_is_dropped_at_once_are_lost(
    make_engine: Make, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = pair(make_engine, folder)
    assert other.run(make_request(PROMPT, "two")) == 20
    monkeypatch.setattr(share_module, "DEPARTED_S", -1.0)
    one.close()
    wait_for(lambda: knows(other, 0))
    other.until(lambda: not share_of(other).departed)
    assert (counts(other).promoted, counts(other).lost) == (0, PAGES)
    other.forget()
    assert other.run(make_request(PROMPT, "three")) == 0
    assert host_pages(other) == PAGES, "nobody else has it"


@pytest.mark.parametrize("takes_over", [False, True])
def test_a_unit_that_closes_takes_nothing_over(
    make_engine: Make, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, takes_over: bool
) -> None:
    """A unit that closes does not take over pages of its peers. In the control it does, and writes them to its disk."""

    def start(name: str) -> MiniEngine:
        disk = {"disk.folders": str(tmp_path / name), "disk.bytes_per_folder": 4 << 20}
        return make_engine(**once(folder, **disk))

    if takes_over:
        monkeypatch.setattr(StoreOnce, "begin_close", lambda _: None)
    one, other = start("one"), start("other")
    one.run(make_request(PROMPT, "one"))
    wait_for(lambda: bool(known_of(other, PROMPT).all()))
    own = [token + 1000 for token in PROMPT]
    other.run(make_request(own, "own"))
    compute(other)
    other.until(lambda: not other.unit.busy)
    assert (host_pages(other), counts(other).left_out) == (PAGES, PAGES)
    one.close()
    wait_for(lambda: bool(share_of(other).departed))
    (tier,) = disks(other)
    other.unit.close()
    assert counts(other).promoted == (PAGES if takes_over else 0)
    assert tier.present(0, other.keys_of(make_request(PROMPT))).tolist() == [takes_over] * PAGES
    assert tier.present(0, other.keys_of(make_request(own))).all()


def test_memory_of_a_unit_that_ended_is_unmapped_by_the_thread_that_follows_peers(
    make_engine: Make, folder: Path
) -> None:
    one, other = pair(make_engine, folder)
    compute(other)
    share = share_of(other)
    assert share.host is not None
    watched = WatchedDirectory(share.host)
    share.host = watched  # type: ignore[assignment]
    one.close()
    other.until(lambda: counts(other).promoted == PAGES and not share.departed)
    assert watched.dropped_by == ["flexkv-share"]


class WatchedDirectory:
    """Wraps a peer directory, and records the names of the threads that drop peers from it."""

    def __init__(self, directory: PeerDirectory) -> None:
        self._directory = directory
        self.dropped_by: list[str] = []

    def drop(self, *peer: Any) -> None:
        self.dropped_by.append(threading.current_thread().name)
        self._directory.drop(*peer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._directory, name)


def test_a_peer_that_ended_a_moment_ago_is_not_dropped_with_those_before(
    make_engine: Make, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(share_module, "DEPARTED_S", DEADLINE_S)
    one, other = pair(make_engine, folder)
    third = make_engine(**once(folder))
    wait_for(lambda: share_of(other).joined == 2)
    one.close()
    wait_for(lambda: len(share_of(other).departed) == 1)
    before = share_of(other).departed
    third.close()
    wait_for(lambda: len(share_of(other).departed) == 2)
    share_of(other).end_departed(before)
    wait_for(lambda: not set(before) & set(share_of(other).departed))
    assert len(share_of(other).departed) == 1


def test_a_unit_is_busy_until_it_has_taken_pages_over(make_engine: Make, folder: Path) -> None:
    one, other = pair(make_engine, folder)
    compute(other)
    one.close()
    wait_for(lambda: bool(share_of(other).departed))
    assert other.unit.busy
    other.until(lambda: not other.unit.busy)
    assert counts(other).promoted == PAGES


def test_nothing_is_taken_over_while_as_much_is_fetched_as_may_be(
    make_engine: Make, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = pair(make_engine, folder)
    compute(other)
    once_here = other.unit.manager.work.once
    assert once_here is not None
    with monkeypatch.context() as patch:
        patch.setattr(once_here._promotions, "room", lambda *_: 0)
        patch.setattr(once_here._keeper, "orphans", lambda *_: pytest.fail("there is no room for them"))
        one.close()
        wait_for(lambda: bool(share_of(other).departed))
        once_here.poll()
        assert other.unit.busy
    other.until(lambda: not other.unit.busy)
    assert counts(other).promoted == PAGES


def test_memory_of_a_unit_that_ended_is_let_go_although_nobody_steps(
    make_engine: Make, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(share_module, "DEPARTED_S", 0.2)
    one, other = pair(make_engine, folder)
    compute(other)
    one.close()
    wait_for(lambda: share_of(other).joined == 0 and not share_of(other).departed)
    wait_for(lambda: knows(other, 0))
    assert counts(other).lost == PAGES


def test_a_damaged_page_of_a_unit_that_ended_is_not_promoted(make_engine: Make, folder: Path) -> None:
    one, other = pair(make_engine, folder, **{"host.verify": True})
    compute(other)
    one.unit.pool.slot(int(one.unit.manager.hub.index.slots_of(entries(one))[2]))[5] ^= 1
    one.close()
    wait_for(lambda: share_of(other).joined == 0)
    other.until(lambda: not share_of(other).departed)
    assert (counts(other).promoted, counts(other).lost) == (PAGES - 1, 1)
    other.forget()
    assert other.run(make_request(PROMPT, "three")) == 8


def entries(engine: MiniEngine) -> Any:
    return engine.unit.manager.hub.index.find(0, engine.keys_of(make_request(PROMPT)))


def test_pages_of_a_reset_unit_are_not_promoted(make_engine: Make, folder: Path) -> None:
    one, other = pair(make_engine, folder)
    compute(other)
    one.unit.manager.reset()
    wait_for(lambda: knows(other, 0) and share_of(other).joined == 0)
    assert share_of(other).departed == ()
    other.step({})
    assert (counts(other).promoted, counts(other).lost) == (0, PAGES)
    other.forget()
    assert other.run(make_request(PROMPT, "two")) == 0


def test_a_unit_that_is_reset_keeps_its_own_pages(make_engine: Make, folder: Path) -> None:
    _, other = pair(make_engine, folder)
    assert other.run(make_request(PROMPT, "two")) == 20
    other.unit.manager.reset()
    other.forget()
    assert other.run(make_request(PROMPT, "three")) == 0
    assert host_pages(other) == PAGES


def test_two_units_that_store_at_the_same_moment_both_keep_the_page(
    make_engine: Make, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = make_engine(**once(folder)), make_engine(**once(folder))
    (tier,) = live_tiers(other)
    with monkeypatch.context() as patch:
        deafen(patch, tier)
        one.run(make_request(PROMPT, "one"))
        other.run(make_request(PROMPT, "two"))
    wait_for(lambda: knows(one, PAGES) and knows(other, PAGES))
    for unit in (one, other):
        unit.forget()
        assert unit.run(make_request(PROMPT, "again")) == 20
    assert (host_pages(one), host_pages(other)) == (PAGES, PAGES)


def test_a_page_that_expires_at_its_keeper_is_stored_without_that(make_engine: Make, folder: Path) -> None:
    one, other = make_engine(**once(folder)), make_engine(**once(folder))
    one.run(make_request(PROMPT, "one", extra_args={"flexkv.ttl_s": 3600}))
    wait_for(lambda: knows(other, PAGES))
    compute(other)
    assert host_pages(other) == PAGES
    third = make_engine(**once(folder))
    wait_for(lambda: knows(third, PAGES))
    hour = {"flexkv.tiers": ["host"], "flexkv.ttl_s": 60}
    third.run(make_request(PROMPT, "short", extra_args=hour))
    assert host_pages(third) == 0, "others keep it for longer than was asked"


def test_a_page_that_expires_at_its_last_keeper_is_stored_without_that(
    make_engine: Make, folder: Path
) -> None:
    """If the only remaining copy of a page expires, and the request sets no time limit, the unit stores the page
    itself. Another keeper had the pages without a time limit, but has evicted them."""
    one, other = pair(make_engine, folder)
    second = make_engine(**settings_of(folder))
    wait_for(lambda: knows(second, PAGES))
    second.run(make_request(PROMPT, "two", extra_args={"flexkv.tiers": ["host"], "flexkv.ttl_s": 3600}))

    def keepers_pages() -> int:
        return sum(row["host_pages"] for row in share_of(other).peers())

    wait_for(lambda: keepers_pages() == 2 * PAGES)
    one.unit.manager.hub.evict(0, PAGES)
    wait_for(lambda: keepers_pages() == PAGES)
    compute(other)
    assert host_pages(other) == PAGES


def test_pages_that_were_left_out_and_then_stored_are_not_lost(make_engine: Make, folder: Path) -> None:
    one, other = make_engine(**once(folder)), make_engine(**once(folder))
    one.run(make_request(PROMPT, "one", extra_args={"flexkv.ttl_s": 3600}))
    wait_for(lambda: knows(other, PAGES))
    other.run(make_request(PROMPT, "short", extra_args={"flexkv.tiers": ["host"], "flexkv.ttl_s": 60}))
    assert (host_pages(other), counts(other).left_out) == (0, PAGES)
    other.forget()
    compute(other)
    assert host_pages(other) == PAGES
    one.unit.manager.hub.evict(0, PAGES)
    wait_for(lambda: knows(other, 0))
    assert counts(other).lost == 0


def test_pages_that_somebody_has_forgotten_are_not_lost(make_engine: Make, folder: Path) -> None:
    _, other = pair(make_engine, folder)
    compute(other)
    assert counts(other).left_out == PAGES
    assert other.unit.manager.forget(0, other.keys_of(make_request(PROMPT))) == PAGES
    assert counts(other).lost == 0


def test_no_note_is_made_of_a_page_that_is_being_stored(make_engine: Make, folder: Path) -> None:
    one, other = make_engine(**once(folder)), make_engine(**once(folder))
    request = make_request(PROMPT, "computes", extra_args={"flexkv.tiers": ["host"]})
    assert other.add(request) == 0
    tell = other.hold_reports()
    other.step()
    assert other.unit.manager.inflight_ops() == 1
    one.run(make_request(PROMPT, "one"))
    wait_for(lambda: knows(other, PAGES))
    keys = other.keys_of(request)
    plan = other.unit.manager.begin_store("again", 0, keys, np.arange(PAGES, dtype=np.int32), 0)
    assert (plan.graph, plan.known, counts(other).left_out) == (None, PAGES, 0)
    tell()
    other.finish("computes")
    other.drain()
    assert host_pages(other) == PAGES


def test_lost_pages_are_stored_from_the_engine_if_it_still_has_them(make_engine: Make, folder: Path) -> None:
    """Lost pages are stored from the engine if it still has them: when the next request finds their blocks in the
    engine's own prefix cache."""
    one, other = pair(make_engine, folder)
    request = make_request(PROMPT, "computes", extra_args={"flexkv.tiers": ["host"]})
    assert other.add(request) == 0
    other.step()
    blocks = other.finish("computes", keep_blocks=True)
    other.drain()
    assert (host_pages(other), counts(other).left_out) == (0, PAGES)
    one.unit.manager.hub.evict(0, PAGES)
    wait_for(lambda: knows(other, 0))
    other.adopt(make_request([*PROMPT[:20], 7, 8, 9], "next"), blocks[:PAGES])
    other.step()
    other.check("next")
    other.finish("next")
    other.drain()
    assert host_pages(other) == PAGES


def test_blocks_behind_those_left_out_are_stored_straight_to_disk(
    make_engine: Make, folder: Path, tmp_path: Path
) -> None:
    one = make_engine(**once(folder))
    disk = {"disk.folders": str(tmp_path / "slabs"), "disk.bytes_per_folder": 4 << 20}
    other = make_engine(**once(folder, **disk, **{"disk.gds": "on", "disk.gds_stores": True}))
    one.run(make_request(PROMPT[:13], "one"))
    wait_for(lambda: bool(known_of(other, PROMPT[:13]).all()))
    compute(other)
    other.until(lambda: not other.unit.busy)
    assert counts(other).left_out == 3
    (tier,) = disks(other)
    assert tier.present(0, other.keys_of(make_request(PROMPT))).tolist() == [False] * 3 + [True] * 2
    other.forget()
    assert other.run(make_request(PROMPT, "two")) == 20


def test_part_of_a_part_of_an_offer_names_positions_of_the_whole() -> None:
    keys = np.arange(80, dtype=np.uint8).reshape(5, 16)
    offer = StoreOffer("one", 0, keys, np.arange(10, 15, dtype=np.int32), 3, 4)
    part = offer.part(np.array([0, 2, 4])).part(np.array([1, 2]))
    assert part.chosen is not None
    assert (part.chosen.tolist(), part.blocks.tolist()) == ([2, 4], [12, 14])
    assert np.array_equal(part.keys, keys[[2, 4]])


def test_pages_left_out_count_as_known(make_engine: Make, folder: Path) -> None:
    """Pages that a peer keeps count as known, so a lazy store does not offer them again and again."""
    _, other = pair(make_engine, folder)
    assert other.unit.manager.known(0, other.keys_of(make_request(PROMPT))).all()


def test_notes_are_bounded(make_engine: Make, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_module, "KNOWN_PAGES", 8)
    one, other = make_engine(**once(folder)), make_engine(**once(folder))
    for number in range(4):
        prompt = [token + 1000 * number for token in PROMPT]
        one.run(make_request(prompt, f"one {number}"))
        wait_for(lambda: bool(np.count_nonzero(known_of(other, prompt)) == PAGES))  # noqa: B023
        other.run(make_request(prompt, f"two {number}", extra_args={"flexkv.tiers": ["host"]}))
    assert counts(other).left_out == 4 * PAGES
    keeper = live_tiers(other)[0].keeper
    assert isinstance(keeper, PeerKeeper)
    assert np.count_nonzero(keeper._left_out) <= 8


def known_of(engine: MiniEngine, prompt: list[int]) -> Any:
    """Returns, for each page of the prompt, whether the engine knows that a peer has it in host memory."""
    tier, *_ = live_tiers(engine)
    tier.take_all_news()
    return tier.present(0, engine.keys_of(make_request(prompt)))


@pytest.mark.parametrize("share", ["disk", "off"])
def test_once_without_shared_host_memory_is_refused(make_engine: Make, folder: Path, share: str) -> None:
    with pytest.raises(Exception, match=f"peers.store: once with peers.share: {share}"):
        make_engine(**once(folder) | {"peers.share": share})


def test_with_own_pages_there_is_no_keeper(make_engine: Make, folder: Path) -> None:
    engine = make_engine(**settings_of(folder))
    assert engine.unit.manager.work.once is None
    assert live_tiers(engine)[0].keeper is None
    assert share_of(engine).once is None


def test_metrics_and_status_count_what_was_left_out(make_engine: Make, folder: Path) -> None:
    one, other = pair(make_engine, folder)
    assert other.run(make_request(PROMPT, "two")) == 20
    one.close()
    wait_for(lambda: share_of(other).joined == 0)
    other.until(lambda: counts(other).promoted == PAGES)
    other.step({})
    series = other.counters.data["flexkv_once_pages_total"]
    assert (series["left_out"], series["promoted"]) == (PAGES, PAGES)
    assert share_of(other).status()["once"] == {"left_out": PAGES, "promoted": PAGES, "lost": 0}
