"""A unit's watch looks at the files of units on other machines, and learns from them which pages these units have. In
these tests the watch has no thread: the test calls each look.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flexkv import c_ext
from flexkv.peers import live_file, machines
from flexkv.peers.board_rows import BoardRows
from flexkv.peers.card import GroupCard, SharedDisk, UnitCard
from flexkv.peers.live_file import LIVE_NAME, LiveHead, LiveReader, LiveWriter
from flexkv.peers.machines import MachineWatch
from flexkv.storage.frame_log import FRAME

PLACES = 8
CARD = UnitCard(
    unit="0" * 16,
    pid=7,
    model="mini",
    fingerprint="ab" * 32,
    weights="11" * 32,
    groups=(GroupCard("x", "float32", 4, "full", 0, "", (64,), (((0, 64, 0),),)),),
    disk=SharedDisk(0, ("a/model/unit0",)),
)
HEAD = LiveHead(CARD, "near", "host", 2.0, PLACES)


class Unit:
    """The file and the board of a unit on another machine. Each of its disk slots has a page of the same generation."""

    def __init__(
        self, parent: Path, name: str, weights: str = "11", generation: int = 1, machine: str = "far"
    ) -> None:
        folder = parent / name / f"mini-{CARD.fingerprint[:16]}-x" / "unit0"
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / LIVE_NAME
        board = c_ext.SlotBoard(PLACES)
        at = np.arange(PLACES, dtype=np.int32)
        told = np.full(PLACES, generation, np.uint64)
        board.note(at, np.full(PLACES, 4, np.uint32), told, told * 0, 1)
        board.show(at, 0, np.arange(PLACES * 16, dtype=np.uint8).reshape(PLACES, 16))
        self.board = board
        disk = SharedDisk(0, (str(folder.relative_to(parent)),))
        card = replace(CARD, unit=f"{generation:016x}", weights=weights * 32, disk=disk)
        self.head = replace(HEAD, card=card, machine=machine)
        self.writer = LiveWriter(self.path, self.head, BoardRows(board, PLACES))
        self.writer.beat()


class Watch:
    """A watch, and the reports that it has made.

    Attributes:
        joined: for each file of a unit that the watch follows, the head of the file, and a local board with the unit's
            rows.
        forgiven: the watch's reports that a unit is usable again.
    """

    def __init__(self, parent: Path) -> None:
        self.joined: dict[str, tuple[LiveHead, c_ext.SlotBoard]] = {}
        self.forgiven: list[str] = []
        own = Unit(parent, "own", machine="near")
        self.watch = MachineWatch(
            parent,
            own.writer,
            own.head,
            lambda path, head, board: self.joined.update({path: (head, board)}),
            self._forget,
            self.forgiven.append,
            lambda: None,
        )

    def _forget(self, path: str) -> None:
        del self.joined[path]

    def look(self) -> None:
        self.watch._scan()
        for path, unit in list(self.watch._units.items()):
            self.watch._look(path, unit)

    def promised(self) -> set[tuple[str, int]]:
        """Returns the pages that the watch knows. Each is a pair: the first two digits of the name of the page's
        weights, and its generation."""
        found = set()
        for head, board in self.joined.values():
            _, rows = BoardRows(board, PLACES).everything()
            found |= {(head.card.weights[:2], int(generation)) for generation in rows["generation"]}
        return found


@pytest.fixture
def watch(tmp_path: Path) -> Watch:
    return Watch(tmp_path)


def follow(watch: Watch, unit: Unit) -> None:
    """Makes the watch look at the unit's file, with a heartbeat before each look, until the watch knows the unit's
    pages."""
    for _ in range(2):
        watch.look()
        unit.writer.beat()
    watch.look()


# --- reads that fail ---


def fail_at(number: int, patch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Makes read number `number` of a file fail. If `number` is 4, makes the close after three reads fail instead.
    Returns a function that returns how many reads there were so far."""
    reads = 0
    read, ended = live_file.LiveFile.read, live_file.LiveFile.__exit__

    def counted(file: live_file.LiveFile, most: int) -> bytes:
        nonlocal reads
        reads += 1
        if reads == number:
            raise OSError(errno.ESTALE, "stale file handle")
        return read(file, most)

    def closed(file: live_file.LiveFile, *error: object) -> None:
        ended(file, *error)
        if reads == number - 1 == 3:
            raise OSError(errno.EIO, "at the close")

    patch.setattr(live_file.LiveFile, "read", counted)
    patch.setattr(live_file.LiveFile, "__exit__", closed)
    return lambda: reads


def restarted_while_a_read_fails(
    watch: Watch, parent: Path, monkeypatch: pytest.MonkeyPatch, number: int, between: Callable[[], None]
) -> set[tuple[str, int]]:
    """Restarts a unit with other weights, and makes the watch's first look at the new file fail. Calls `between`, and
    makes the watch look again. Returns the pages that the watch knows at the end."""
    follow(watch, Unit(parent, "a"))
    assert watch.promised() == {("11", 1)}
    again = Unit(parent, "a", weights="22", generation=2)
    with monkeypatch.context() as patch:
        # `_look` reads no other file, so `reads` counts only reads of this file.
        reads = fail_at(number, patch)
        watch.watch._look(again.path, watch.watch._units[again.path])
        assert reads() == min(number, 3)
    between()
    watch.watch._look(again.path, watch.watch._units[again.path])
    return watch.promised()


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_a_unit_that_came_back_is_another_also_if_the_first_look_at_it_fails(
    watch: Watch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    promised = restarted_while_a_read_fails(watch, tmp_path, monkeypatch, number, lambda: None)
    assert promised == set()
    follow(watch, Unit(tmp_path, "a", weights="33", generation=3))
    assert watch.promised() == {("33", 3)}


def took_the_session(watch: Watch, path: Path) -> None:
    """Gives the watch a reader that has read the file's new session, but none of its rows."""
    unit, there = watch.watch._units[path], LiveReader(path)
    there.look()
    assert there.head is not None
    there._at = live_file.HEADER.size + FRAME.size + len(there.head.encode())
    unit.reader = there


@pytest.mark.parametrize("is_compared", [True, False])
def test_control_a_session_that_is_taken_before_its_rows_are_read_shows_them_as_the_old_ones(
    watch: Watch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_compared: bool
) -> None:
    """If a watch has read a file's new session but none of its rows, it does not take the new rows for pages of the old
    weights. It compares the head that it has just read with the head of the unit that it joined. The control does not
    compare them, and takes the new rows for old ones."""

    def take() -> None:
        (path,) = (Path(path) for path in watch.joined)
        took_the_session(watch, path)
        if not is_compared:
            unit = watch.watch._units[path]
            unit.joined = unit.reader.head

    promised = restarted_while_a_read_fails(watch, tmp_path, monkeypatch, 3, take)
    assert promised == (set() if is_compared else {("11", 2)})


# --- units that ended without removing their files ---


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The watch's clock, in seconds, in a list with one element. Only the test advances it."""
    now_s = [100.0]
    monkeypatch.setattr("flexkv.peers.machines.time.monotonic", lambda: now_s[0])
    return now_s


def round_of(watch: Watch, clock: list[float], *units: Unit) -> None:
    for unit in units:
        unit.writer.beat()
    clock[0] += HEAD.beat_s
    watch.watch._scan()
    watch.watch._look_at_all()


def found_beside_crashed(watch: Watch, parent: Path, clock: list[float]) -> bool:
    """Makes 4 units crash. Their files use up the number of files that the watch may follow. Returns whether the watch
    then still finds a unit that starts later."""
    for number in range(4):
        Unit(parent, f"crashed {number}")
    for _ in range(machines.GONE_BEATS + 3):
        round_of(watch, clock)
    unit = Unit(parent, "z", generation=7)
    for _ in range(300):
        round_of(watch, clock, unit)
        if watch.promised() == {("11", 7)}:
            return True
    return False


def test_files_of_crashed_units_take_no_place_for_good(
    watch: Watch, tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machines, "MOST_FILES", 4)
    assert found_beside_crashed(watch, tmp_path, clock)
    assert len(watch.watch._units) == 4


def test_control_files_that_never_rest_take_the_places_for_good(
    watch: Watch, tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machines, "MOST_FILES", 4)
    monkeypatch.setattr(MachineWatch, "_rest", lambda *_: None)
    assert not found_beside_crashed(watch, tmp_path, clock)


def test_the_units_that_are_followed_are_bounded(
    watch: Watch,
    tmp_path: Path,
    clock: list[float],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(machines, "MOST_UNITS", 2)
    units = [Unit(tmp_path, name) for name in "abc"]
    for _ in range(4):
        round_of(watch, clock, *units)
    assert len(watch.joined) == 2
    assert caplog.text.count("not followed from here: 2 units are followed") == 1
    units[0].writer.remove()
    for _ in range(int(machines.AGAIN_S / HEAD.beat_s) + 1):
        round_of(watch, clock, *units[1:])
    assert set(watch.joined) == {str(unit.path) for unit in units[1:]}


def test_a_file_that_stands_still_is_looked_at_rarely_and_found_again(
    watch: Watch, tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    unit = Unit(tmp_path, "a")
    for _ in range(machines.GONE_BEATS + 2):
        round_of(watch, clock)
    looks = 0
    look = LiveReader.look

    def counted(reader: LiveReader) -> live_file.LiveNews:
        nonlocal looks
        looks += reader._path == unit.path
        return look(reader)

    monkeypatch.setattr(LiveReader, "look", counted)
    for _ in range(2 * machines.ASLEEP_BEATS):
        round_of(watch, clock)
    assert 1 <= looks <= 3
    for _ in range(machines.ASLEEP_BEATS + 1):
        round_of(watch, clock, unit)
    assert watch.promised() == {("11", 1)}


@pytest.mark.parametrize(("machine", "is_read"), [("near", False), ("far", True)])
def test_rows_of_units_of_the_same_machine_are_not_read(
    watch: Watch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: str, is_read: bool
) -> None:
    sizes = []
    read = live_file.LiveFile.read

    def sized(file: live_file.LiveFile, most: int) -> bytes:
        sizes.append(most)
        return read(file, most)

    monkeypatch.setattr(live_file.LiveFile, "read", sized)
    follow(watch, Unit(tmp_path, "a", machine=machine))
    assert (live_file.MOST_READ_BYTES in sizes) == is_read
    assert bool(watch.joined) == is_read


def test_a_fault_that_passes_is_said_once_and_the_unit_stays(
    watch: Watch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    unit = Unit(tmp_path, "a")
    follow(watch, unit)
    for _ in range(2):
        with monkeypatch.context() as patch:
            fail_at(1, patch)
            watch.watch._look(unit.path, watch.watch._units[unit.path])
            watch.watch._look(unit.path, watch.watch._units[unit.path])
        unit.writer.beat()
        watch.watch._look(unit.path, watch.watch._units[unit.path])
    assert watch.promised() == {("11", 1)}
    assert caplog.text.count("what was read before stays: [Errno 116]") == 2
    assert "not followed" not in caplog.text


# --- the heartbeat while the watch looks at other files ---


def test_the_heartbeat_does_not_wait_for_all_looks(
    watch: Watch, tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abcdef":
        Unit(tmp_path, name)
    watch.watch._beat()
    watch.watch._scan()
    before = watch.watch._writer._beat
    slow = []

    def look(_: LiveReader) -> live_file.LiveNews:
        clock[0] += HEAD.beat_s / 2
        slow.append(clock[0])
        if len(slow) == 5:
            watch.watch.end()
        raise OSError(errno.ETIMEDOUT, "the server")

    monkeypatch.setattr(LiveReader, "look", look)
    watch.watch._look_at_all()
    assert len(slow) == 5, "a unit that closes looks no further"
    assert watch.watch._writer._beat == before + 2
