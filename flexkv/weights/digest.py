"""Computes digests of complete files, as fast as the disk delivers the content. The reads bypass the page cache and may
have low priority.

Several threads read and hash the ranges of a file in parallel. The file's digest is the SHA-256 of its size and of the
SHA-256 of each range. Server CPUs have SHA-256 instructions, which reach 1.5 to 2 GB/s per core.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import mmap
import os
import platform
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from flexkv.errors import ConfigError
from flexkv.observe import NamedThread
from flexkv.weights.files import FileState, weight_files

RANGE_BYTES = 64 << 20
"""Bytes of a range. This number is part of the digest's definition: with a different size, the digests would differ."""

BLOCK_BYTES = 4 << 20
"""Bytes per read. Each thread has one buffer of this size."""

LEAST_READERS, MOST_READERS = 4, 8
"""Bounds of the number of threads. Between the bounds, there is one thread per four CPUs. Even on two CPUs there are
four threads, so that some threads read while others hash.
"""

READER_NICE = 19
"""The lowest CPU priority, so that the engine's own threads take precedence."""

IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
IOPRIO_WHO_PROCESS = 1
IOPRIO_IDLE = 3 << 13
"""Values of linux/ioprio.h. With the idle priority, a thread reads only while no other thread uses the disk, if the
disk's scheduler supports priorities. IOPRIO_SET contains the number of the system call for each architecture.
"""

NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)
"""Error numbers that a file system without O_DIRECT returns."""


class DigestError(Exception):
    """Raised if a digest of weights cannot be computed now. The message says why. If one file is the cause, the message
    names it.
    """


class ChangedError(DigestError):
    """Raised if a file changed while it was read, or after the engine may have read it."""


class TouchedError(DigestError):
    """Raised if a file's owner, mode or number of links changed while it was read. Reading it once more may succeed."""


class StoppedError(DigestError):
    """Raised if the caller has stopped the computation of a digest."""


Done = Callable[[Path, FileState, str], None]
"""A function that gets a file, the file's state, and its digest as 64 hexadecimal digits. The thread that finishes the
file's last range calls it."""


@dataclass(slots=True)
class _FileWork:
    """A file whose digest is being computed.

    Attributes:
        state: the state that the file must have.
        ranges: digest of each range; empty bytes until it is known.
        left: number of ranges whose digests are not known yet.
    """

    path: Path
    state: FileState
    ranges: list[bytes]
    left: int


@dataclass(slots=True)
class _Work:
    """State that all readers share; `lock` guards it.

    Attributes:
        ranges: ranges that no reader has taken yet: the file, and the number of the range.
        stop: set to stop the readers early.
        done: called for each file whose digest is complete.
        background: whether to read at low priority.
        failure: the first error of a reader; None if there was none.
    """

    ranges: deque[tuple[_FileWork, int]]
    stop: threading.Event
    done: Done
    background: bool
    lock: threading.Lock = field(default_factory=threading.Lock)
    failure: DigestError | None = None


def readers_here() -> int:
    """Returns the number of threads that read in parallel on this machine."""
    return max(LEAST_READERS, min(MOST_READERS, len(os.sched_getaffinity(0)) // 4))


def digest_files(
    files: Mapping[Path, FileState], stop: threading.Event, done: Done, background: bool = True
) -> None:
    """Computes the digests of files, and calls `done` for each.

    Args:
        files: each file, with the state that it must have before and after it is read.
        stop: may be set by another thread to stop the reading early.
        done: called for each file, by the threads that read.
        background: whether to read at low priority; False if a caller waits for the digests.

    Raises:
        ChangedError, TouchedError: a file's state has changed.
        StoppedError: `stop` was set.
        DigestError: a file cannot be read.
    """
    works = [_FileWork(path, state, [b""] * ranges_of(state.size), 0) for path, state in files.items()]
    ranges = deque((work, number) for work in works for number in range(len(work.ranges)))
    for work in works:
        work.left = len(work.ranges)
    shared = _Work(ranges, stop, done, background)
    threads = [
        NamedThread("flexkv-digest", _read_ranges, (shared,)) for _ in range(min(len(ranges), readers_here()))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if shared.failure is not None:
        raise shared.failure


def ranges_of(size: int) -> int:
    """Returns the number of ranges of a file of `size` bytes. An empty file has one empty range."""
    return max(1, -(-size // RANGE_BYTES))


def file_digest(size: int, ranges: Sequence[bytes]) -> str:
    """Returns the digest of a file as 64 hexadecimal digits. It is computed from the file's size and its ranges'
    digests.
    """
    digest = hashlib.sha256(b"flexkv weights 1" + size.to_bytes(8, "little"))
    for of_range in ranges:
        digest.update(of_range)
    return digest.hexdigest()


def lower_priority() -> None:
    """Sets the calling thread to the lowest priority for CPU and disk, as far as the system allows."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), READER_NICE)
    if (number := IOPRIO_SET.get(platform.machine())) is not None:
        ctypes.CDLL(None).syscall(number, IOPRIO_WHO_PROCESS, 0, IOPRIO_IDLE)


def name_of_files(parts: Sequence[Sequence[Path]], digests: Mapping[Path, str]) -> bytes:
    """Returns the digest of a set of files: SHA-256 of the files' names and digests, 32 bytes. The digest does not
    depend on the paths of the files' folders.

    Args:
        parts: the files, in one list per set of weights, such as a model's and its draft's.
        digests: each file's digest as 64 hexadecimal digits.
    """
    digest = hashlib.sha256(b"flexkv weights")
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        for file in part:
            name = os.fsencode(file.name)
            digest.update(len(name).to_bytes(8, "little") + name + bytes.fromhex(digests[file]))
    return digest.digest()


def whole_identity(path: Path, most_bytes: int | None = None) -> str:
    """Returns a text with a digest of the whole content of the weights in a file or folder. Blocks until all is read.

    Args:
        most_bytes: largest size of the weights that is accepted; None for any size.

    Raises:
        ConfigError: the folder holds no weights of a known format, a file cannot be read or is changing, or the weights
            are larger than `most_bytes`. In this last case, nothing was read.
        OSError: the folder cannot be read.
    """
    files = {file: FileState.of(file) for file in weight_files(path)}
    size = sum(state.size for state in files.values())
    if most_bytes is not None and size > most_bytes:
        raise ConfigError(
            f"{path} holds {size} bytes of weights; up to {most_bytes} are read while a request waits"
        )
    digests: dict[Path, str] = {}
    try:
        digest_files(
            files, threading.Event(), lambda file, _, digest: digests.update({file: digest}), background=False
        )
    except DigestError as error:
        raise ConfigError(str(error)) from error
    return f"content:{name_of_files([list(files)], digests).hex()}"


def _read_ranges(work: _Work) -> None:
    """The main function of each reader thread: computes digests of ranges until none is left or a reader has failed."""
    try:
        if work.background:
            lower_priority()
        with mmap.mmap(-1, BLOCK_BYTES) as block:
            while (taken := _take_range(work)) is not None:
                file, number = taken
                file.ranges[number] = _digest_range(file, number * RANGE_BYTES, block, work.stop)
                with work.lock:
                    file.left -= 1
                    is_last = not file.left
                if is_last:
                    check_state(file.path, file.state, FileState.of(file.path))
                    work.done(file.path, file.state, file_digest(file.state.size, file.ranges))
    except DigestError as error:
        _fail(work, error)
    except OSError as error:
        _fail(work, DigestError(f"weights file {error.filename or ''}: {error.strerror}"))
    except Exception as error:  # any error must stop the other readers and reach the caller
        _fail(work, DigestError(f"{type(error).__name__}: {error}"))


def _take_range(work: _Work) -> tuple[_FileWork, int] | None:
    with work.lock:
        return work.ranges.popleft() if work.ranges and work.failure is None else None


def _fail(work: _Work, error: DigestError) -> None:
    with work.lock:
        work.failure = work.failure or error


def check_state(path: Path, expected: FileState, found: FileState) -> None:
    """Checks that a file still has the expected state.

    Raises:
        ChangedError: the file was written or replaced.
        TouchedError: the file's owner, mode or number of links changed.
    """
    if found == expected:
        return
    if found.is_touched(expected):
        raise TouchedError(f"weights file {path} got another owner, mode or link while it was read")
    raise ChangedError(f"weights file {path} changed while it was read")


def _digest_range(file: _FileWork, start: int, block: mmap.mmap, stop: threading.Event) -> bytes:
    """Computes the SHA-256 of the range of a file that begins at byte `start`, reading through the buffer `block`.

    Raises:
        ChangedError, TouchedError: the file's state has changed.
        StoppedError: `stop` was set.
        OSError: the file cannot be read.
    """
    digest = hashlib.sha256()
    end = min(start + RANGE_BYTES, file.state.size)
    descriptor, direct = _open(file.path)
    try:
        check_state(file.path, file.state, FileState.of(descriptor))
        at = start
        while at < end:
            if stop.is_set():
                raise StoppedError("the engine ends")
            try:
                read = os.preadv(descriptor, [block], at)
            except OSError as error:
                if not (direct and error.errno in NO_DIRECT):
                    raise OSError(error.errno, error.strerror, str(file.path)) from error
                os.close(descriptor)
                descriptor, direct = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC), False
                continue
            taken = min(read, end - at)
            if taken <= 0 or (direct and taken < end - at and taken % mmap.PAGESIZE):
                raise ChangedError(f"weights file {file.path} changed while it was read")
            digest.update(memoryview(block)[:taken])
            at += taken
        if not direct:
            os.posix_fadvise(descriptor, start, end - start, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
    return digest.digest()


def _open(path: Path) -> tuple[int, bool]:
    """Opens a file for reading. Returns its descriptor, and whether reads bypass the page cache."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT), True
    except OSError as error:
        if error.errno not in NO_DIRECT:
            raise
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC), False
