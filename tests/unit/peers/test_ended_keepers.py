"""A keeper is a process whose unit keeps pages that other units use. These tests kill or stop a keeper. No answer may
be wrong afterwards, and no unit may wait for the keeper."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from flexkv.peers import share as share_module
from tests.unit.adapters.mini_engine import MiniEngine
from tests.unit.adapters.scheduled_engine import ScheduledEngine
from tests.unit.adapters.vllm_objects import make_request
from tests.unit.peers import group_engines
from tests.unit.peers.group_engines import HIT, Start, knows_pages, manager_of, peer_share, until
from tests.unit.peers.live_engines import PROMPT, Make, knows, settings_of, share_of, wait_for

PAGES = 5
ALONE: dict[str, Any] = {"flexkv.tiers": ["host"]}
"""Settings of a request that loads nothing from peers, so that its prompt is computed."""

GROUP_PAGES = 16
"""Number of pages of `group_engines.PROMPT` and its answer, in the full group and the window group together."""

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(params=["once"])
def store(request: pytest.FixtureRequest) -> str:
    """The setting `peers.store` that all units of a test have."""
    value: str = request.param
    return value


@pytest.fixture(scope="module")
def nursery() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.unit.peers.keeper_child"]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        yield child
        assert child.stdin is not None
        child.stdin.close()
        child.wait(30)


def born(nursery: subprocess.Popen[str], folder: Path, store: str, kind: str = "") -> int:
    """Makes the process `nursery` fork a keeper (see `keeper_child`). Waits until the keeper has the prompt's pages,
    and returns its process id."""
    assert nursery.stdin is not None
    assert nursery.stdout is not None
    print(folder, store, kind, file=nursery.stdin, flush=True)
    return int(next(line for line in nursery.stdout if line.strip().isdigit()))


@pytest.fixture
def keeper(nursery: subprocess.Popen[str], tmp_path: Path, store: str) -> Iterator[int]:
    """Starts a keeper, yields its process id, and kills it at the end of the test."""
    pid = born(nursery, tmp_path / "run", store)
    yield pid
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def other(keeper: int, make_engine: Make, tmp_path: Path, store: str) -> MiniEngine:
    """An engine that has learned of the keeper's pages."""
    engine = make_engine(**settings_of(tmp_path / "run") | {"peers.store": store})
    wait_for(lambda: knows(engine, PAGES))
    return engine


def host_pages(engine: MiniEngine) -> int:
    return int(engine.unit.manager.cached_blocks())


def test_pages_of_a_killed_process_are_promoted(keeper: int, other: MiniEngine) -> None:
    assert other.run(make_request(PROMPT, "one")) == 20
    assert host_pages(other) == 0
    os.kill(keeper, signal.SIGKILL)
    wait_for(lambda: share_of(other).joined == 0)
    other.until(lambda: not share_of(other).departed)
    assert host_pages(other) == PAGES
    once = share_of(other).once
    assert once is not None
    assert (once.left_out, once.promoted, once.lost) == (PAGES, PAGES, 0)
    other.forget()
    assert other.run(make_request(PROMPT, "two")) == 20


def test_control_pages_of_a_killed_process_whose_memory_goes_at_once_are_computed(
    keeper: int, other: MiniEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert other.run(make_request(PROMPT, "one")) == 20
    monkeypatch.setattr(share_module, "DEPARTED_S", -1.0)
    os.kill(keeper, signal.SIGKILL)
    wait_for(lambda: knows(other, 0))
    other.forget()
    assert other.run(make_request(PROMPT, "two")) == 0
    assert host_pages(other) == PAGES


def test_a_process_killed_while_a_load_waits_costs_no_wrong_number(keeper: int, other: MiniEngine) -> None:
    other.add(make_request(PROMPT, "one"))
    os.kill(keeper, signal.SIGKILL)
    wait_for(lambda: share_of(other).joined == 0)
    other.end_load("one")
    other.step()
    other.check("one")
    other.finish("one")
    other.drain()
    other.until(lambda: not share_of(other).departed)
    other.forget()
    assert other.run(make_request(PROMPT, "two")) == 20
    assert host_pages(other) == PAGES


@pytest.mark.parametrize("store", ["own", "once"], indirect=True)
def test_pages_of_a_stopped_process_stay_readable(
    keeper: int, other: MiniEngine, make_engine: Make, tmp_path: Path, store: str
) -> None:
    """If a keeper is stopped, a unit that knew it before can still read its pages, which are in shared memory. A unit
    that starts later does not wait for the stopped keeper.
    """
    os.kill(keeper, signal.SIGSTOP)
    assert other.run(make_request(PROMPT, "one")) == 20
    other.forget()
    host = {"flexkv.tiers": ["host"]}
    assert other.run(make_request(PROMPT, "two", extra_args=host)) == (0 if store == "once" else 20)
    assert host_pages(other) == (0 if store == "once" else PAGES)
    late = make_engine(**settings_of(tmp_path / "run") | {"peers.store": store})
    wait_for(lambda: share_of(late).joined == 1)
    assert late.run(make_request(PROMPT, "three")) == (0 if store == "once" else 20)
    os.kill(keeper, signal.SIGCONT)
    wait_for(lambda: share_of(late).joined == 2)


@pytest.fixture
def group_keeper(nursery: subprocess.Popen[str], tmp_path: Path, store: str) -> Iterator[int]:
    """Starts a keeper whose unit has two KV groups, yields its process id, and kills it at the end of the test."""
    pid = born(nursery, tmp_path / "run", store, "window")
    yield pid
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def grouped(group_keeper: int, start: Start, store: str) -> ScheduledEngine:
    """An engine that has learned of the keeper's pages in its two KV groups."""
    engine = start("window", **{"peers.store": store})
    wait_for(lambda: knows_pages(engine, GROUP_PAGES))
    return engine


def test_pages_of_all_groups_of_a_killed_process_are_promoted(
    group_keeper: int, grouped: ScheduledEngine
) -> None:
    assert grouped.run("one", group_engines.PROMPT, **ALONE) == 0
    assert manager_of(grouped).cached_blocks() == 0
    os.kill(group_keeper, signal.SIGKILL)
    wait_for(lambda: peer_share(grouped).joined == 0)
    until(grouped, lambda: not peer_share(grouped).departed)
    assert manager_of(grouped).cached_blocks() == GROUP_PAGES
    grouped.forget()
    assert grouped.run("two", group_engines.PROMPT) == HIT
    grouped.check()


@pytest.mark.parametrize("store", ["own", "once"], indirect=True)
def test_a_process_with_groups_killed_while_a_load_waits_costs_no_wrong_number(
    group_keeper: int, grouped: ScheduledEngine, store: str
) -> None:
    grouped.add("one", group_engines.PROMPT)
    grouped.step()
    os.kill(group_keeper, signal.SIGKILL)
    wait_for(lambda: peer_share(grouped).joined == 0)
    grouped.settle()
    grouped.check()
    until(grouped, lambda: not peer_share(grouped).departed)
    grouped.forget()
    assert grouped.run("two", group_engines.PROMPT) == HIT
    grouped.check()
