"""Records, beside a unit's disk pages, what KV events say about them, so that the next process can announce what it
finds.

A thread of its own reads and writes the file. A lost entry only leaves a page unannounced: an entry says how events
describe a key, which stays true, and the caller asks the index whether the page is there. After a crash the index may
still list a page whose place was being overwritten, so the file also records which pages left, and an entry has its
page's generation: the caller makes the disks forget an older page. If a record of what left is lost as well, the page
stays announced until a request reads it.
"""

from __future__ import annotations

import itertools
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from flexkv.errors import FlexKVError
from flexkv.facts.keys import KEY_BYTES
from flexkv.observe import NamedThread, get_logger
from flexkv.storage.frame_log import FrameLog

logger = get_logger(__name__)

BOOK_NAME = "announced"

STORED, GONE = b"\x01", b"\x02"
"""First byte of a frame: packed entries follow, or the keys of pages that left the disks."""

FRAME_PAGES = 1024
"""Most pages of a frame, and of a batch of found pages: some 0.4 ms of the engine's step."""

MAX_WAITING = 65_536
"""Most records that wait to be written; further ones are not kept. Some 13 MB at 16 tokens a block."""

MAX_FOUND = 4
"""Most batches of found pages that wait for the engine."""

SLACK_RECORDS = 16_384
"""The file is rewritten once it has more records than four times the pages on disk and this: some 2 MB."""

RECORDS_PER_PAGE = 4
"""While pages come and go, half of the records say what left."""

MOST_GROWTH = 8
"""A file that cannot be rewritten begins anew once it has this many times the records at which rewriting was due."""

PIECE_BYTES = 256 << 10
PAUSE_S = 0.001
"""After each PIECE_BYTES of the file, some 1,300 blocks at 16 tokens, the thread sleeps this long, so that the engine's
thread can run."""

LOCK_S = 10.0
"""How long the thread waits for a process that still closes the folder."""

CLOSE_S = 5.0
"""How long a close waits for the last pages to be written."""

HEAD = struct.Struct(f"<{KEY_BYTES}sIQI")
"""Begins a packed entry: key, KV group, generation, bytes of the words that follow."""


class Entry(NamedTuple):
    """What the file says of one page, which is on disk in this generation or a later one, unless it has left.

    Attributes:
        group: number of the KV group.
        generation: generation of the page on disk.
        words: what events say about it, in the adapter's form.
    """

    key: bytes
    group: int
    generation: int
    words: bytes

    def packed(self) -> bytes:
        """The entry as in the file."""
        return HEAD.pack(self.key, self.group, self.generation, len(self.words)) + self.words


class _Closing(Exception):
    """Raised to end a rewrite of the file at a close, because the rewrite can wait."""


class EventBook:
    """The engine's thread calls everything but `_run`; no call waits but `close`.

    Args:
        identity: what the words mean, IDENTITY_BYTES of `frame_log`; a file with another identity is begun anew.
        is_current: tells whether the page of an entry is on disk in the entry's generation; the thread calls it.
        most_pages: the most pages for which that may be so; the thread calls it.
    """

    def __init__(
        self,
        path: Path,
        identity: bytes,
        is_current: Callable[[Entry], bool],
        most_pages: Callable[[], int],
    ) -> None:
        self._path, self._identity = path, identity
        self._is_current, self._most_pages = is_current, most_pages
        self._lock = threading.Condition()
        self._found: deque[list[Entry]] = deque()
        self._waiting: list[tuple[bytes, bytes]] = []
        """First byte of the frame, and a packed entry or a key."""
        self._is_read = False
        self._closing = False
        self._dropped = 0
        self._records = 0
        """Records in the file; the thread's own, like those below."""
        self._shrinks_at = 0
        """Records below which a rewriting that failed is not tried again."""
        self._has_failed = False
        self._thread = NamedThread("flexkv-events", self._run)
        self._thread.start()

    @property
    def is_settled(self) -> bool:
        """Whether every page that the file names has been taken."""
        return self._is_read and not self._found

    def take(self) -> list[Entry]:
        """Takes some pages that the file names; empty if none are ready."""
        if not self._found:
            return []
        with self._lock:
            found = self._found.popleft()
            self._lock.notify()
        return found

    def put(self, entries: Iterable[Entry]) -> None:
        """Keeps entries of pages that came to the disks. Drops what finds no room."""
        self._put([(STORED, entry.packed()) for entry in entries])

    def drop(self, keys: Iterable[bytes]) -> None:
        """Records pages that left the disks; the file need not name them. Drops records if there is no room."""
        self._put([(GONE, key) for key in keys])

    def _put(self, records: list[tuple[bytes, bytes]]) -> None:
        if not self._thread.is_alive():
            return  # the reason is logged already
        with self._lock:
            room = 0 if self._closing else MAX_WAITING - len(self._waiting)
            self._waiting += records[:room]
            self._dropped += max(0, len(records) - room)
            self._lock.notify()

    def close(self, wait_s: float = CLOSE_S) -> None:
        """Writes the waiting records, for at most `wait_s` seconds."""
        with self._lock:
            self._closing = True
            self._lock.notify()
        self._thread.join(wait_s)
        if self._thread.is_alive():
            logger.warning(
                "%s: not all that was announced is written; the next start announces less", self._path
            )
        elif self._dropped:
            logger.warning(
                "%s: %d records found no room in the queue; the next start does not announce their pages",
                self._path,
                self._dropped,
            )

    # --- the thread ---

    def _run(self) -> None:
        try:
            log = FrameLog(self._path, self._identity, LOCK_S, lambda: self._closing)
            try:
                if log.was_other:
                    logger.warning(
                        "%s: what is on disk is not announced to routers: the process that stored it had other block "
                        "hashes (the engine's or flexkv's version, the hash function or its seed: under vLLM "
                        "--prefix-caching-hash-algo and PYTHONHASHSEED), so its names mean nothing now",
                        self._path,
                    )
                if log.was_damaged:
                    logger.warning("%s: its header is damaged; what is on disk is not announced", self._path)
                self._serve(log)
            finally:
                log.close()
        except (FlexKVError, OSError) as error:
            logger.warning("the next start announces less of what is on disk: %s", error)
        finally:
            with self._lock:
                self._is_read = True

    def _serve(self, log: FrameLog) -> None:
        self._attempt(self._read, log)
        with self._lock:
            self._is_read = True
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    return
            self._attempt(self._write, log)
            # Only once all found pages are taken, because entries of the others do not count as current before. Not
            # while the engine ends: the next process can do it.
            limit = RECORDS_PER_PAGE * self._most_pages() + SLACK_RECORDS
            if self._records > max(limit, self._shrinks_at) and self.is_settled and not self._closing:
                self._attempt(partial(self._shrink_or_wait, MOST_GROWTH * limit), log)

    def _attempt(self, work: Callable[[FrameLog], None], log: FrameLog) -> None:
        """If the work fails, begins the file anew, because otherwise the next process would believe entries of pages
        that have left.

        Raises:
            OSError: the file cannot be cut.
        """
        try:
            work(log)
        except (OSError, ValueError) as error:
            log.clear()
            self._records = 0
            if not self._has_failed:
                logger.warning(
                    "%s begins anew; the next start announces only what is stored from now on: %s",
                    self._path,
                    error,
                )
            self._has_failed = True

    def _read(self, log: FrameLog) -> None:
        """Passes the file's entries whose pages have not left since to the engine, and writes waiting records
        meanwhile."""
        frames, gone = 0, dict[bytes, int]()
        for frame in self._paced(log.frames()):
            if frame.startswith(GONE):
                gone |= dict.fromkeys(_keys_of(frame), frames)
            frames += 1
        # No further than that, because frames of this process follow.
        for number, frame in itertools.islice(enumerate(self._paced(log.frames())), frames):
            if self._closing:
                return
            self._write(log)
            if frame.startswith(GONE):
                self._records += len(frame) // KEY_BYTES
                continue
            entries = list(_entries_of(frame))
            self._records += len(entries)
            if there := [entry for entry in entries if gone.get(entry.key, -1) < number]:
                self._offer(there, log)

    def _offer(self, found: list[Entry], log: FrameLog) -> None:
        """Waits until the engine has room for these pages, and writes what waits meanwhile."""
        while True:
            with self._lock:
                self._lock.wait_for(lambda: len(self._found) < MAX_FOUND or self._waiting or self._closing)
                if self._closing:
                    return
                if len(self._found) < MAX_FOUND:
                    self._found.append(found)
                    return
            self._write(log)

    def _write(self, log: FrameLog) -> None:
        """Appends what waits."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for frame in _frames(waiting):
            log.append(frame)
        self._records += len(waiting)

    def _shrink_or_wait(self, most_records: int, log: FrameLog) -> None:
        """Rewrites the file. If that fails, the file is used unchanged, and is rewritten at twice the size.

        Raises:
            OSError: the rewrite failed, and the file has more than `most_records`.
        """
        try:
            self._shrink(log)
            self._shrinks_at = 0
        except OSError as error:
            if self._records > most_records:
                raise
            if not self._shrinks_at:
                logger.warning("%s grows, because it cannot be rewritten: %s", self._path, error)
            self._shrinks_at = 2 * self._records

    def _shrink(self, log: FrameLog) -> None:
        """Rewrites the file with one entry for each page that is still on disk, unless the engine ends meanwhile."""
        kept: set[bytes] = set()

        def entries() -> Iterator[tuple[bytes, bytes]]:
            for frame in self._paced(log.frames()):
                if self._closing:
                    raise _Closing
                for entry in () if frame.startswith(GONE) else _entries_of(frame):
                    # An entry of an earlier page with this key would be believed where the index names that page.
                    if entry.key not in kept and self._is_current(entry):
                        kept.add(entry.key)
                        yield STORED, entry.packed()

        try:
            log.replace(_frames(entries()))
        except _Closing:
            return
        self._records = len(kept)

    def _paced(self, frames: Iterable[bytes]) -> Iterator[bytes]:
        """The frames, with pauses in which the engine's thread can run."""
        passed = 0
        for frame in frames:
            yield frame
            passed += len(frame)
            if passed >= PIECE_BYTES and not self._closing:
                time.sleep(PAUSE_S)
                passed = 0


def _frames(records: Iterable[tuple[bytes, bytes]]) -> Iterator[bytes]:
    """Frames of these records, in their order."""
    for kind, of_kind in itertools.groupby(records, lambda record: record[0]):
        while batch := [content for _, content in itertools.islice(of_kind, FRAME_PAGES)]:
            yield kind + b"".join(batch)


def _entries_of(frame: bytes) -> Iterator[Entry]:
    """The entries of a frame.

    Raises:
        ValueError: the frame contains anything else.
    """
    at = 1
    while at < len(frame):
        if len(frame) < at + HEAD.size:
            raise ValueError(f"an entry of {len(frame) - at} bytes; its head has {HEAD.size}")
        key, group, generation, words = HEAD.unpack_from(frame, at)
        end = at + HEAD.size + words
        if end > len(frame):
            raise ValueError(
                f"an entry whose {words} bytes of words end {end - len(frame)} bytes behind its frame"
            )
        yield Entry(key, group, generation, frame[at + HEAD.size : end])
        at = end


def _keys_of(frame: bytes) -> Iterator[bytes]:
    return (frame[at : at + KEY_BYTES] for at in range(1, len(frame), KEY_BYTES))
