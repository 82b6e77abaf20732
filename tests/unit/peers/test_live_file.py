"""The file in which a unit shows its folders to other machines. A reader uses only complete frames, in their order."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flexkv import c_ext
from flexkv.errors import ContractError, DiskError
from flexkv.peers import live_file
from flexkv.peers.board_rows import PLACED, BoardRows, PlacedRows
from flexkv.peers.card import GroupCard, SharedDisk, UnitCard
from flexkv.peers.live_file import (
    HEADER,
    LIVE_NAME,
    MOST_PLACES,
    LiveHead,
    LiveNews,
    LiveReader,
    LiveWriter,
    decode_head,
)
from flexkv.peers.machines import Mirror
from flexkv.storage.frame_log import FRAME, write_all

PLACES = 40
CARD = UnitCard(
    unit="0" * 16,
    pid=7,
    model="mini",
    fingerprint="ab" * 32,
    weights="",
    groups=(GroupCard("x", "float32", 4, "full", 0, "", (64,), (((0, 64, 0),),)),),
    disk=SharedDisk(0, ("a/model/unit0",)),
)
HEAD = LiveHead(CARD, "machine", "host", 2.0, PLACES)


class Owner:
    """A unit's board and the writer of the unit's file.

    Attributes:
        now: by disk slot, the generation of the page in it; only slots with a page are listed.
    """

    def __init__(self, folder: Path, places: int = PLACES) -> None:
        self.path = folder / LIVE_NAME
        self.board = c_ext.SlotBoard(places)
        self.rows = BoardRows(self.board, MOST_PLACES)
        self.writer = LiveWriter(self.path, replace(HEAD, places=len(self.rows)), self.rows)
        self.now: dict[int, int] = {}
        self._generation = 0

    def put(self, *places: int) -> None:
        """Puts new pages into the given disk slots, and publishes them in the list of pages (board)."""
        for place in places:
            self.drop(place)
            self._generation += 1
            self.now[place] = self._generation
            at = np.array([place], np.int32)
            generation = np.array([self._generation], np.uint64)
            self.board.note(at, np.array([4], np.uint32), generation, generation * 0, 3)
            self.board.show(at, 0, key_of(self._generation))

    def drop(self, place: int) -> None:
        self.now.pop(place, None)
        self.board.hide(np.array([place], np.int32))

    def beat(self) -> None:
        self.writer.beat()


def key_of(generation: int) -> Any:
    return np.frombuffer(generation.to_bytes(16, "little"), np.uint8).reshape(1, 16).copy()


class Follower:
    """A reader of the file.

    Attributes:
        now: by disk slot, the generation of the page in it, according to the file; only slots with a page are listed.
    """

    def __init__(self, path: Path) -> None:
        self.reader = LiveReader(path)
        self.now: dict[int, int] = {}
        self.fault = ""

    def look(self) -> bool:
        """Reads the frames that were added to the file. Returns whether there was a new heartbeat."""
        news = self.reader.look()
        if news.is_all:
            self.now = {}
        for _, rows in news.frames:
            for row in rows:
                place = int(row["place"])
                self.now.pop(place, None)
                if row["tokens"]:
                    self.now[place] = int(row["generation"])
        self.fault = news.fault
        return news.is_alive


@pytest.fixture
def owner(tmp_path: Path) -> Owner:
    return Owner(tmp_path)


def test_a_reader_follows_changes_and_heartbeats(owner: Owner) -> None:
    owner.put(0, 1, 2)
    owner.beat()
    there = Follower(owner.path)
    assert not there.look(), "whoever wrote it may have ended long ago"
    assert there.now == owner.now
    assert not there.look()
    owner.put(1, 39)
    owner.drop(0)
    owner.beat()
    assert there.look()
    assert there.now == owner.now == {1: 4, 2: 3, 39: 5}
    owner.beat()
    assert there.look(), "a heartbeat without a change"
    assert there.reader.head == HEAD


def test_rows_are_what_the_board_shows(owner: Owner) -> None:
    """`BoardRows`, which reads the board's memory in Python, finds the same rows as the C++ reader of boards."""
    owner.put(*range(10))
    owner.drop(4)
    owner.put(7)
    directory = c_ext.PeerDirectory()
    directory.add((owner.board.fd, owner.board.bytes))
    directory.follow()
    epoch, rows = owner.rows.everything()
    _, places, generations, _, epochs = directory.find(0, np.ascontiguousarray(rows["key"]))
    assert len(rows) == directory.pages(0) == 9
    assert np.array_equal(places, rows["place"])
    assert np.array_equal(generations, rows["generation"])
    assert set(epochs.tolist()) == {epoch} == {3}
    assert set(rows["tokens"].tolist()) == {4}


def test_a_board_of_another_version_is_refused(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexkv.peers.board_rows.BOARD_MAGIC", 1)
    with pytest.raises(ContractError, match="expected is 0x1"):
        BoardRows(owner.board, 1)


def test_pages_of_an_older_epoch_are_not_shown(owner: Owner) -> None:
    owner.put(1)
    owner.board.hide(np.array([2], np.int32))
    at, none = np.array([2], np.int32), np.zeros(1, np.uint64)
    owner.board.note(at, np.array([4], np.uint32), none + 9, none, 4)
    owner.board.show(at, 0, key_of(9))
    epoch, rows = owner.rows.everything()
    assert (epoch, rows["place"].tolist()) == (4, [2])


def test_a_mirror_shows_what_the_file_says(owner: Owner) -> None:
    mirror, reader = Mirror(PLACES), LiveReader(owner.path)

    def shown() -> dict[int, int]:
        _, rows = BoardRows(mirror.board, PLACES).everything()
        return {int(row["place"]): int(row["generation"]) for row in rows}

    chance = random.Random(1)
    for step in range(60):
        for _ in range(chance.randrange(4)):
            place = chance.randrange(PLACES)
            owner.put(place) if chance.random() < 0.7 else owner.drop(place)
        if step % 11 == 10:
            owner.writer._most = 0  # makes the next heartbeat begin a new edition of the file
        if step % 17 == 16:
            reader.rewind()
        owner.beat()
        mirror.take(reader.look())
        assert shown() == owner.now


def test_an_edition_is_replaced_before_it_grows_too_long(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_file, "APPENDED_BYTES", 500)
    there = Follower(owner.path)
    for step in range(60):
        owner.put(step % PLACES)
        owner.beat()
        assert there.look() == (step > 0)
        assert there.now == owner.now
    assert owner.writer._edition > 4
    assert owner.path.stat().st_size < 500 + HEADER.size + len(HEAD.encode()) + 60 * 100
    assert sorted(path.name for path in owner.path.parent.iterdir()) == [LIVE_NAME]


def test_a_mirror_shows_pages_of_the_latest_epoch_alone() -> None:
    mirror = Mirror(PLACES)

    def told(epoch: int, *places: int) -> tuple[int, PlacedRows]:
        rows = np.zeros(len(places), PLACED)
        rows["place"], rows["tokens"], rows["generation"] = places, 4, epoch
        return epoch, rows

    def shown() -> list[int]:
        epoch, rows = BoardRows(mirror.board, PLACES).everything()
        assert set(rows["generation"].tolist()) <= {epoch}
        return [int(place) for place in rows["place"]]

    mirror.take(LiveNews(frames=[told(1, 1, 2, 3)]))
    assert shown() == [1, 2, 3]
    mirror.take(LiveNews(frames=[told(2, 2, 5), told(1, 5, 6)]))
    assert shown() == [2]
    mirror.take(LiveNews(is_all=True, frames=[told(2, 7), told(4, 8)]))
    assert shown() == [8]
    mirror.take(LiveNews(is_all=True))
    assert shown() == []


# --- torn, damaged and older files ---


def history(owner: Owner) -> tuple[bytes, dict[int, dict[int, int]]]:
    """Writes six heartbeats. Returns the file's bytes, and a dict from the file's length after each heartbeat to the
    owner's rows at that time."""
    said = {}
    for step in range(6):
        owner.put(step, 10 + step)
        if step % 2:
            owner.drop(step - 1)
        owner.beat()
        said[owner.path.stat().st_size] = dict(owner.now)
    return owner.path.read_bytes(), said


def test_a_torn_file_says_what_its_whole_frames_say(owner: Owner) -> None:
    whole, said = history(owner)
    least = min(said)
    for length in range(len(whole)):
        owner.path.write_bytes(whole[:length])
        there = Follower(owner.path)
        if length < least:
            try:
                there.look()
            except DiskError:
                continue
            assert there.now == {}, "the unit's name is there, and no row yet"
            continue
        there.look()
        assert there.now == said[max(end for end in said if end <= length)]
        assert there.fault == ""
        owner.path.write_bytes(whole)
        assert there.look() == (length < max(said))
        assert there.now == owner.now


def damaged(owner: Owner) -> tuple[list[int], list[int]]:
    """Flips a bit in each byte of the file, one at a time, and reads the damaged file. Returns two lists of offsets.
    Damage at the first ones gave the reader rows that the owner never had. Damage at the second ones went unreported,
    although the reader had all rows.
    """
    whole, said = history(owner)
    wrong, silent = [], []
    for at in range(HEADER.size, len(whole)):
        bad = bytearray(whole)
        bad[at] ^= 1 << at % 8
        owner.path.write_bytes(bad)
        there = Follower(owner.path)
        try:
            there.look()
        except (DiskError, ContractError):
            assert at < min(said)
            continue
        if there.now not in [{}, *said.values()]:
            wrong.append(at)
        elif not there.fault and there.now == owner.now:
            # Damage that enlarges a frame's length is not counted: the frame looks incomplete, so rows are missing.
            silent.append(at)
    return wrong, silent


def test_a_flipped_bit_ends_the_file_before_its_frame(owner: Owner) -> None:
    assert damaged(owner) == ([], [])


def test_control_without_digests_a_flipped_bit_makes_another_row(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unchecked:
        @staticmethod
        def unpack_from(content: bytes, at: int) -> tuple[int, int, int]:
            length, _, _ = FRAME.unpack_from(content, at)
            return length, 0, c_ext.run_digest(content[at + FRAME.size : at + FRAME.size + length])

        size = FRAME.size

    monkeypatch.setattr(live_file, "FRAME", Unchecked)
    wrong, _ = damaged(owner)
    assert len(wrong) > 50


def test_a_flipped_bit_in_the_header_is_named(owner: Owner) -> None:
    whole, _ = history(owner)
    for at in range(HEADER.size):
        bad = bytearray(whole)
        bad[at] ^= 4
        owner.path.write_bytes(bad)
        with pytest.raises(DiskError, match=r"of another version|damaged"):
            LiveReader(owner.path).look()


def test_damage_is_passed_once_it_is_mended(owner: Owner) -> None:
    """A reader continues after a damaged frame as soon as the damage is gone. A network file server may show zeros at
    the end of a file that was just written, and later the right bytes."""
    owner.put(1)
    owner.beat()
    there = Follower(owner.path)
    there.look()
    before = owner.path.stat().st_size
    owner.put(2)
    owner.beat()
    whole = owner.path.read_bytes()
    owner.path.write_bytes(whole[:before] + bytes(len(whole) - before))
    assert not there.look()
    assert there.fault == "a frame of it is damaged"
    owner.path.write_bytes(whole)
    assert there.look()
    assert there.now == owner.now


def test_older_copies_are_no_news(owner: Owner) -> None:
    owner.put(1)
    owner.beat()
    short = owner.path.read_bytes()
    owner.put(2)
    owner.beat()
    long = owner.path.read_bytes()
    there = Follower(owner.path)
    there.look()
    owner.writer._most = 0
    owner.put(3)
    owner.beat()
    assert there.look()
    for older in (short, long):
        owner.path.write_bytes(older)
        with pytest.raises(DiskError, match="an older copy"):
            there.look()
    owner.writer._bytes = 0
    owner.beat()
    assert there.look()
    assert there.now == owner.now


def test_a_file_replaced_while_it_is_read_is_read_from_one_edition(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner.put(1)
    owner.beat()
    there = Follower(owner.path)
    there.look()
    before = dict(owner.now)
    session_of = live_file.session_of

    def replaced(header: bytes) -> tuple[bytes, int]:
        owner.writer._most = 0
        owner.put(1, 2)
        owner.beat()
        return session_of(header)

    with monkeypatch.context() as patch:
        patch.setattr(live_file, "session_of", replaced)
        assert not there.look()
    assert there.now == before
    assert there.look()
    assert there.now == owner.now


def test_another_session_is_not_alive_until_its_heartbeat_advances(owner: Owner, tmp_path: Path) -> None:
    owner.put(1, 2)
    for _ in range(9):
        owner.beat()
    there = Follower(owner.path)
    there.look()
    again = Owner(tmp_path)
    again.put(5)
    again.beat()
    assert not there.look()
    assert there.now == again.now
    again.beat()
    assert there.look()


def test_a_unit_does_not_remove_the_file_of_its_successor(owner: Owner, tmp_path: Path) -> None:
    owner.beat()
    again = Owner(tmp_path)
    again.beat()
    owner.writer.remove()
    assert owner.path.exists()
    again.writer.remove()
    assert not owner.path.exists()


def replaced_by_the_same_size(owner: Owner) -> bool:
    """Replaces the file by another one of the same size. Returns whether the next heartbeat writes all of it."""
    owner.put(1)
    owner.beat()
    other = owner.path.with_name("other")
    other.write_bytes(bytes(owner.path.stat().st_size))
    other.replace(owner.path)
    owner.put(2)
    owner.beat()
    there = Follower(owner.path)
    try:
        there.look()
    except DiskError:
        return False
    return there.now == owner.now


def test_a_file_replaced_by_one_of_the_same_size_is_written_anew(owner: Owner) -> None:
    assert replaced_by_the_same_size(owner)


def test_control_by_its_size_alone_a_replaced_file_stays(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    class AnyFile(tuple[int, ...]):
        def __iter__(self) -> Iterator[int]:
            found = owner.path.stat()
            return iter((found.st_dev, found.st_ino))

    replace_file = owner.writer._replace

    def replaced() -> None:
        replace_file()
        owner.writer._file = AnyFile()  # type: ignore[assignment]

    monkeypatch.setattr(owner.writer, "_replace", replaced)
    assert not replaced_by_the_same_size(owner)


def session_behind_a_hung_write(
    owner: Owner, folder: Path, monkeypatch: pytest.MonkeyPatch, end: Callable[[], None]
) -> bytes:
    """While the owner hangs in a write, calls `end` and starts another session. Returns the session of the file at the
    end."""
    write = write_all

    def hung(fd: int, content: bytes) -> None:
        write(fd, content)
        monkeypatch.setattr(live_file, "write_all", write)
        end()
        again = Owner(folder)
        again.beat()
        again.path.with_name(f"{LIVE_NAME}.new").write_bytes(content)

    monkeypatch.setattr(live_file, "write_all", hung)
    owner.beat()
    return live_file.session_of(owner.path.read_bytes()[: HEADER.size])[0]


def test_a_thread_that_hung_does_not_replace_the_file_of_another_session(
    owner: Owner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = session_behind_a_hung_write(owner, tmp_path, monkeypatch, owner.writer.end)
    assert found != owner.writer.session


def test_control_a_thread_that_was_not_ended_replaces_it(
    owner: Owner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = session_behind_a_hung_write(owner, tmp_path, monkeypatch, lambda: None)
    assert found == owner.writer.session


def test_a_writer_and_readers_at_full_speed_agree(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_file, "APPENDED_BYTES", 3000)
    owner.beat()
    ended = threading.Event()
    faults: list[str] = []

    def read() -> None:
        there = Follower(owner.path)
        while not ended.is_set():
            there.look()
            faults.extend(fault for fault in [there.fault] if fault)
        there.look()
        if there.now != owner.now:
            faults.append("it does not end with what the owner has")

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for step in range(1500):
        owner.put(step % PLACES)
        owner.beat()
    ended.set()
    for thread in threads:
        thread.join(30)
    assert faults == []


# --- limits of files and of single looks ---


def test_a_look_reads_a_bounded_part_of_a_flood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One look at a file reads a limited number of rows, even if every row of a large board changes with each
    heartbeat."""
    owner = Owner(tmp_path, 20_000)
    every = np.zeros(20_000, PLACED)
    every["place"], every["tokens"] = np.arange(20_000), 4
    monkeypatch.setattr(owner.rows, "changes", lambda: (3, every))
    owner.beat()
    there = LiveReader(owner.path)
    there.look()
    for _ in range(8):
        owner.beat()
    most = 1 << 18
    monkeypatch.setattr(live_file, "MOST_READ_BYTES", most)
    looks, rows = 0, 0
    while (news := there.look()).frames:
        read = sum(part.nbytes for _, part in news.frames)
        assert read <= most
        looks, rows = looks + 1, rows + read // PLACED.itemsize
    assert looks > 3
    assert rows % 20_000 == 0
    assert owner.path.stat().st_size < live_file.APPENDED_BYTES + every.nbytes * 2


def test_a_look_takes_a_bounded_number_of_frames(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_file, "MOST_FRAMES", 5)
    for _ in range(13):
        owner.beat()
    there = LiveReader(owner.path)
    looks = [there.look() for _ in range(4)]
    assert [len(news.frames) for news in looks] == [5, 5, 3, 0]
    assert not any(news.is_alive for news in looks), "all of it was there at the first look"
    owner.beat()
    assert there.look().is_alive


def test_what_a_bounded_look_left_is_no_heartbeat(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(13):
        owner.beat()
    there = LiveReader(owner.path)
    monkeypatch.setattr(live_file, "MOST_READ_BYTES", 100)
    while (news := there.look()).frames:
        assert not news.is_alive
    owner.beat()
    assert there.look().is_alive


def test_an_idle_units_file_is_taken_at_one_look(owner: Owner) -> None:
    owner.put(*range(PLACES))
    most = 0
    for step in range(1200):
        owner.beat()
        if step % 50 == 49:
            most = max(most, len(LiveReader(owner.path).look().frames))
    assert 400 < most <= live_file.MOST_BEATS + 1 < live_file.MOST_FRAMES
    assert owner.writer._edition == 3


def test_places_beyond_the_bound_are_not_shown(tmp_path: Path) -> None:
    board = c_ext.SlotBoard(30)
    rows = BoardRows(board, 20)
    assert len(rows) == 20
    at, none = np.array([19, 20], np.int32), np.zeros(2, np.uint64)
    board.note(at, np.array([4, 4], np.uint32), none, none, 0)
    board.show(at, 0, np.arange(32, dtype=np.uint8).reshape(2, 16))
    assert rows.everything()[1]["place"].tolist() == [19]


def bad_rows(owner: Owner, monkeypatch: pytest.MonkeyPatch, change: Callable[[PlacedRows], None]) -> Follower:
    owner.put(1)
    owner.beat()
    there = Follower(owner.path)
    there.look()
    rows = np.zeros(1, PLACED)
    rows["tokens"] = 4
    change(rows)
    monkeypatch.setattr(owner.rows, "changes", lambda: (3, rows))
    owner.beat()
    assert not there.look()
    return there


@pytest.mark.parametrize(
    ("name", "value"), [("place", PLACES), ("place", 2**32 - 1), ("tokens", 5), ("group", 1)]
)
def test_rows_that_no_unit_writes_are_refused(
    owner: Owner, monkeypatch: pytest.MonkeyPatch, name: str, value: int
) -> None:
    there = bad_rows(owner, monkeypatch, lambda rows: rows.__setitem__(name, value))
    assert there.fault == "a frame of it is no heartbeat"
    assert there.now == owner.now


def test_a_file_that_is_too_long_is_not_read(owner: Owner) -> None:
    owner.beat()
    os.truncate(owner.path, live_file.MOST_FILE_BYTES + 1)
    with pytest.raises(DiskError, match="it is longer than"):
        LiveReader(owner.path).look()


def test_a_file_without_permission_is_named(owner: Owner) -> None:
    owner.beat()
    owner.path.chmod(0)
    if os.geteuid() != 0:
        with pytest.raises(PermissionError):
            LiveReader(owner.path).look()
        return
    os.chown(owner.path, 12345, -1)
    with pytest.raises(DiskError, match="it is not a file of user 0"):
        LiveReader(owner.path).look()


def test_only_its_user_may_read_the_file(owner: Owner) -> None:
    owner.beat()
    assert owner.path.stat().st_mode & 0o077 == 0


# --- the head, which describes the owner of a file ---


def test_a_head_survives_its_way() -> None:
    assert decode_head(HEAD.encode()) == HEAD


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"machine": ""}, "machine is ''"),
        ({"machine": 7}, "machine is 7"),
        ({"host": "x" * 300}, "host is"),
        ({"host": "a\nb"}, "host is"),
        ({"beat_s": 0.0}, "beat_s is 0.0"),
        ({"beat_s": 1e9}, "beat_s is"),
        ({"beat_s": float("nan")}, "beat_s is nan"),
        ({"beat_s": True}, "beat_s is True"),
        ({"places": 0}, "places is 0"),
        ({"places": MOST_PLACES + 1}, "places is"),
        ({"places": 1.5}, "places is 1.5"),
        ({"card": replace(CARD, disk=None)}, "expected 1 to 64 folders"),
        ({"card": replace(CARD, disk=SharedDisk(0, ()))}, "expected 1 to 64 folders"),
        ({"card": replace(CARD, disk=SharedDisk(0, ("a/b/c",) * 65))}, "expected 1 to 64 folders"),
        ({"card": replace(CARD, disk=SharedDisk(0, ("/etc/a/b",)))}, "a folder is '/etc/a/b'"),
        ({"card": replace(CARD, disk=SharedDisk(0, ("a/../b",)))}, "a folder is 'a/../b'"),
        ({"card": replace(CARD, disk=SharedDisk(0, ("a",)))}, "a folder is 'a'"),
        ({"card": replace(CARD, disk=SharedDisk(0, ("a/\ud800/b",)))}, "a folder is 'a/"),
        ({"card": replace(CARD, groups=(replace(CARD.groups[0], block_tokens=-1),))}, "block_tokens is -1"),
        ({"card": replace(CARD, groups=())}, "0 KV groups; allowed are 1 to 64"),
    ],
)
def test_a_head_that_no_unit_writes_is_refused(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ContractError, match=reason):
        decode_head(replace(HEAD, **change).encode())


@pytest.mark.parametrize("text", [b"", b"{}", b"[]", b"\xff", b"[" * 60_000, b'{"card":{"protocol":9}}'])
def test_what_names_no_unit_is_refused(text: bytes) -> None:
    with pytest.raises(ContractError):
        decode_head(text)
