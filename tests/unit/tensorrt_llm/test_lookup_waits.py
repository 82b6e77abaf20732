"""A lookup may wait for reads from the tiers behind host memory, but only for a limited time. It waits for nothing
else.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from flexkv.adapters.common import waiting_lookup
from flexkv.adapters.tensorrt_llm import loads
from flexkv.cache.tiers.contract import Plane
from flexkv.simulation.world import DISK
from flexkv.transfer.graph import OpResult, TransferGraph
from tests.servers.redis import redis_server
from tests.unit.tensorrt_llm.world import PROMPT, WHOLE, Make, World, lookup, stored

WAIT_S = 0.25
LONG_WAIT_S = 60.0


def disk(folder: Path, wait_s: float) -> dict[str, str]:
    return {
        "FLEXKV_DISK_FOLDERS": str(folder),
        "FLEXKV_DISK_BYTES_PER_FOLDER": "4MiB",
        "FLEXKV_DISK_COMPUTE_IF_FASTER": "false",
        "FLEXKV_LOAD_LOOKUP_WAIT_S": str(wait_s),
    }


class HeldReads:
    """A disk lane that accepts reads but does not report their end until the test releases them."""

    def __init__(self, world: World) -> None:
        assert world.scheduler is not None
        self._planes = world.scheduler.side.ranks.unit.driver._planes  # type: ignore[attr-defined]
        self._plane: Plane = self._planes[DISK]
        self._planes[DISK] = self

    def submit(self, graph: TransferGraph) -> int | None:
        return self._plane.submit(graph)

    def poll(self) -> list[OpResult]:
        return []

    def close(self, deadline_s: float) -> bool:
        return self._plane.close(deadline_s)

    def let_go(self) -> None:
        self._planes[DISK] = self._plane


class Clock:
    """A clock that advances only in calls of `sleep`.

    Attributes:
        slept_s: total time slept.
        each: called in every sleep.
    """

    def __init__(self) -> None:
        self.slept_s = 0.0
        self.each: Callable[[], object] = lambda: None

    def monotonic(self) -> float:
        return self.slept_s

    def sleep(self, seconds: float) -> None:
        self.slept_s += seconds
        self.each()


def settle(world: World) -> None:
    """Polls until no op is in flight in the tiers behind host memory."""
    assert world.scheduler is not None
    ends_s = time.monotonic() + LONG_WAIT_S
    while world.scheduler.side.ranks.unit.busy:
        assert time.monotonic() < ends_s, "the tiers do not come to rest"
        world.scheduler.side.ranks.poll()
        time.sleep(0.001)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in (loads, waiting_lookup):
        monkeypatch.setattr(module, "time", made)
    return made


def after_a_restart(make_world: Make, folder: Path, wait_s: float) -> World:
    """Makes a world in which PROMPT is only on disk."""
    stored(make_world, disk(folder, wait_s)).close()
    world: World = make_world(disk(folder, wait_s))
    world.warm_up()
    return world


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_pages_on_disk_serve_the_first_request(
    make_world: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: str
) -> None:
    monkeypatch.setenv("FLEXKV_LOAD_MODE", mode)
    world = after_a_restart(make_world, tmp_path, LONG_WAIT_S)
    assert world.hit(world.serve(PROMPT)) == WHOLE
    world.check()


def test_pages_in_a_shared_store_serve_the_first_request(make_world: Make, tmp_path: Path) -> None:
    with redis_server(tmp_path) as redis:
        remote = {
            "FLEXKV_REMOTE_URLS": redis.url,
            "FLEXKV_REMOTE_PROBE_S": "10",
            "FLEXKV_REMOTE_WAIT_S": str(LONG_WAIT_S),
            "FLEXKV_DISK_COMPUTE_IF_FASTER": "false",
            "FLEXKV_LOAD_LOOKUP_WAIT_S": str(LONG_WAIT_S),
        }
        first = stored(make_world, remote)
        settle(first)
        assert redis.ask("DBSIZE") == b":%d\r\n" % (WHOLE // 4)
        first.close()
        world: World = make_world(remote)
        world.warm_up()
        assert world.hit(world.serve(PROMPT)) == WHOLE
        world.check()
        world.close()


def test_the_lookups_of_a_step_wait_for_a_bounded_time_together(
    make_world: Make, clock: Clock, tmp_path: Path
) -> None:
    world = after_a_restart(make_world, tmp_path, WAIT_S)
    held = HeldReads(world)
    before_s = clock.slept_s
    assert lookup(world) == 0
    assert clock.slept_s - before_s == pytest.approx(WAIT_S, abs=2 * waiting_lookup.READ_LOOK_S)
    for _ in range(3):
        assert lookup(world) == 0
    assert clock.slept_s - before_s == pytest.approx(WAIT_S, abs=2 * waiting_lookup.READ_LOOK_S)
    # The lookup of the next step may wait again. In this step the read ends in the middle of the wait.
    world.serve([40_000, 1, 2], new_tokens=1)
    half_s = clock.slept_s + WAIT_S / 2

    def read_ends() -> None:
        if clock.slept_s >= half_s:
            held.let_go()
            settle(world)

    clock.each = read_ends
    assert world.hit(world.serve(PROMPT)) == WHOLE
    assert clock.slept_s < half_s + WAIT_S / 4
    world.check()


def test_nothing_is_waited_for_that_is_there_or_nowhere(
    make_world: Make, clock: Clock, tmp_path: Path
) -> None:
    world = stored(make_world, disk(tmp_path, WAIT_S))
    clock.slept_s = 0.0
    assert world.hit(world.serve(PROMPT)) == WHOLE
    world.serve([50_000 + n for n in range(30)])
    assert clock.slept_s == 0
    world.check()


def test_a_wait_ends_when_a_rank_is_lost(make_world: Make, clock: Clock, tmp_path: Path) -> None:
    world = after_a_restart(make_world, tmp_path, LONG_WAIT_S)
    HeldReads(world)
    assert world.scheduler is not None
    unit = world.scheduler.side.ranks.unit
    clock.each = lambda: unit.disable(0, "as if it were gone")  # type: ignore[attr-defined]
    before_s = clock.slept_s
    assert lookup(world) == 0
    assert clock.slept_s - before_s < LONG_WAIT_S / 2
