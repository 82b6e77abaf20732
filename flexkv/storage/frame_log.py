"""A file beside an index. Frames with digests are appended to it, and it is replaced as a whole to shrink it.

After a crash, all earlier frames are complete, perhaps followed by a part of one more, which the next opening cuts off.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from flexkv import c_ext
from flexkv.errors import ContractError, DiskError
from flexkv.storage.folder import IN_USE, sync_folder
from flexkv.storage.private_files import open_private

MAGIC = b"FKVFRMS1"
IDENTITY_BYTES = 32
HEADER = struct.Struct("<8s32sQ")
"""Magic, identity, digest of both."""
FRAME = struct.Struct("<IIQ")
"""Bytes of the content, 0, digest of the content."""
MAX_FRAME_BYTES = 64 << 20
"""A longer frame is damage: no writer makes one."""

LOCK_RETRY_S = 0.02


class FrameLog:
    """One process's log; only one thread uses it. Exhaust `frames()` before the first `append`.

    Args:
        identity: 32 bytes that name what the frames mean; a file with another identity is begun anew.
        lock_s: how long to wait for a process that still has the file.
        stopped: whether to stop waiting.

    Attributes:
        was_other: the file had frames of another identity, which are gone.
        was_damaged: the file's header was damaged; its frames are gone.

    Raises:
        DiskError: another process has the file, or it cannot be used.
        ContractError: the identity has another length.
    """

    def __init__(
        self, path: Path, identity: bytes, lock_s: float, stopped: Callable[[], bool] = lambda: False
    ) -> None:
        if len(identity) != IDENTITY_BYTES:
            raise ContractError(f"an identity of {len(identity)} bytes; allowed are {IDENTITY_BYTES}")
        self._path = path
        head = MAGIC + identity
        self._header = HEADER.pack(MAGIC, identity, c_ext.run_digest(head))
        self._fd = self._open(lock_s, stopped)
        try:
            found = os.pread(self._fd, HEADER.size, 0)
            is_other = len(found) == HEADER.size and found != self._header
            is_whole = is_other and HEADER.unpack(found)[-1] == c_ext.run_digest(found[: len(head)])
            self.was_other, self.was_damaged = is_whole, is_other and not is_whole
            if found != self._header:
                self.replace(())
        except OSError as error:
            self.close()
            raise DiskError(f"{path}: {error.strerror}") from error

    def _open(self, lock_s: float, stopped: Callable[[], bool]) -> int:
        ends_s = time.monotonic() + lock_s
        while True:
            try:
                fd = open_private(self._path, os.O_RDWR | os.O_CREAT)
            except OSError as error:
                raise DiskError(f"{self._path}: {error.strerror}") from error
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The process that had the lock may have replaced the file.
                if os.path.samestat(os.fstat(fd), os.stat(self._path)):
                    return fd
            except FileNotFoundError:
                pass  # replaced or removed: open the new file
            except OSError as error:
                if error.errno not in IN_USE:
                    os.close(fd)
                    raise DiskError(f"{self._path}: {error.strerror}") from error
            os.close(fd)
            if time.monotonic() >= ends_s or stopped():
                raise DiskError(f"{self._path} is in use by another process")
            time.sleep(LOCK_RETRY_S)

    def frames(self) -> Iterator[bytes]:
        """The frames in the order in which they were appended, up to the first damaged one, where the file is cut.

        Raises:
            OSError: the file cannot be read.
        """
        at = HEADER.size
        while True:
            head = os.pread(self._fd, FRAME.size, at)
            if len(head) < FRAME.size:
                break
            length, zero, digest = FRAME.unpack(head)
            if zero or not 0 < length <= MAX_FRAME_BYTES:
                break
            content = os.pread(self._fd, length, at + FRAME.size)
            if len(content) != length or c_ext.run_digest(content) != digest:
                break
            yield content
            at += FRAME.size + length
        if os.fstat(self._fd).st_size > at:
            os.ftruncate(self._fd, at)

    def append(self, content: bytes) -> None:
        """Adds a frame. It is durable once the system has written it; nothing waits for that.

        Raises:
            OSError: it could not be written. The file may end with a part of the frame.
        """
        os.lseek(self._fd, 0, os.SEEK_END)
        write_all(self._fd, framed(content))

    def clear(self) -> None:
        """Removes all frames, including an incomplete one. Needs no space on the disk; nothing waits for it to be
        durable.

        Raises:
            OSError: the file cannot be cut.
        """
        os.ftruncate(self._fd, HEADER.size)

    def replace(self, frames: Iterable[bytes]) -> None:
        """Durably replaces the file by one with these frames; after a crash, either the old file or the new one is
        there.

        Raises:
            OSError: the new file could not be written, and the old one stays as it is; or the new file is there but may
                not survive a power loss.
        """
        path = self._path.with_name(f"{self._path.name}.new")
        fd = open_private(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            # Locked before it has the name, so that no other process can use it in between.
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            write_all(fd, self._header)
            for content in frames:
                write_all(fd, framed(content))
            os.fsync(fd)
            os.replace(path, self._path)
        except BaseException:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        os.close(self._fd)
        self._fd = fd
        sync_folder(self._path.parent)

    def close(self) -> None:
        """Closes the file and ends its lock. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def framed(content: bytes) -> bytes:
    """A frame with this content, in the form that files have.

    Raises:
        ContractError: it is empty or too long.
    """
    if not 0 < len(content) <= MAX_FRAME_BYTES:
        raise ContractError(f"a frame of {len(content)} bytes; allowed are 1 to {MAX_FRAME_BYTES}")
    return FRAME.pack(len(content), 0, c_ext.run_digest(content)) + content


def write_all(fd: int, content: bytes) -> None:
    """Writes all of it, in as many writes as the system takes.

    Raises:
        OSError: it could not be written; a part of it may have been.
    """
    left = memoryview(content)
    while left:
        left = left[os.write(fd, left) :]
