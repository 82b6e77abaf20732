"""The file through which units on other machines follow a unit. It lies in the unit's folder, identifies the unit,
shows that the unit is running, and lists the pages in the unit's folders.

The file begins with a header and a frame that identifies the unit. Each heartbeat appends frames with the places that
have changed. Before the file grows too long, a new file replaces it. This is the next *edition*, which begins with all
places that hold a page. Each start of the unit begins a new *session*. Only the unit that holds the folder's lock
writes the file. Readers take no lock: each frame has a digest, and a row is only a hint, because each page on disk
identifies itself.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import numpy as np

from flexkv import c_ext
from flexkv.errors import ContractError, DiskError
from flexkv.peers.board_rows import PLACED, BoardRows, PlacedRows
from flexkv.peers.card import MOST_CARD_BYTES, UnitCard, decode_card, name_of
from flexkv.storage.frame_log import FRAME, framed, write_all
from flexkv.storage.private_files import open_private

LIVE_NAME = "live.rows"

MAGIC = b"FKVLIVE2"
SESSION_BYTES = 16
HEADER = struct.Struct("<8s16sQQ")
"""The file's header: magic, session, edition, digest of these three."""
BEAT = struct.Struct("<QII")
"""The start of a frame: number of the heartbeat, epoch, number of rows that follow."""

MOST_PLACES = 262_144
"""The maximum number of a unit's places (slots on disk) that are shown to other machines; their rows take 11 MiB. A
reader's index has room for the same number of pages, counted over all its peers.
"""
MOST_HEAD_BYTES = MOST_CARD_BYTES + (4 << 10)
ROWS_PER_FRAME = 4096
MOST_FRAME_BYTES = max(MOST_HEAD_BYTES, BEAT.size + ROWS_PER_FRAME * PLACED.itemsize)
APPENDED_BYTES = 4 << 20
"""The maximum number of bytes that are appended to a file before a new file (the next edition) replaces it."""
MOST_FILE_BYTES = 64 << 20
"""The maximum length of a file, in bytes. A longer file was not written by a unit: an edition begins with up to 11 MiB
of rows, and one heartbeat adds up to 11 MiB.
"""
MOST_READ_BYTES = 16 << 20
"""The maximum number of bytes that one call of `LiveReader.look` reads from a file. The next call reads the bytes that
follow.
"""
MOST_FRAMES = 1024
"""The maximum number of frames that one call of `LiveReader.look` reads from a file."""
MOST_BEATS = 512
"""A new edition replaces the file after this many heartbeats. An idle unit writes only heartbeats, so one call of
`look` can read all frames of its file.
"""

MOST_NAME = 255
MOST_FOLDERS = 64
FOLDER_PARTS = 3
"""The number of components of the path that leads from the folder that all machines see to a unit's folder: the folder
in `disk.folders`, the model's folder and the unit's folder.
"""

LEAST_BEAT_S, MOST_BEAT_S = 0.05, 60.0


@dataclass(frozen=True, slots=True)
class LiveHead:
    """The frame at the start of a unit's file, which identifies the unit and its machine.

    Attributes:
        card: the unit's description. The folders in it are relative to the folder that all machines see.
        machine: id of the unit's machine: the random number that its kernel drew at boot.
        host: name of the machine, for users.
        beat_s: seconds between the unit's heartbeats.
        places: number of slots on the unit's disks. The rows in the file's frames name slots below this number.
    """

    card: UnitCard
    machine: str
    host: str
    beat_s: float
    places: int

    @property
    def whom(self) -> str:
        """The unit's name for users, with its machine."""
        return f"{name_of(self.card.short())} of {self.host}"

    def encode(self) -> bytes:
        told = {"machine": self.machine, "host": self.host, "beat_s": self.beat_s, "places": self.places}
        return json.dumps(told | {"card": json.loads(self.card.encode())}, separators=(",", ":")).encode()


def decode_head(text: bytes) -> LiveHead:
    """Returns the description of a unit in the first frame of its file.

    Raises:
        ContractError: the frame does not describe a unit; the message says what is wrong.
    """
    try:
        told = json.loads(text)
        card = decode_card(json.dumps(told.pop("card")).encode())
        head = LiveHead(card=card, **told)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ContractError(f"its file names no unit: {type(error).__name__}: {error}") from error
    for name, word in (("machine", head.machine), ("host", head.host)):
        if not isinstance(word, str) or not 0 < len(word) <= MOST_NAME or not word.isprintable():
            raise ContractError(f"its file: {name} is {word!r}, expected 1 to {MOST_NAME} characters")
    is_number = isinstance(head.beat_s, float) and math.isfinite(head.beat_s)
    if not is_number or not LEAST_BEAT_S <= head.beat_s <= MOST_BEAT_S:
        raise ContractError(f"its file: beat_s is {head.beat_s!r}, expected {LEAST_BEAT_S} to {MOST_BEAT_S}")
    if type(head.places) is not int or not 0 < head.places <= MOST_PLACES:
        raise ContractError(f"its file: places is {head.places!r}, expected 1 to {MOST_PLACES}")
    if card.host is not None or card.disk is None or not 0 < len(card.disk.folders) <= MOST_FOLDERS:
        raise ContractError(f"its file: expected 1 to {MOST_FOLDERS} folders, and no host memory")
    for folder in card.disk.folders:
        parts = PurePosixPath(folder).parts
        is_below = len(parts) == FOLDER_PARTS and not any(part in ("/", "..") for part in parts)
        if not is_below or not folder.isprintable():
            raise ContractError(
                f"its file: a folder is {folder!r}, expected {FOLDER_PARTS} names below another"
            )
    return head


class LiveWriter:
    """Writes the file of this unit. Only one thread may use it, but any thread may call `end`. Precondition: this
    process holds the folder's lock.
    """

    def __init__(self, path: Path, head: LiveHead, rows: BoardRows) -> None:
        self._path, self._head, self._rows = path, head, rows
        self.session = secrets.token_bytes(SESSION_BYTES)
        self._edition = self._beat = self._bytes = self._most = self._replaced_at = 0
        self._file = (0, 0)
        """Device and inode of the file that this session (since the unit's start) wrote last."""
        self._ended = False

    def end(self) -> None:
        """Ensures that the file is not replaced any more. Any thread may call this."""
        self._ended = True

    def beat(self) -> None:
        """Appends a heartbeat and the places that have changed. It is possible that other machines see them only after
        this process has closed the file.

        Raises:
            OSError: the file could not be written. The next call then writes a new edition.
        """
        self._beat += 1
        if not 0 < self._bytes <= self._most or self._beat - self._replaced_at > MOST_BEATS:
            self._replace()
            return
        added = b"".join(self._frames(*self._rows.changes()))
        written, self._bytes = self._bytes, 0
        try:
            fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            self._replace()
            return
        try:
            found = os.fstat(fd)
            is_same = (found.st_dev, found.st_ino, found.st_size) == (*self._file, written)
            if is_same:
                write_all(fd, added)
        finally:
            os.close(fd)
        if is_same:
            self._bytes = written + len(added)
        else:
            self._replace()

    def _replace(self) -> None:
        self._bytes = 0
        self._edition += 1
        named = HEADER.pack(MAGIC, self.session, self._edition, 0)[:-8]
        content = named + struct.pack("<Q", c_ext.run_digest(named)) + framed(self._head.encode())
        content += b"".join(self._frames(*self._rows.everything()))
        path = self._path.with_name(f"{LIVE_NAME}.new")
        fd = open_private(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW)
        try:
            write_all(fd, content)
            found = os.fstat(fd)
        finally:
            os.close(fd)
        if self._ended:
            return  # while a file server blocked this thread, another process may have locked the folder
        os.replace(path, self._path)
        self._file = (found.st_dev, found.st_ino)
        self._bytes, self._most = len(content), len(content) + APPENDED_BYTES
        self._replaced_at = self._beat

    def _frames(self, epoch: int, rows: PlacedRows) -> Iterator[bytes]:
        for first in range(0, max(1, len(rows)), ROWS_PER_FRAME):
            part = rows[first : first + ROWS_PER_FRAME]
            yield framed(BEAT.pack(self._beat, epoch, len(part)) + part.tobytes())

    def remove(self) -> None:
        """Removes the file if this session has written it.

        Raises:
            OSError: the file cannot be removed.
        """
        self._path.with_name(f"{LIVE_NAME}.new").unlink(missing_ok=True)
        try:
            with open_live(self._path) as file:
                is_own = session_of(file.read(HEADER.size))[0] == self.session
        except (FileNotFoundError, DiskError):
            return
        if is_own:
            self._path.unlink(missing_ok=True)


class LiveFile:
    """A unit's file, opened for reading. The end of a `with` statement closes it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.bytes = os.fstat(fd).st_size
        self._at = 0

    def __enter__(self) -> LiveFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def seek(self, at: int) -> None:
        self._at = at

    def read(self, most: int) -> bytes:
        """Returns the next `most` bytes; fewer at the end of the file."""
        found = os.pread(self._fd, most, self._at)
        self._at += len(found)
        return found


def open_live(path: Path) -> LiveFile:
    """Opens another unit's file for reading.

    Raises:
        OSError: the file cannot be opened.
        DiskError: it is not a regular file of this user, or is longer than MOST_FILE_BYTES.
    """
    # O_NONBLOCK, because a pipe may have this name, and opening it must not block.
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise DiskError(f"it is not a file of user {os.geteuid()}")
        if found.st_size > MOST_FILE_BYTES:
            raise DiskError(f"it is longer than {MOST_FILE_BYTES} bytes")
        return LiveFile(fd)
    except BaseException:
        os.close(fd)
        raise


def session_of(header: bytes) -> tuple[bytes, int]:
    """Returns the session's id and the edition's number from a file's header.

    Raises:
        DiskError: the header is incomplete, damaged, or of another version.
    """
    if len(header) < HEADER.size:
        raise DiskError("its header is not whole")
    magic, session, edition, digest = HEADER.unpack(header)
    if magic != MAGIC:
        raise DiskError("it is of another version")
    if digest != c_ext.run_digest(header[:-8]):
        raise DiskError("its header is damaged")
    return session, edition


@dataclass(slots=True)
class LiveNews:
    """The result of one call of `LiveReader.look`.

    Attributes:
        is_new: whether a new session (another start of the unit) has begun since the last call.
        is_alive: whether a heartbeat was added since the last call. False for a new session. Also False if the last
            call did not reach the file's end: the unit may have written the rest long ago and then ended.
        is_all: True if places that are not in `frames` hold no page; False if such places are unchanged.
        frames: epoch and rows of each frame, in the file's order.
        fault: what is wrong with the next frame; if there is a fault, the rest of the file was not read. Empty if there
            is none.
    """

    is_new: bool = False
    is_alive: bool = False
    is_all: bool = False
    frames: list[tuple[int, PlacedRows]] = field(default_factory=list)
    fault: str = ""


class LiveReader:
    """Follows another unit's file. If a call of `look` raises an error, the reader's state does not change.

    Args:
        skip_machine: id of a machine; the rows of its units are not read. Empty to read the rows of all units.

    Attributes:
        head: the unit, as the current session's file describes it; None before the first call of `look`.
    """

    def __init__(self, path: Path, skip_machine: str = "") -> None:
        self._path, self._skip_machine = path, skip_machine
        self.head: LiveHead | None = None
        self._session = b""
        self._edition = self._beat = self._at = 0
        self._reached_end = False

    def rewind(self) -> None:
        """Makes the next call of `look` read the file from its start."""
        self._at = 0

    def look(self) -> LiveNews:
        """Reads the frames that were added since the last call.

        Raises:
            FileNotFoundError: the file does not exist.
            OSError: the file cannot be read.
            DiskError: the file's start is damaged, or the file is older than the copy that was read before.
            ContractError: the file does not describe a unit.
        """
        with open_live(self._path) as file:
            session, edition = session_of(file.read(HEADER.size))
            news = LiveNews(is_new=session != self._session)
            if not news.is_new and (edition, file.bytes) < (self._edition, self._at):
                raise DiskError("an older copy of it was read, or it was cut")
            news.is_all = news.is_new or edition != self._edition or self._at == 0
            if news.is_all:
                head, at = self._begin(file, news.is_new)
            else:
                assert self.head is not None
                head, at = self.head, self._at
            file.seek(at)
            content = b"" if head.machine == self._skip_machine else file.read(MOST_READ_BYTES)
        taken, beat = self._take(content, head, news)
        # These attributes are set last: if the read or the close fails, the next call must still report the session as
        # new.
        self.head, self._session, self._edition = head, session, edition
        self._at, self._beat = at + taken, beat
        self._reached_end = len(content) < MOST_READ_BYTES and len(news.frames) < MOST_FRAMES
        return news

    def _begin(self, file: LiveFile, is_new: bool) -> tuple[LiveHead, int]:
        """Reads which unit the file describes. Returns the unit, and the offset of the first heartbeat."""
        content = file.read(FRAME.size + MOST_HEAD_BYTES)
        first, fault = _frame_at(content, 0)
        if first is None:
            raise DiskError(fault or "the frame that names its unit is not whole")
        head = decode_head(first)
        if not is_new and head != self.head:
            raise DiskError("two editions of one session name different units")
        return head, HEADER.size + FRAME.size + len(first)

    def _take(self, content: bytes, head: LiveHead, news: LiveNews) -> tuple[int, int]:
        """Adds the complete frames in `content` to `news`. Returns the length of these frames in bytes, and the number
        of the last heartbeat.
        """
        before = 0 if news.is_new else self._beat
        at, last = 0, before
        while len(news.frames) < MOST_FRAMES:
            frame, news.fault = _frame_at(content, at)
            if frame is None:
                break
            beat, epoch, rows = _rows_of(frame, head)
            if rows is None or (not news.is_all and beat < last):
                news.fault = "a frame of it is no heartbeat"
                break
            last = max(last, beat)
            news.frames.append((epoch, rows))
            at += FRAME.size + len(frame)
        news.is_alive = last > before and not news.is_new and self._reached_end
        return at, last


def _frame_at(content: bytes, at: int) -> tuple[bytes | None, str]:
    """Returns the frame at offset `at` and an empty text. If there is no good frame there, returns None and a text that
    says what is wrong; this text is empty if the frame is merely not complete yet.
    """
    if len(content) < at + FRAME.size:
        return None, ""
    length, zero, digest = FRAME.unpack_from(content, at)
    if zero or not 0 < length <= MOST_FRAME_BYTES:
        return None, "a frame of it is damaged"
    frame = content[at + FRAME.size : at + FRAME.size + length]
    if len(frame) < length:
        return None, ""
    if c_ext.run_digest(frame) != digest:
        return None, "a frame of it is damaged"
    return frame, ""


def _rows_of(frame: bytes, head: LiveHead) -> tuple[int, int, PlacedRows | None]:
    """Returns the heartbeat's number, the epoch and the rows of a frame. If the frame is malformed, the rows are
    None.
    """
    if len(frame) < BEAT.size:
        return 0, 0, None
    beat, epoch, count = BEAT.unpack_from(frame)
    if count > ROWS_PER_FRAME or len(frame) != BEAT.size + count * PLACED.itemsize:
        return 0, 0, None
    rows = np.frombuffer(frame, PLACED, offset=BEAT.size)
    groups = head.card.groups
    if (rows["place"] >= head.places).any() or (rows["group"] >= len(groups)).any():
        return 0, 0, None
    most = np.array([group.block_tokens for group in groups], np.uint32)
    if (rows["tokens"] > most[rows["group"]]).any():
        return 0, 0, None
    return beat, epoch, rows
