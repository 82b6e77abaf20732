"""Measures the rate that a folder's disk reaches without flexkv's lanes. Several threads read one file at the same
time, with large reads."""

from __future__ import annotations

import itertools
import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CALL_BYTES = 2 << 20
"""Bytes per read: enough that the cost of a system call is negligible."""
THREADS = 8
"""Number of reads in flight at once. NVMe disks reach their full rate with fewer reads of 2 MiB."""


class BareReads:
    """A file in `folder`, and the threads that read it. The reads bypass the page cache if the file system allows it.

    Args:
        total_bytes: size of the file, rounded down to a multiple of `CALL_BYTES`, but at least `CALL_BYTES`.

    Raises:
        OSError: the folder's file system is full, or the folder cannot be written.
    """

    def __init__(self, folder: Path, total_bytes: int) -> None:
        self.calls = max(1, total_bytes // CALL_BYTES)
        path = folder / "bare"
        with path.open("wb") as file:
            for number in range(self.calls):
                file.write(bytes([number % 251]) * CALL_BYTES)
            file.flush()
            os.fsync(file.fileno())
        self._fd, self.direct = _open_direct(path)
        self._buffers = [mmap.mmap(-1, CALL_BYTES) for _ in range(min(THREADS, self.calls))]
        self._threads = ThreadPoolExecutor(len(self._buffers), "bare-read")

    @property
    def bytes(self) -> int:
        return self.calls * CALL_BYTES

    def once(self) -> float:
        """Reads the whole file once and returns the seconds that it took.

        Raises:
            OSError: a read failed or was short.
        """
        turns = itertools.count()
        start = time.perf_counter()
        for done in [self._threads.submit(self._read, buffer, turns) for buffer in self._buffers]:
            done.result()
        return time.perf_counter() - start

    def close(self) -> None:
        self._threads.shutdown()
        os.close(self._fd)
        for buffer in self._buffers:
            buffer.close()

    def _read(self, buffer: mmap.mmap, turns: itertools.count[int]) -> None:
        # next() of an itertools.count is atomic, so all threads take their numbers from one count.
        while (number := next(turns)) < self.calls:
            got = os.preadv(self._fd, [buffer], number * CALL_BYTES)
            if got != CALL_BYTES or buffer[0] != number % 251:
                raise OSError(f"bare read {number}: {got} bytes of {CALL_BYTES}")


def _open_direct(path: Path) -> tuple[int, bool]:
    """Opens the file. Returns its descriptor, and whether reads bypass the page cache, which some file systems
    refuse."""
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECT), True
    except OSError:
        return os.open(path, os.O_RDONLY), False
