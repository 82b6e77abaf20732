"""A helper may die, hang or stop at any moment. Then its unit still loads no wrong byte, loses no slot, and frees no
slot too early. Its remote tier recovers.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flexkv.errors import StoreError
from flexkv.remote.base import Store
from flexkv.remote.link import HelperLink
from flexkv.remote.own_program import own_program
from flexkv.remote.process import HelperProcess
from tests.servers.redis import RedisServer
from tests.unit.remote.helper_faults import (
    Plan,
    begin_fetch,
    children,
    heals,
    leased,
    load_in_time,
    rest_briefly,
    state_of,
    use_faulty_helpers,
    wait_for,
    write_all,
)
from tests.unit.remote.remote_unit import BLOCK_TOKENS, RemoteUnit, chain
from tests.unit.remote.test_remote_unit import Spoiler

PAGES = 20
KEYS = chain("prompt", PAGES)
FAST = {"remote__get_s": 0.5, "remote__stuck_s": 3.0}
ROOT = Path(__file__).resolve().parents[3]
Build = Callable[..., RemoteUnit]


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    rest_briefly(monkeypatch)
    return use_faulty_helpers(tmp_path, monkeypatch)


@pytest.fixture
def build(redis: RedisServer, plan: Plan) -> Iterator[Build]:
    units: list[RemoteUnit] = []

    def make(**settings: object) -> RemoteUnit:
        units.append(RemoteUnit(redis.url, **{**FAST, **settings}))  # type: ignore[arg-type]
        return units[-1]

    yield make
    plan.clear()
    for unit in units:
        unit.close()


@pytest.fixture
def stored(build: Build) -> Build:
    """Writes the pages of KEYS to the store. Returns the function that builds more units with this store."""
    write_all(build(), KEYS)
    return build


@pytest.mark.parametrize("deed", ["kill", "stop", "hang"])
@pytest.mark.parametrize("moment", ["exists", "get", "check"])
def test_helper_that_fails_in_a_load(stored: Build, plan: Plan, moment: str, deed: str) -> None:
    unit = stored()
    plan.set(moment, deed)
    assert load_in_time(unit, KEYS) < PAGES * BLOCK_TOKENS
    unit.poll_until(lambda: unit.plane.totals.restarts or unit.tier.down, "the loss is seen")
    plan.clear()
    heals(unit, KEYS)
    assert unit.plane.totals.restarts >= 1


@pytest.mark.parametrize("deed", ["kill", "stop", "hang"])
def test_helper_that_fails_in_a_put(build: Build, plan: Plan, deed: str) -> None:
    unit = build()
    plan.set("put", deed)
    unit.store(KEYS)
    unit.settle()
    assert not unit.tier.known(0, KEYS).any()
    assert unit.load(KEYS) == PAGES * BLOCK_TOKENS, "host memory has them"
    plan.clear()
    write_all(unit, KEYS)
    unit.check_no_leaks()
    reader = build()
    heals(reader, KEYS)
    assert reader.plane.totals.gets["ok"] >= PAGES


def test_control_a_helper_without_a_fault_is_not_started_again(stored: Build, plan: Plan) -> None:
    unit = stored()
    plan.set("never", "kill")
    assert load_in_time(unit, KEYS) == PAGES * BLOCK_TOKENS
    assert not plan.reached.exists()
    unit.check_no_leaks()
    assert unit.plane.totals.restarts == 0


@pytest.mark.parametrize("safe_path", ["", "1"])
def test_helper_is_of_this_package_whatever_the_current_folder_has(
    stored: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, safe_path: str
) -> None:
    """A unit's helper comes from the installed package, even if the current folder has another package `flexkv`, for
    example a clone of the sources that was not built."""
    (tmp_path / "flexkv").mkdir()
    (tmp_path / "flexkv" / "__init__.py").write_text("raise ImportError('another package')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONSAFEPATH", safe_path)
    unit = stored()
    assert load_in_time(unit, KEYS) == PAGES * BLOCK_TOKENS
    program = [*own_program("flexkv"), "--version"]
    assert subprocess.run(program, check=True, capture_output=True).stdout.startswith(b"flexkv")


def test_helper_killed_while_nothing_moves(stored: Build) -> None:
    unit = stored()
    os.kill(unit.helper_pid, signal.SIGKILL)
    unit.poll_until(lambda: unit.tier.down, "the loss is seen")
    heals(unit, KEYS)
    assert unit.plane.totals.restarts == 1


def watch_slots(unit: RemoteUnit, pages: int) -> bool:
    """Waits until the slots of a get are free. Returns whether they stayed leased until the stopped process that ran
    the get was reaped."""
    pid = unit.helper_pid
    wait_for(lambda: state_of(pid) == "T", "the helper stops")
    kept = leased(unit) == pages

    def free() -> bool:
        nonlocal kept
        if leased(unit) == pages:
            return False
        kept &= not state_of(pid)
        return True

    unit.poll_until(free, "the slots are free again")
    return kept


def test_slots_are_leased_until_the_stopped_process_is_reaped(stored: Build, plan: Plan) -> None:
    unit = stored()
    plan.set("get", "stop")
    begin_fetch(unit, KEYS)
    assert watch_slots(unit, PAGES)
    plan.clear()
    heals(unit, KEYS)


def test_control_ops_that_end_at_the_kill(stored: Build, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """A control: if a link ends the ops as soon as it kills the process, and does not wait until the process is reaped,
    slots are freed while the process can still write to them.
    """
    unit, lost = stored(), HelperLink.lost

    def ends(self: HelperLink, reason: str) -> None:
        lost(self, reason)
        self.user.reaped(reason)

    with monkeypatch.context() as patch:
        patch.setattr(HelperProcess, "kill", lambda self: None)
        patch.setattr(HelperLink, "lost", ends)
        plan.set("get", "stop")
        begin_fetch(unit, KEYS)
        pid = unit.helper_pid
        assert not watch_slots(unit, PAGES)
    os.kill(pid, signal.SIGKILL)


def test_late_writes_of_a_process_that_is_hard_to_kill_reach_nobody(
    stored: Build, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a killed process can still write to its slots, no other page gets these slots. In this test the link works
    correctly, and the kernel takes long to kill the process."""
    unit = stored()
    with monkeypatch.context() as patch:
        patch.setattr(HelperProcess, "kill", lambda self: None)
        plan.set("get", "stop")
        begin_fetch(unit, KEYS)
        pid = unit.helper_pid
        unit.poll_until(lambda: unit.plane.link._killed, "the process is taken for stuck")
        index = unit.manager.hub.index
        assert leased(unit) == PAGES
        others = chain("other", int(index.free_slots(0)))
        assert unit.store(others) == len(others)
        plan.clear()
        os.kill(pid, signal.SIGCONT)
        ends_s = time.monotonic() + 0.5
        while time.monotonic() < ends_s:
            assert unit.load(others) == len(others) * BLOCK_TOKENS
            unit.load(KEYS)  # loads the pages that the helper's process had verified, or no page
    os.kill(pid, signal.SIGKILL)
    heals(unit, KEYS)


def test_helper_that_dies_at_each_start_is_started_ever_less_often(
    stored: Build, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    rest_briefly(monkeypatch, longest_s=0.8)
    unit = stored()
    plan.set("start", "kill")
    os.kill(unit.helper_pid, signal.SIGKILL)
    begun_s = time.monotonic()
    while time.monotonic() - begun_s < 4.0:
        assert load_in_time(unit, KEYS) == 0 or not unit.tier.down
        time.sleep(0.01)
    # The limit allows for these pauses between starts: 0.05, 0.1, 0.2, 0.4, then 0.8 s each, randomly shortened by up
    # to a quarter.
    assert 2 <= unit.plane.totals.restarts <= 4 + (time.monotonic() - begun_s) / 0.6 + 1
    plan.clear()
    heals(unit, KEYS)


def test_helper_that_dies_at_the_first_start_is_an_error(redis: RedisServer, plan: Plan) -> None:
    before = children()
    plan.set("start", "kill")
    with pytest.raises(StoreError, match="signal 9"):
        RemoteUnit(redis.url)
    assert children() == before


@pytest.mark.parametrize("deed", ["kill", "hang"])
def test_unit_starts_though_the_store_makes_its_client_fail(stored: Build, plan: Plan, deed: str) -> None:
    """A unit starts with its remote tier down if the store hangs, or if the client's library crashes on the store's
    answer. Neither fault means that the settings are wrong.
    """
    plan.set("alive", deed)
    unit = stored()
    assert unit.tier.down
    assert load_in_time(unit, KEYS) == 0
    plan.clear()
    heals(unit, KEYS)


def test_helper_ends_with_its_unit(stored: Build, plan: Plan, redis: RedisServer) -> None:
    """If the engine's process is killed with gets in flight, its helper ends too."""
    stored()
    plan.set("get", "hold")
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.unit.remote.unit_child", redis.url],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert child.stdout is not None
        helper = int(child.stdout.readline())
        wait_for(plan.reached.exists, "the get is in flight")
        assert state_of(helper) not in ("", "Z")
    finally:
        child.kill()
        child.wait(60.0)
        for stream in (child.stdin, child.stdout):
            assert stream is not None
            stream.close()
    # The helper may remain as a zombie (Z), because its new parent process need not reap it.
    wait_for(lambda: state_of(helper) in ("", "Z"), "the helper ends")


def test_close_with_gets_in_flight_ends(stored: Build, plan: Plan) -> None:
    unit = stored()
    plan.set("get", "hold")
    begin_fetch(unit, KEYS)
    pid = unit.helper_pid
    begun_s = time.monotonic()
    unit.close()
    assert time.monotonic() - begun_s < 60.0
    assert not state_of(pid)
    assert not unit.manager.inflight_ops()


def test_values_evicted_between_the_question_and_the_get(
    stored: Build, plan: Plan, redis_store: Store
) -> None:
    unit = stored()
    spoiler = Spoiler(redis_store, unit)
    plan.set("get", "hold")
    begin_fetch(unit, KEYS)
    wait_for(plan.reached.exists, "the first values came")
    assert redis_store.remove([spoiler.name(key) for key in KEYS[6:9]], 5.0) == [True] * 3
    plan.clear()
    assert load_in_time(unit, KEYS) == 6 * BLOCK_TOKENS
    unit.settle()
    assert unit.plane.totals.gets["absent"] == 3
    write_all(unit, KEYS)
    heals(unit, KEYS[:6])
    heals(stored(), KEYS)
