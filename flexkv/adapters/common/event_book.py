"""The event book: a file beside the pages on a unit's disks. For each page, it contains the description that KV events
carry, so that the next process can announce the pages that it finds on disk.

A separate thread reads and writes the file. An entry describes a page, but does not prove that the page still exists,
so the caller checks the disk index. If an entry is lost, the only consequence is that its page is not announced.

After a crash, the index may still list a page whose slot was being overwritten. Therefore the file also records which
pages left the disks, and each entry has its page's generation, so that the caller can make the disks forget an older
copy of the page. If the record of a page's removal is lost, too, the page stays announced until a request tries to read
it.
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
"""First byte of a frame. After STORED, packed entries follow; after GONE, the keys of pages that left the disks."""

FRAME_PAGES = 1024
"""Largest number of pages in a frame of the file, and in a batch of found pages. Processing a batch takes about 0.4 ms
of the engine's step."""

MAX_WAITING = 65_536
"""Largest number of records that may wait to be written; further records are dropped. A full queue takes about 13 MB at
16 tokens per block."""

MAX_FOUND = 4
"""Largest number of batches of found pages that may wait for the engine's thread to take them."""

SLACK_RECORDS = 16_384
"""Number of records (about 2 MB) that the file may have in addition to RECORDS_PER_PAGE records for each page on disk.
A file with more records is rewritten."""

RECORDS_PER_PAGE = 4
"""Number of records that the file may have for each page on disk; see SLACK_RECORDS. While pages come and go, half of
the records say that a page left."""

MOST_GROWTH = 8
"""If the file cannot be rewritten, it is emptied when its records exceed this multiple of the number at which the
rewrite was due."""

PIECE_BYTES = 256 << 10
PAUSE_S = 0.001
"""After each PIECE_BYTES of the file (some 1,300 blocks of 16 tokens), the thread sleeps for PAUSE_S seconds, so that
the engine's thread can run."""

LOCK_S = 10.0
"""Seconds that the thread waits for an earlier process that is still closing the folder and has the file locked."""

CLOSE_S = 5.0
"""Seconds that `close` waits for the last records to be written."""

HEAD = struct.Struct(f"<{KEY_BYTES}sIQI")
"""Head of a packed entry: key, KV group, generation, and the length in bytes of the words that follow."""


class Entry(NamedTuple):
    """An entry of the file. It states that a page was on disk in this generation. Since then, the page may have been
    rewritten in a later generation, or may have left the disks.

    Attributes:
        key: the page's index key.
        group: number of the KV group.
        generation: generation of the page on disk.
        words: the page's description in events, packed by the adapter.
    """

    key: bytes
    group: int
    generation: int
    words: bytes

    def packed(self) -> bytes:
        """The entry as bytes, as in the file."""
        return HEAD.pack(self.key, self.group, self.generation, len(self.words)) + self.words


class _Closing(Exception):
    """Raised to stop rewriting the file when the book is closed, because the next process can rewrite it."""


class EventBook:
    """The event book's file, and the thread that reads and writes it. The engine's thread calls the public methods.
    Only `close` waits for the file.

    Args:
        path: path of the file.
        identity: identifies the meaning of `Entry.words`; IDENTITY_BYTES (see `frame_log`) long. A file with a
            different identity is emptied.
        is_current: returns whether the page of an entry is on disk in the entry's generation. The book's thread calls
            it.
        most_pages: returns an upper bound of the number of pages for which `is_current` is true. The book's thread
            calls it.
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
        """Records that wait to be written. Each is (STORED, packed entry) or (GONE, key)."""
        self._is_read = False
        self._closing = False
        self._dropped = 0
        self._records = 0
        """Number of records in the file. Only the book's thread uses this and the attributes below."""
        self._shrinks_at = 0
        """After a rewrite has failed, the number of records at which it is tried again; otherwise 0."""
        self._has_failed = False
        self._thread = NamedThread("flexkv-events", self._run)
        self._thread.start()

    @property
    def is_settled(self) -> bool:
        """Whether the whole file has been read and `take` has returned all its entries."""
        return self._is_read and not self._found

    def take(self) -> list[Entry]:
        """Removes and returns the next batch of entries read from the file; empty if none is ready."""
        if not self._found:
            return []
        with self._lock:
            found = self._found.popleft()
            self._lock.notify()
        return found

    def put(self, entries: Iterable[Entry]) -> None:
        """Queues entries of pages that were written to the disks. The thread writes the entries to the file. If the
        queue is full, entries are dropped."""
        self._put([(STORED, entry.packed()) for entry in entries])

    def drop(self, keys: Iterable[bytes]) -> None:
        """Queues records that state that these pages left the disks, whether or not the file lists the pages. If the
        queue is full, records are dropped."""
        self._put([(GONE, key) for key in keys])

    def _put(self, records: list[tuple[bytes, bytes]]) -> None:
        if not self._thread.is_alive():
            return  # the thread has logged why it stopped
        with self._lock:
            room = 0 if self._closing else MAX_WAITING - len(self._waiting)
            self._waiting += records[:room]
            self._dropped += max(0, len(records) - room)
            self._lock.notify()

    def close(self, wait_s: float = CLOSE_S) -> None:
        """Stops the thread, and waits up to `wait_s` seconds until it has written the queued records."""
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

    # --- the book's thread ---

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
            # The file is rewritten only after `take` has returned all its entries, because an entry that was not taken
            # yet does not count as current, and would be left out. It is not rewritten while the book is being closed,
            # because the next process can do that.
            limit = RECORDS_PER_PAGE * self._most_pages() + SLACK_RECORDS
            if self._records > max(limit, self._shrinks_at) and self.is_settled and not self._closing:
                self._attempt(partial(self._shrink_or_wait, MOST_GROWTH * limit), log)

    def _attempt(self, work: Callable[[FrameLog], None], log: FrameLog) -> None:
        """Calls `work`. If it fails, empties the file, because otherwise the next process would trust entries of pages
        that have left the disks.

        Raises:
            OSError: the file cannot be emptied.
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
        """Passes to the engine's thread all entries whose pages have not left the disks according to later records.
        Between frames, writes the queued records."""
        frames, gone = 0, dict[bytes, int]()
        for frame in self._paced(log.frames()):
            if frame.startswith(GONE):
                gone |= dict.fromkeys(_keys_of(frame), frames)
            frames += 1
        # The second pass stops where the first one did, because this process itself wrote the frames after that.
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
        """Adds a batch for `take`. While MAX_FOUND batches wait to be taken, waits and writes the queued records."""
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
        """Appends the queued records to the file."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for frame in _frames(waiting):
            log.append(frame)
        self._records += len(waiting)

    def _shrink_or_wait(self, most_records: int, log: FrameLog) -> None:
        """Rewrites the file. If that fails, goes on with the unchanged file, and tries again when the file has twice as
        many records.

        Raises:
            OSError: the rewrite failed, and the file has more than `most_records` records.
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
        """Rewrites the file with one entry for each page that is still on disk. Stops if the book is closed
        meanwhile."""
        kept: set[bytes] = set()

        def entries() -> Iterator[tuple[bytes, bytes]]:
            for frame in self._paced(log.frames()):
                if self._closing:
                    raise _Closing
                for entry in () if frame.startswith(GONE) else _entries_of(frame):
                    # An entry with an older generation is left out: after a crash, the index may still list the older
                    # copy of the page, and the entry would then be trusted.
                    if entry.key not in kept and self._is_current(entry):
                        kept.add(entry.key)
                        yield STORED, entry.packed()

        try:
            log.replace(_frames(entries()))
        except _Closing:
            return
        self._records = len(kept)

    def _paced(self, frames: Iterable[bytes]) -> Iterator[bytes]:
        """Yields the frames, and sleeps from time to time so that the engine's thread can run."""
        passed = 0
        for frame in frames:
            yield frame
            passed += len(frame)
            if passed >= PIECE_BYTES and not self._closing:
                time.sleep(PAUSE_S)
                passed = 0


def _frames(records: Iterable[tuple[bytes, bytes]]) -> Iterator[bytes]:
    """Packs records into frames, in order; each frame has records of one kind (STORED or GONE)."""
    for kind, of_kind in itertools.groupby(records, lambda record: record[0]):
        while batch := [content for _, content in itertools.islice(of_kind, FRAME_PAGES)]:
            yield kind + b"".join(batch)


def _entries_of(frame: bytes) -> Iterator[Entry]:
    """Yields the entries of a frame that begins with STORED.

    Raises:
        ValueError: the frame is not a sequence of complete entries.
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
