"""Finds, locks, measures and deletes the folder of one ownership unit on one disk."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from flexkv.errors import ConfigError, DiskError
from flexkv.storage.base import DiskGroup, DiskIdentity
from flexkv.storage.header import format_digests
from flexkv.storage.index_database import INDEX_NAME
from flexkv.storage.index_trouble import FULL
from flexkv.storage.private_files import make_folders, open_at_once, open_private

LOCK_NAME = "lock"

DIGEST_DIGITS = 16
"""Number of hex digits of a digest in a folder's name. The slabs' headers contain the full digests."""

LOCK_WAIT_S = 2.0
"""Maximum number of seconds that a starting unit waits for its folder's lock. Another unit may hold the lock briefly to
read the index.
"""
LOCK_RETRY_S = 0.02
IN_USE = (errno.EWOULDBLOCK, errno.EACCES)
"""The error numbers of flock if another process holds the lock."""

UNIT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class FolderLockedError(DiskError):
    """The folder is in use by another process, or by another tier in this process."""


def slab_name(group: int) -> str:
    return f"group{group}.slab"


def native_path(path: Path) -> str:
    """The path as a string that can be encoded in UTF-8, which the native core requires.

    Raises:
        DiskError: the path is not UTF-8.
    """
    text = str(path)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DiskError(f"{text!r}: a path of the disk tier is UTF-8: rename the folder") from error
    return text


def unit_folder(root: Path, identity: DiskIdentity, groups: Sequence[DiskGroup]) -> Path:
    """Returns the folder of a unit's slabs: a folder named after the unit, in a folder under `root` for this model and
    page format.

    Raises:
        ConfigError: the unit's name is not allowed, or the fingerprint is not 32 bytes long; see also `slab_numbers`.
        GeometryError: see `slab_numbers`.
    """
    if not UNIT_NAME.fullmatch(identity.unit):
        raise ConfigError(f"disk unit {identity.unit!r}: letters, digits, '-', '_' and '.', at most 64")
    if len(identity.fingerprint) != 32:
        raise ConfigError(f"a fingerprint has 32 bytes, given {len(identity.fingerprint)}")
    formats = hashlib.sha256(b"".join(format_digests(groups))).hexdigest()
    words = re.sub(r"[^A-Za-z0-9._-]+", "-", identity.model).strip("-.")[-48:] or "model"
    name = f"{words}-{identity.fingerprint.hex()[:DIGEST_DIGITS]}-{formats[:DIGEST_DIGITS]}"
    return root / name / identity.unit


def unit_folders(root: Path) -> list[Path]:
    """The folders of ownership units under `root`, sorted by path. If `root` is itself such a folder, it is the only
    one.
    """
    if any(root.glob("group*.slab")) or os.path.exists(root / INDEX_NAME):
        return [root]
    found = {path.parent for pattern in ("*/*/group*.slab", "*/group*.slab") for path in root.glob(pattern)}
    return sorted(found)


def closed_folders(root: Path) -> dict[Path, str]:
    """Searches `root` and two levels of folders below it for folders that cannot be listed. Returns the reason for each
    such folder. These folders may hold units that `unit_folders` does not find.
    """
    closed: dict[Path, str] = {}
    level = [root]
    for _ in range(3):
        below: list[Path] = []
        for folder in level:
            try:
                # Listing a folder and its entries' types needs no permission to enter it. `stat` needs that permission,
                # and so detects a folder that cannot be entered.
                with os.scandir(folder) as there:
                    below += [Path(one.path) for one in there if one.is_dir(follow_symlinks=False)]
                os.stat(folder / LOCK_NAME)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                closed[folder] = f"{folder}: {error.strerror}"
        level = sorted(below)
    return closed


def held_bytes(folder: Path, names: str = "*") -> int:
    """Returns the number of bytes of disk space that the files under `folder` take.

    Args:
        names: pattern of the names of the files that count.
    """
    held = 0
    for file in folder.rglob(names):
        with suppress(FileNotFoundError):  # SQLite creates and deletes files beside the index
            said = file.lstat()
            held += said.st_blocks * 512 if stat.S_ISREG(said.st_mode) else 0
    return held


SHARED_BY_MISTAKE = "end that first, or name another folder (disk.folders)"
LOOKED_AFTER_IN_USE = "end that first"


class FolderLock:
    """An exclusive flock on a unit's folder. It is held as long as any copy of its file descriptor is open.

    Args:
        advice: advice to the user in the error that is raised if the folder is in use.

    Raises:
        FolderLockedError: another process still holds the lock after LOCK_WAIT_S seconds; the message names the
            process.
        DiskError: the folder cannot be created or written.
    """

    def __init__(self, folder: Path, advice: str = SHARED_BY_MISTAKE) -> None:
        self.folder = folder
        self._releasing = threading.Lock()
        path = folder / LOCK_NAME
        ends_s = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                self.fd = self._open(path)
            except OSError as error:
                # `flexkv disk drop` may delete the folder just after `_open` has created it.
                if error.errno != errno.ENOENT or time.monotonic() >= ends_s:
                    raise DiskError(f"{path}: {error.strerror}") from error
                time.sleep(LOCK_RETRY_S)
                continue
            try:
                _lock_until(self.fd, ends_s)
                if _has_name(self.fd, path):
                    return _write_holder(self.fd)
            except OSError as error:
                holder = _holder(self.fd)
                os.close(self.fd)
                if error.errno in IN_USE:
                    raise FolderLockedError(f"{folder} is in use by process {holder}: {advice}") from error
                raise DiskError(f"{path}: {error.strerror}") from error
            # The lock file was deleted in the meantime, so a lock on it does not protect the folder that has this name
            # now.
            os.close(self.fd)
            if time.monotonic() >= ends_s:
                raise FolderLockedError(f"{folder} is deleted again and again by another process: {advice}")

    @staticmethod
    def _open(path: Path) -> int:
        make_folders(path.parent)
        return open_private(path, os.O_RDWR | os.O_CREAT)

    def release(self) -> None:
        """Closes this copy of the lock's file descriptor. The folder stays locked until the slabs' copies are closed,
        too. Idempotent, and several threads may call it at once.
        """
        with self._releasing:
            fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def is_read_only(folder: Path) -> bool:
    """Whether the folder's file system is mounted read-only.

    Raises:
        OSError: the folder cannot be reached.
    """
    return bool(os.statvfs(folder).f_flag & os.ST_RDONLY)


def is_in_use(folder: Path) -> bool:
    """Whether a process holds the lock of a unit's folder now.

    Raises:
        OSError: the lock file cannot be opened, or the lock cannot be tried.
    """
    try:
        fd = open_at_once(str(folder / LOCK_NAME), os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def remove_folder(folder: Path) -> int:
    """Deletes a unit's folder. Returns the number of bytes of disk space that its files took.

    Raises:
        FolderLockedError: the folder is in use; nothing was deleted.
        DiskError: the folder contains another folder, and nothing was deleted; or a file could not be deleted.
    """
    lock = FolderLock(folder, LOOKED_AFTER_IN_USE)
    freed = 0
    try:
        # The slabs are deleted after the other files, so that `flexkv disk ls` still shows the unit if one of the other
        # files cannot be deleted. The lock file is deleted last: while it exists, no other process can start to use the
        # folder.
        files = sorted(folder.iterdir(), key=lambda path: (path.name == LOCK_NAME, path.suffix == ".slab"))
        for path in files:
            if path.is_dir() and not path.is_symlink():
                raise DiskError(
                    f"{path} is a folder, which flexkv did not make: move it away; nothing was deleted"
                )
        for path in files:
            freed += path.lstat().st_blocks * 512
            path.unlink()
        folder.rmdir()
        if not any(folder.parent.iterdir()):
            folder.parent.rmdir()
    except OSError as error:
        if isinstance(error, DiskError):
            raise
        raise DiskError(f"{folder}: {error}") from error
    finally:
        lock.release()
    return freed


def _has_name(fd: int, path: Path) -> bool:
    """Whether `path` is still the file that is open as `fd`."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _write_holder(fd: int) -> None:
    """Writes this process's id to the lock file, so that other processes can name it in error messages. If the disk is
    full, does nothing.

    Raises:
        OSError: the file could not be written, for a reason other than a full disk.
    """
    text = f"{os.getpid()}\n".encode()
    try:
        os.pwrite(fd, text, 0)
    except OSError as error:
        if error.errno not in FULL:
            raise
    else:
        os.ftruncate(fd, len(text))


def _holder(fd: int) -> str:
    with suppress(OSError):  # a pipe may have the lock file's name
        return os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
    return "unknown"


def _lock_until(fd: int, ends_s: float) -> None:
    """Waits for the lock of the file that is open as `fd`.

    Raises:
        OSError: another process still holds the lock at `ends_s` on the monotonic clock, or flock failed.
    """
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in IN_USE or time.monotonic() >= ends_s:
                raise
        time.sleep(LOCK_RETRY_S)


@contextmanager
def folder_at_rest(folder: Path) -> Iterator[None]:
    """Keeps the folder's unit from starting while the context lasts. Several readers may use this context at once.
    Changes no file.

    Raises:
        FolderLockedError: a process uses the folder.
        DiskError: the folder has no lock file, or cannot be read.
    """
    path = folder / LOCK_NAME
    try:
        fd = open_at_once(str(path), os.O_RDONLY)
    except OSError as error:
        raise DiskError(f"{path}: {error.strerror}") from error
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in IN_USE:
                raise FolderLockedError(f"{folder} is in use by process {_holder(fd)}") from error
            raise
        if not _has_name(fd, path):
            raise DiskError(f"{folder} is being deleted")
        yield
    except OSError as error:
        if isinstance(error, DiskError):
            raise
        raise DiskError(f"{folder}: {error.strerror or error}") from error
    finally:
        os.close(fd)


def sync_folder(folder: Path) -> None:
    """Makes the names of files in `folder` durable: after a power cut, created files are there and deleted ones are
    not.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
