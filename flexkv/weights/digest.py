"""Digests of whole files, read as fast as the disk delivers them, at low priority, bypassing the page cache.

Threads read and hash the ranges of a file in parallel; the file's digest is the SHA-256 over its size and the SHA-256
of each range. Server CPUs have SHA-256 instructions, which reach 1.5 to 2 GB/s per core.
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
"""Part of the digest's definition: another size would give another digest."""

BLOCK_BYTES = 4 << 20
"""Bytes per read; each thread has one block in memory."""

LEAST_READERS, MOST_READERS = 4, 8
"""The bounds of the number of threads, which is one per four CPUs. Even on two CPUs there are four threads, so that
some read while others hash.
"""

READER_NICE = 19
"""The engine's own threads take precedence."""

IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
IOPRIO_WHO_PROCESS = 1
IOPRIO_IDLE = 3 << 13
"""linux/ioprio.h: the thread reads only while nothing else does, if the disk's scheduler supports priorities."""

NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)
"""Errors of a file system that has no O_DIRECT."""


class DigestError(Exception):
    """The weights' content cannot be digested now; the message says why, and names the file."""


class ChangedError(DigestError):
    """A file changed while it was read, or since the engine may have read it."""


class TouchedError(DigestError):
    """A file's owner, mode or number of links changed while it was read, so it can be read once more."""


class StoppedError(DigestError):
    """The digest was abandoned on purpose."""


Done = Callable[[Path, FileState, str], None]
"""Called with a file, its state and its digest in hex, by the thread that read its last range."""


@dataclass(slots=True)
class _FileWork:
    """A file that is being digested."""

    path: Path
    state: FileState
    ranges: list[bytes]
    left: int


@dataclass(slots=True)
class _Work:
    """State that the readers share; `lock` guards it."""

    ranges: deque[tuple[_FileWork, int]]
    stop: threading.Event
    done: Done
    background: bool
    lock: threading.Lock = field(default_factory=threading.Lock)
    failure: DigestError | None = None


def readers_here() -> int:
    """How many threads read at once on this machine."""
    return max(LEAST_READERS, min(MOST_READERS, len(os.sched_getaffinity(0)) // 4))


def digest_files(
    files: Mapping[Path, FileState], stop: threading.Event, done: Done, background: bool = True
) -> None:
    """Reads files whole and calls `done` for each.

    Args:
        files: each file, with the state that it must have before and after.
        stop: ends the reading early.
        background: whether to read at low priority; False if somebody waits for the digests.

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
    """How many ranges a file of `size` bytes has; an empty file has one, which is empty."""
    return max(1, -(-size // RANGE_BYTES))


def file_digest(size: int, ranges: Sequence[bytes]) -> str:
    """The digest of a file, as 64 hex digits, from its size and the digests of its ranges."""
    digest = hashlib.sha256(b"flexkv weights 1" + size.to_bytes(8, "little"))
    for of_range in ranges:
        digest.update(of_range)
    return digest.hexdigest()


def lower_priority() -> None:
    """Gives the calling thread the lowest priority for CPU and disk, as far as the system allows."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), READER_NICE)
    if (number := IOPRIO_SET.get(platform.machine())) is not None:
        ctypes.CDLL(None).syscall(number, IOPRIO_WHO_PROCESS, 0, IOPRIO_IDLE)


def name_of_files(parts: Sequence[Sequence[Path]], digests: Mapping[Path, str]) -> bytes:
    """SHA-256 of the files' names and digests, part by part; it does not depend on the folders' paths."""
    digest = hashlib.sha256(b"flexkv weights")
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        for file in part:
            name = os.fsencode(file.name)
            digest.update(len(name).to_bytes(8, "little") + name + bytes.fromhex(digests[file]))
    return digest.digest()


def whole_identity(path: Path, most_bytes: int | None = None) -> str:
    """A digest of all content of the weights in a file or folder, read while the caller waits.

    Args:
        most_bytes: nothing is read if the weights are larger; None for no bound.

    Raises:
        ConfigError: the folder holds no weights that we know, a file cannot be read or is changing, or the weights are
            larger than `most_bytes`.
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
    """Runs on each reader's thread."""
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
    except Exception as error:  # on any error the other readers stop, and the caller gets it
        _fail(work, DigestError(f"{type(error).__name__}: {error}"))


def _take_range(work: _Work) -> tuple[_FileWork, int] | None:
    with work.lock:
        return work.ranges.popleft() if work.ranges and work.failure is None else None


def _fail(work: _Work, error: DigestError) -> None:
    with work.lock:
        work.failure = work.failure or error


def check_state(path: Path, expected: FileState, found: FileState) -> None:
    """
    Raises:
        ChangedError: the file was written or replaced.
        TouchedError: its owner, mode or number of links changed.
    """
    if found == expected:
        return
    if found.is_touched(expected):
        raise TouchedError(f"weights file {path} got another owner, mode or link while it was read")
    raise ChangedError(f"weights file {path} changed while it was read")


def _digest_range(file: _FileWork, start: int, block: mmap.mmap, stop: threading.Event) -> bytes:
    """
    Raises:
        ChangedError, TouchedError, StoppedError, OSError: see `digest_files`.
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
    """Opens a file. Returns its descriptor, and whether reads bypass the page cache."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT), True
    except OSError as error:
        if error.errno not in NO_DIRECT:
            raise
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC), False
