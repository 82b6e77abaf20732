"""When a journal begins a group commit, and which rows wait for it. The tests replace the clock or the journal's
writes.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flexkv.errors import DiskError
from flexkv.storage.base import DiskOptions
from flexkv.storage.group_commit import GROUP_S, QUIET_S, await_group
from flexkv.storage.journal import Journal, Record, Use
from flexkv.storage.striped_slabs import StripedSlabs
from tests.unit.storage.disk_world import GENEROUS_S, IDENTITY, MakeDisks, ids, key_of, make_group

MOST_WAITS = 10_000


@dataclass
class Rows:
    """A simulated source of rows. Its clock advances only while the journal waits for rows.

    Attributes:
        gaps: seconds between one row and the next.
        hurry_s: time on this clock after which the journal must not wait for more rows.
        now_s: current time of this clock, in seconds.
        waits: the timeouts of all waits so far, in seconds.
    """

    gaps: Iterator[float]
    hurry_s: float = np.inf
    now_s: float = 100.0
    waits: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.next_s = self.now_s + next(self.gaps, np.inf)

    def clock(self) -> float:
        return self.now_s

    def wait_for_more(self, timeout_s: float) -> bool:
        assert len(self.waits) < MOST_WAITS, "the commit never begins"
        assert timeout_s > 0
        self.waits.append(timeout_s)
        ends_s = min(self.now_s + timeout_s, self.next_s, self.hurry_s)
        came = self.next_s <= ends_s
        self.now_s = max(self.now_s, ends_s)
        if came:
            self.next_s += next(self.gaps, np.inf)
        return came and self.now_s < self.hurry_s

    def gathered_for(self) -> float:
        began_s = self.now_s
        await_group(self.clock, self.wait_for_more)
        return self.now_s - began_s


def test_a_row_alone_waits_for_as_long_as_a_burst_may_pause() -> None:
    assert Rows(iter(())).gathered_for() == pytest.approx(QUIET_S)


def test_a_burst_is_over_when_nothing_came_for_so_long() -> None:
    assert Rows(iter([QUIET_S / 2] * 4)).gathered_for() == pytest.approx(3 * QUIET_S)


@pytest.mark.parametrize("gap_s", [QUIET_S / 100, QUIET_S / 3, 0.99 * QUIET_S])
def test_a_stream_of_rows_does_not_put_the_commit_off(gap_s: float) -> None:
    assert Rows(itertools.repeat(gap_s)).gathered_for() == pytest.approx(GROUP_S)


def test_a_reset_or_an_end_is_not_waited_with() -> None:
    assert Rows(itertools.repeat(QUIET_S / 2), hurry_s=100.012).gathered_for() == pytest.approx(0.012)


def test_a_commit_that_is_put_off_would_be_found() -> None:
    def without_end(rows: Rows) -> None:
        while rows.wait_for_more(QUIET_S):
            pass

    with pytest.raises(AssertionError, match="never begins"):
        without_end(Rows(itertools.repeat(QUIET_S / 2)))


@pytest.mark.parametrize("disks", [1, 3, 4])
def test_each_disk_counts_its_own_uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disks: int) -> None:
    group = make_group()
    put: list[Record] = []
    folders = [tmp_path / str(disk) for disk in range(disks)]
    unit = StripedSlabs.open(folders, IDENTITY, [group], DiskOptions(1 << 22, preallocate=False))
    try:
        monkeypatch.setattr(Journal, "put", lambda self, record: put.append(record))
        places = ids(range(25))
        unit.record_use(0, places)
        uses = [record for record in put if isinstance(record, Use)]
        on_disk = [use.slots(1000).tolist() for use in uses]
        assert sorted(slot * disks + disk for disk, slots in enumerate(on_disk) for slot in slots) == list(
            range(25)
        )
        for use, slots in zip(uses, on_disk, strict=True):
            assert len(slots) <= use.rows <= len(slots) + 1
        monkeypatch.undo()
    finally:
        assert unit.close(GENEROUS_S)


def test_uses_leave_half_of_the_journal_to_publishes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that record the use of pages take at most half of a journal's space, so that publishes find space. Slots are
    striped over two disks, so each disk's journal gets half of the 40 rows of uses. These 20 rows fill half of the
    journal's space for 40."""
    go_on, write = threading.Event(), Journal._write

    def held_up(self: Journal, batch: Sequence[Record]) -> None:
        assert go_on.wait(GENEROUS_S)
        write(self, batch)

    monkeypatch.setattr(Journal, "_write", held_up)
    options = DiskOptions(1 << 22, preallocate=False, journal_rows=40)
    unit = StripedSlabs.open([tmp_path / "0", tmp_path / "1"], IDENTITY, [make_group()], options)
    try:
        first, second = (journal for journal in unit._journals if journal is not None)
        unit.record_use(0, ids(range(40)))
        assert (first._waiting_rows, second._waiting_rows) == (20, 20)
        unit.record_use(0, ids(range(2)))
        assert (first._waiting_rows, second._waiting_rows) == (20, 20), "beyond half of the room: forgotten"
        keys = np.arange(640, dtype=np.uint16).astype(np.uint8).reshape(40, 16)
        tokens = np.full(40, 16, np.int32)
        assert unit.record_publish(0, keys, ids(range(40)), unit.next_generations(40), tokens)
        assert (first._waiting_rows, second._waiting_rows) == (40, 40)
    finally:
        go_on.set()
        assert unit.close(GENEROUS_S)


def publish_some(unit: StripedSlabs, count: int) -> None:
    keys = np.arange(16 * count, dtype=np.uint16).astype(np.uint8).reshape(count, 16)
    tokens = np.full(count, 16, np.int32)
    assert unit.record_publish(0, keys, ids(range(count)), unit.next_generations(count), tokens)


class Watched(threading.Condition):
    """A condition that calls `ask` right after each release of its lock, in the thread that has released it."""

    ask: Callable[[], None] | None = None
    asking = False

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self.ask is not None and not self.asking and threading.current_thread().name == "flexkv-journal":
            self.asking = True
            self.ask()
            self.asking = False


def test_there_is_a_lag_from_a_publish_until_it_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reported lag is above 0 from a publish until it is durable, even at the moment when the batch has left the
    queue and its commit has not begun."""
    condition = Watched()
    monkeypatch.setattr(
        "flexkv.storage.journal.threading",
        SimpleNamespace(Condition=lambda: condition, Event=threading.Event),
    )
    unit = StripedSlabs.open([tmp_path], IDENTITY, [make_group()], DiskOptions(1 << 22, preallocate=False))
    published, seen = False, []

    def ask() -> None:
        if published:
            seen.append((unit.stats().journal_lag_s > 0, bool(unit._durable)))

    try:
        condition.ask = ask
        with condition:  # while the test holds `condition`, the journal cannot take rows from the queue
            publish_some(unit, 4)
            published = True
        deadline_s = time.monotonic() + GENEROUS_S
        while not unit._durable or unit.stats().journal_lag_s > 0:
            assert time.monotonic() < deadline_s
            time.sleep(0.001)
    finally:
        condition.ask = None
        assert unit.close(GENEROUS_S)
    assert seen[0] == (True, False)
    assert (False, False) not in seen


def test_a_journal_that_has_failed_lags_behind_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Journal) -> None:
        raise DiskError("broken for the test")

    monkeypatch.setattr(Journal, "_check_files", broken)
    unit = StripedSlabs.open([tmp_path], IDENTITY, [make_group()], DiskOptions(1 << 22, preallocate=False))
    publish_some(unit, 4)
    (journal,) = (journal for journal in unit._journals if journal is not None)
    journal._thread.join(GENEROUS_S)
    assert journal.ended
    assert unit.stats().journal_lag_s == 0
    assert [lost.disk for lost in unit.poll().lost] == [0]
    assert unit.alive == (False,)
    unit.close(GENEROUS_S)


def test_what_was_overwritten_before_its_commit_is_not_called_durable(
    make_disks: MakeDisks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a page is overwritten before its commit, only the second page may be reported durable. The publish of the
    first page, its eviction and the publish of the second page are in one commit."""
    began, go_on, write = threading.Event(), threading.Event(), Journal._write

    def held_up(self: Journal, batch: Sequence[Record]) -> None:
        began.set()
        assert go_on.wait(GENEROUS_S)
        write(self, batch)

    world = make_disks()
    monkeypatch.setattr(Journal, "_write", held_up)
    world.write([9], [5])
    assert began.wait(GENEROUS_S)
    _, former = world.write([1], [0])
    world.unit.record_evict(0, ids([0]), former)
    _, latter = world.write([2], [0])
    go_on.set()
    world.wait_durable([0], latter)
    assert (0, int(former[0])) not in world.durable


def test_an_eviction_that_comes_late_leaves_the_page_that_came_after(make_disks: MakeDisks) -> None:
    world = make_disks()
    _, former = world.write([1], [0])
    _, latter = world.write([2], [0])
    world.unit.record_evict(0, ids([0]), former)
    world.wait_durable([0], latter)
    assert world.close()
    world = make_disks()
    rows = world.unit.rows(0)
    assert rows.places.tolist() == [0]
    np.testing.assert_array_equal(rows.keys[0], key_of(2))
