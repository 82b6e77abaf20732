"""A log beside an index: a file to which frames with digests are appended. To shrink the log, its file is replaced.

A crash during an append may leave part of a frame at the end of the file. `frames` cuts that part off.
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
"""The file's header: magic, identity, digest of magic and identity."""
FRAME = struct.Struct("<IIQ")
"""The start of a frame: length of the content in bytes, 0, digest of the content."""
MAX_FRAME_BYTES = 64 << 20
"""The longest content of a frame, in bytes. No writer makes a longer one, so a larger length in the file is damage."""

LOCK_RETRY_S = 0.02


class FrameLog:
    """A log that only one process can have open, and only one thread may use. Read all of `frames()` before the first
    `append`.

    Args:
        identity: 32 bytes that identify the meaning of the frames. A file with another identity loses its frames.
        lock_s: maximum number of seconds to wait while another process has the file open.
        stopped: returns whether to stop waiting early.

    Attributes:
        was_other: whether the file had another identity, so that its frames were removed.
        was_damaged: whether the file's header was damaged, so that its frames were removed.

    Raises:
        DiskError: another process has the file open, or the file system returns an error.
        ContractError: the identity is not 32 bytes long.
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
                # The process that held the lock may have replaced the file, so the lock must be on the file that has
                # the name now.
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
        """Yields the frames in the order in which they were appended. Cuts the file off at the first damaged frame.

        Raises:
            OSError: the file cannot be read or cut off.
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
        """Adds a frame. Does not wait until the frame is durable.

        Raises:
            OSError: the frame could not be written. The file may end with part of the frame.
        """
        os.lseek(self._fd, 0, os.SEEK_END)
        write_all(self._fd, framed(content))

    def clear(self) -> None:
        """Removes all frames, including an incomplete one. Needs no disk space, and does not wait until the removal is
        durable.

        Raises:
            OSError: the file cannot be cut off.
        """
        os.ftruncate(self._fd, HEADER.size)

    def replace(self, frames: Iterable[bytes]) -> None:
        """Durably replaces the file by one with these frames. After a crash, the file is either the old or the new one.

        Raises:
            OSError: the new file could not be written, and the old one stays as it is; or the new file is in place but
                may not survive a power cut.
        """
        path = self._path.with_name(f"{self._path.name}.new")
        fd = open_private(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            # The new file is locked before it gets the name, so that no other process can use it in between.
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
        """Closes the file, which releases its lock. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def framed(content: bytes) -> bytes:
    """The bytes of a frame with this content, as they are written to the file.

    Raises:
        ContractError: the content is empty or too long.
    """
    if not 0 < len(content) <= MAX_FRAME_BYTES:
        raise ContractError(f"a frame of {len(content)} bytes; allowed are 1 to {MAX_FRAME_BYTES}")
    return FRAME.pack(len(content), 0, c_ext.run_digest(content)) + content


def write_all(fd: int, content: bytes) -> None:
    """Writes all of `content`, with as many writes as the system needs.

    Raises:
        OSError: a write failed; part of the content may be in the file.
    """
    left = memoryview(content)
    while left:
        left = left[os.write(fd, left) :]
