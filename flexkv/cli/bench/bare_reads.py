"""Measures the rate that a folder's disk reaches by itself, with several large reads of one file at a time."""

from __future__ import annotations

import itertools
import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CALL_BYTES = 2 << 20
"""Bytes per read: long enough that the cost of a call does not show."""
THREADS = 8
"""Reads under way at once; NVMe disks reach their rate at 2 MiB with fewer."""


class BareReads:
    """A file of whole calls in `folder`, and the threads that read it, bypassing the page cache.

    Args:
        total_bytes: size of the file, rounded down to whole calls, but at least one call.

    Raises:
        OSError: the folder has no space, or cannot be written.
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
        # next() of a count is atomic, so the threads share it.
        while (number := next(turns)) < self.calls:
            got = os.preadv(self._fd, [buffer], number * CALL_BYTES)
            if got != CALL_BYTES or buffer[0] != number % 251:
                raise OSError(f"bare read {number}: {got} bytes of {CALL_BYTES}")


def _open_direct(path: Path) -> tuple[int, bool]:
    """The file's descriptor, and whether its reads bypass the page cache, which some file systems refuse."""
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECT), True
    except OSError:
        return os.open(path, os.O_RDONLY), False
