"""The folder of one ownership unit on one disk: its name, its lock, and its content."""

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
"""Hex digits of a digest in a folder's name; the header holds all of it."""

LOCK_WAIT_S = 2.0
"""How long a starting unit waits for its folder, which another unit may lock briefly to read its index."""
LOCK_RETRY_S = 0.02
IN_USE = (errno.EWOULDBLOCK, errno.EACCES)
"""Errors of flock when another process holds the lock."""

UNIT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class FolderLockedError(DiskError):
    """Another process, or another tier of this one, uses the folder."""


def slab_name(group: int) -> str:
    return f"group{group}.slab"


def native_path(path: Path) -> str:
    """The path as the native core needs it, in UTF-8.

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
    """The folder of a unit's slabs under `root`: one for the unit, in one for the model in this encoding.

    Raises:
        ConfigError: the unit's name is not a file name, or the fingerprint is not 32 bytes long; see also
            `slab_numbers`.
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
    """Folders of ownership units under `root`, or `root` itself if it is one, sorted by name."""
    if any(root.glob("group*.slab")) or os.path.exists(root / INDEX_NAME):
        return [root]
    found = {path.parent for pattern in ("*/*/group*.slab", "*/group*.slab") for path in root.glob(pattern)}
    return sorted(found)


def closed_folders(root: Path) -> dict[Path, str]:
    """Returns which of `root`, the folders in it and the folders in those cannot be listed, and why: they may hold
    units that `unit_folders` does not find.
    """
    closed: dict[Path, str] = {}
    level = [root]
    for _ in range(3):
        below: list[Path] = []
        for folder in level:
            try:
                # An entry's type can be read without permission to enter the folder; `stat` needs that
                # permission.
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
    """How many bytes the files of these names under `folder` take on the disk."""
    held = 0
    for file in folder.rglob(names):
        with suppress(FileNotFoundError):  # SQLite creates and deletes an index's side files
            said = file.lstat()
            held += said.st_blocks * 512 if stat.S_ISREG(said.st_mode) else 0
    return held


SHARED_BY_MISTAKE = "end that first, or name another folder (disk.folders)"
LOOKED_AFTER_IN_USE = "end that first"


class FolderLock:
    """An exclusive flock on a unit's folder, for as long as any copy of the descriptor is open.

    Args:
        advice: what the error tells the user to do if the folder is in use.

    Raises:
        FolderLockedError: another process has held the lock for LOCK_WAIT_S; the message names it.
        DiskError: the folder cannot be made or written.
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
                # `drop` deleted the folder after `_open` had made it.
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
            # The file was deleted while this waited, so a lock on it does not protect the folder that now has
            # the name.
            os.close(self.fd)
            if time.monotonic() >= ends_s:
                raise FolderLockedError(f"{folder} is deleted again and again by another process: {advice}")

    @staticmethod
    def _open(path: Path) -> int:
        make_folders(path.parent)
        return open_private(path, os.O_RDWR | os.O_CREAT)

    def release(self) -> None:
        """Closes this copy of the lock, which ends when the slabs' copies are closed too. Idempotent, even from several
        threads at once."""
        with self._releasing:
            fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def is_in_use(folder: Path) -> bool:
    """Whether a process has the unit's lock now.

    Raises:
        OSError: the lock cannot be read.
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
    """Deletes a unit's folder; returns the bytes that its files took.

    Raises:
        FolderLockedError: it is in use; nothing was deleted.
        DiskError: it has a folder in it, and nothing was deleted; or something could not be deleted.
    """
    lock = FolderLock(folder, LOOKED_AFTER_IN_USE)
    freed = 0
    try:
        # Deletes the slabs late, so that `ls` still shows a unit if something cannot be deleted. Deletes the
        # lock file last: while it exists, no other process can start to use the folder.
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
    """Whether `path` still names the open file."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _write_holder(fd: int) -> None:
    """Writes who holds the lock into the lock file, for users. If the disk is full, does nothing.

    Raises:
        OSError: it could not be written, though the disk is not full.
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
    with suppress(OSError):  # a pipe of the lock's name
        return os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
    return "unknown"


def _lock_until(fd: int, ends_s: float) -> None:
    """
    Raises:
        OSError: another process still holds the lock at `ends_s`.
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
    """Briefly keeps the folder's unit from starting. Several readers may do so at once. Changes nothing.

    Raises:
        FolderLockedError: its unit uses the folder.
        DiskError: the folder has no lock file, or cannot be read.
    """
    path = folder / LOCK_NAME
    try:
        fd = open_at_once(str(path), os.O_RDONLY)
    except OSError as error:
        raise DiskError(f"{path}: {error.strerror}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if not _has_name(fd, path):
            raise DiskError(f"{folder} is being deleted")
        yield
    except OSError as error:
        if isinstance(error, DiskError):
            raise
        if error.errno in IN_USE:
            raise FolderLockedError(f"{folder} is in use by process {_holder(fd)}") from error
        raise DiskError(f"{folder}: {error.strerror}") from error
    finally:
        os.close(fd)


def sync_folder(folder: Path) -> None:
    """Makes the names in `folder` durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
