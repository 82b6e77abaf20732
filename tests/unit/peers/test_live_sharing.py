"""Engines that run at the same time find each other's pages, and load them correctly or not at all."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from tests.unit.adapters.mini_engine import MiniEngine
from tests.unit.adapters.vllm_objects import make_request
from tests.unit.peers.live_engines import PROMPT, Make, knows, live_tiers, settings_of, share_of, wait_for

SHARING_THREADS = {"flexkv-share", "flexkv-machines"}


@pytest.fixture
def pair(make_engine: Make, tmp_path: Path) -> tuple[MiniEngine, MiniEngine]:
    """Two engines that share the pages in their host memory."""
    settings = settings_of(tmp_path / "run")
    return make_engine(**settings), make_engine(**settings)


def hits(engine: MiniEngine, tier: str) -> float:
    return engine.counters.data["flexkv_hit_blocks_total"][tier]


def test_a_prompt_of_one_engine_is_a_hit_in_another_from_its_host_memory(
    pair: tuple[MiniEngine, MiniEngine],
) -> None:
    one, other = pair
    assert one.run(make_request(PROMPT, "one")) == 0
    wait_for(lambda: knows(other, 5))
    assert other.run(make_request(PROMPT, "two")) == 20  # `run` fails if a number that was loaded is wrong
    (row,) = share_of(other).peers()
    assert (row["copied"], row["host_pages"]) == (5, 5)
    assert hits(other, "peer-host") == 5


def test_a_page_that_expires_does_so_at_its_reader(pair: tuple[MiniEngine, MiniEngine]) -> None:
    one, other = pair
    request = make_request(PROMPT, "one", extra_args={"flexkv.ttl_s": 3600})
    one.run(request)
    wait_for(lambda: knows(other, 5))
    assert other.run(make_request(PROMPT, "two")) == 20
    hub, keys = other.unit.manager.hub, other.keys_of(request)
    times = hub.times.of(0, hub.index.slots_of(hub.index.find(0, keys)))
    assert (times > time.time()).all()
    (tier,) = live_tiers(other)
    assert tier.present(0, keys).all()
    tier._unix_s = lambda: time.time() + 3601
    assert not tier.present(0, keys).any()
    assert len(tier.leading(0, keys)) == 0


def test_what_a_peer_has_does_not_count_as_stored(pair: tuple[MiniEngine, MiniEngine]) -> None:
    one, other = pair
    request = make_request(PROMPT, "one")
    one.run(request)
    wait_for(lambda: knows(other, 5))
    manager, keys = other.unit.manager, other.keys_of(request)
    assert manager.present(0, keys).all()
    assert not manager.known(0, keys).any()


@pytest.mark.parametrize(("tiers", "tokens"), [(["host"], 0), (["host", "peer-host"], 20)])
def test_a_request_may_leave_peers_out(
    pair: tuple[MiniEngine, MiniEngine], tiers: list[str], tokens: int
) -> None:
    one, other = pair
    one.run(make_request(PROMPT, "one"))
    wait_for(lambda: knows(other, 5))
    assert other.run(make_request(PROMPT, "two", extra_args={"flexkv.tiers": tiers})) == tokens


@pytest.mark.parametrize("ranks", [1, 2])
def test_both_directions_and_verified_host_memory(make_engine: Make, tmp_path: Path, ranks: int) -> None:
    settings = settings_of(tmp_path / "run") | {"host.verify": True}
    one, other = make_engine(ranks=ranks, **settings), make_engine(ranks=ranks, **settings)
    one.run(make_request(PROMPT, "one"))
    second = [token + 1000 for token in PROMPT]
    other.run(make_request(second, "two"))
    wait_for(lambda: knows(one, 5) and knows(other, 5))
    assert other.run(make_request(PROMPT, "three")) == 20
    assert one.run(make_request(second, "four")) == 20


@pytest.mark.parametrize("ranks", [1, 2])
def test_pages_on_a_running_engines_disk_are_found(make_engine: Make, tmp_path: Path, ranks: int) -> None:
    engines = [
        make_engine(
            ranks=ranks,
            **settings_of(tmp_path / "run", "disk"),
            **{"disk.folders": str(tmp_path / name), "disk.bytes_per_folder": 4 << 20},
        )
        for name in ("a", "b")
    ]
    one, other = engines
    one.run(make_request(PROMPT, "one"))
    one.until(lambda: not one.unit.busy)
    wait_for(lambda: knows(other, 5))
    assert other.run(make_request(PROMPT, "two")) == 20
    assert hits(other, "peers") == 5


@pytest.mark.parametrize("takes", [True, False], ids=["learns", "control"])
def test_a_lookup_learns_of_the_pages_that_it_asks_for_and_of_no_others(
    make_engine: Make, tmp_path: Path, takes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lookup learns only of the pages that it asks for. Polls teach the engine nothing in this test. In the control,
    lookups do not either, and the engine finds nothing."""
    one, other = (make_engine(**settings_of(tmp_path / "run")) for _ in range(2))
    (tier,) = live_tiers(other)
    monkeypatch.setattr(tier, "take_all_news", lambda *_: None)
    if not takes:
        monkeypatch.setattr(tier, "take_news", lambda *_: None)
    second = [token + 1000 for token in PROMPT]
    one.run(make_request(PROMPT, "one"))
    one.run(make_request(second, "more"))
    directory = share_of(other).host
    assert directory is not None
    wait_for(lambda: bool((directory.find(0, other.keys_of(make_request(second)))[0] >= 0).all()))
    assert other.run(make_request(PROMPT, "two")) == (20 if takes else 0)
    assert len(tier.presence) == (5 if takes else 0)
    assert directory.has_news, "the other prompt's"
    assert other.run(make_request(second, "three")) == (20 if takes else 0)


def test_with_sharing_off_there_is_no_thread_no_tier_and_no_folder(make_engine: Make, tmp_path: Path) -> None:
    def shared_memory() -> set[str]:
        """Returns the inodes of the shared memory that this process has mapped. Earlier tests may have made some of it,
        and may unmap it at any time."""
        maps = Path("/proc/self/maps").read_text().splitlines()
        return {line.split()[4] for line in maps if "memfd:" in line}

    def threads() -> set[str]:
        return {thread.name for thread in threading.enumerate()} & SHARING_THREADS

    assert threads() == set()
    before = shared_memory()
    engine = make_engine(**settings_of(tmp_path / "run", "off"))
    engine.run(make_request(PROMPT, "one"))
    assert not live_tiers(engine)
    assert not (tmp_path / "run").exists()
    assert engine.unit.manager.hub.board is None
    assert threads() == set()
    assert shared_memory() <= before
    sharing = make_engine(**settings_of(tmp_path / "run"))
    assert live_tiers(sharing)
    assert threads(), "control"
    assert shared_memory() - before, "control"


def test_a_poll_takes_over_so_many_pages_and_later_polls_the_others(
    make_engine: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = (make_engine(**settings_of(tmp_path / "run")) for _ in range(2))
    (tier,) = live_tiers(other)
    take_news = tier.take_all_news
    monkeypatch.setattr(tier, "take_all_news", lambda: None)
    request = make_request(PROMPT, "one")
    one.run(request)
    directory = share_of(other).host
    assert directory is not None
    wait_for(lambda: bool((directory.find(0, other.keys_of(request))[0] >= 0).all()))
    for known in (2, 4, 5):
        assert directory.has_news
        take_news(2)
        assert len(tier.presence) == known
    assert not directory.has_news


def test_a_page_that_several_tiers_have_counts_once_when_it_is_forgotten(
    make_engine: Make, tmp_path: Path
) -> None:
    """A page that a peer has both in host memory and on disk counts as one page when it is forgotten. For the other
    engine these are two tiers."""
    one, other = (
        make_engine(
            **settings_of(tmp_path / "run"),
            **{"disk.folders": str(tmp_path / name), "disk.bytes_per_folder": 4 << 20},
        )
        for name in ("one", "other")
    )
    one.run(make_request(PROMPT))
    one.until(lambda: not one.unit.busy)
    wait_for(lambda: knows(other, 5))
    assert len(live_tiers(other)) == 2
    assert other.unit.manager.forget(0, other.keys_of(make_request(PROMPT))) == 5
