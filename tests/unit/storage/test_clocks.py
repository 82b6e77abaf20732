"""If the system clock is wrong or jumps, no page is lost and no disk is taken out of service."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest

from flexkv.observe import unix_now_ms, unix_now_s
from flexkv.observe.unix_clock import MOST_S
from flexkv.storage.fsck import check_folder
from tests.unit.storage.disk_world import MakeDisks, ids

TIMES = [-1.0, -(2.0**63), 0.0, 2.0**31, 2.0**32, 2.0**53, 2.0**63, 2.0**64]
NO_TIMES = [1e300, float("inf"), float("nan")]
"""Values of `time.time` that no real clock has. Python's `logging` cannot format them."""


class SetClock:
    """Replaces `time.time`: the test sets the time."""

    def __init__(self) -> None:
        self.now_s = time.time()

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[SetClock]:
    clock = SetClock()
    monkeypatch.setattr(time, "time", clock)
    yield clock
    monkeypatch.undo()


@pytest.mark.parametrize("now_s", [*TIMES, *NO_TIMES])
def test_any_clock_is_a_time_that_pages_can_carry(clock: SetClock, now_s: float) -> None:
    clock.now_s = now_s
    assert 0 <= unix_now_s() <= MOST_S
    assert 0 <= np.uint64(unix_now_ms()) <= 1000 * MOST_S


@pytest.mark.parametrize("now_s", TIMES)
def test_pages_are_durable_and_found_again_by_any_clock(
    make_disks: MakeDisks, clock: SetClock, now_s: float
) -> None:
    """Pages become durable, and a restarted unit finds them again, even if the system clock shows a wrong time."""
    clock.now_s = now_s
    world = make_disks()
    _, generations = world.write(range(4), range(4))
    world.wait_durable(range(4), generations)
    assert world.close()
    world = make_disks()
    rows = world.unit.rows(0)
    assert sorted(rows.places.tolist()) == [0, 1, 2, 3]
    assert world.read_rows(rows) == {}
    folder = world.folder
    assert world.close()
    assert check_folder(folder).clean
    (folder / "index.sqlite").unlink()
    world = make_disks()
    assert len(world.unit.rows(0)) == 4


def test_a_clock_that_jumps_stops_no_journal(make_disks: MakeDisks, clock: SetClock) -> None:
    world = make_disks()
    for place, now_s in enumerate([*TIMES, *reversed(TIMES)]):
        clock.now_s = now_s
        _, generations = world.write([place], [place])
        world.unit.record_use(0, ids([place]))
        world.wait_durable([place], generations)
        assert world.read([place], [place], generations).reason == ""
    assert world.unit.alive == (True,)
    assert world.close()
    assert len(make_disks().unit.rows(0)) == 2 * len(TIMES)
