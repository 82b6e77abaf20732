"""Names LoRA adapters by their content, because an adapter keeps its name and path when it is retrained."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import time
from dataclasses import dataclass
from pathlib import Path

from flexkv.adapters.common.weights import COMMIT
from flexkv.errors import ConfigError
from flexkv.observe import get_logger
from flexkv.weights.digest import whole_identity

logger = get_logger(__name__)

CONFIG_NAME = "adapter_config.json"
"""File with an adapter's rank, scale and target modules. It counts as content, because the same matrices with a
different scale are a different adapter."""

MOST_LINKS = 40
"""Largest number of symbolic links that are followed to reach one file; Linux has the same limit."""

MOST_NAMED_BYTES = 128 << 20
"""Size of the largest adapter that is named by its content, in bytes. Reading it takes a tenth of a second, during
which the request and the engine's scheduler wait."""

READ_BYTES = 1 << 20
"""Number of bytes that are read from a file at a time."""

NO_TIME = 1 << 63
"""A time (unix, ns) later than that of any file."""

RUN_PREFIX = "run:"
"""First characters of a name that is valid only in this process."""

GIT_DIGITS = 40
"""Number of hexadecimal digits of a git object's digest. In the hub's cache, small files are named by this digest, and
large files by their SHA-256."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """A value that changes whenever a file of an adapter changes, or a different folder or file appears at its path.

    Attributes:
        files: (name, bytes, time of content change in ns, time of inode change in ns, inode) of each file; empty if
            the adapter's folder does not exist.
        route: (device, inode, time of inode change in ns) of each folder and symbolic link on the path to the adapter's
            folder. If a file in that folder is a link, also of each folder and link on the path to its target. The time
            is 0 except for links and the adapter's own folder, because other folders also change when unrelated files
            in them do.
    """

    files: tuple[tuple[str, int, int, int, int], ...] = ()
    route: tuple[tuple[int, int, int], ...] = ()

    @classmethod
    def of(cls, folder: Path) -> Stamp:
        try:
            place, route = _walk("/", os.path.join(os.getcwd(), folder))
            own = os.stat(place)
            route.append((own.st_dev, own.st_ino, own.st_ctime_ns))
            with os.scandir(place) as entries:
                files = sorted((entry for entry in entries if entry.is_file()), key=lambda entry: entry.name)
            for file in files:
                if file.is_symlink():
                    route += _walk(place, file.name)[1]
            found = [(file.name, file.stat()) for file in files]
        except (OSError, ValueError):  # no such file exists, or the name is not a valid file name
            return cls()
        return cls(
            tuple((n, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino) for n, s in found), tuple(route)
        )

    @property
    def changed_ns(self) -> int:
        """Time of the last change of any content or inode, unix ns. The inode's time counts because a copied file may
        keep the content time of the original, but never its inode time."""
        of_files = (max(mtime, ctime) for _, _, mtime, ctime, _ in self.files)
        return max((*of_files, *(ctime for _, _, ctime in self.route)), default=0)


def _walk(base: str, path: str) -> tuple[str, list[tuple[int, int, int]]]:
    """Follows `path` from the folder `base`, whose own path has no links.

    Returns:
        The file or folder at which the path ends, and the part of `Stamp.route` that leads to it.

    Raises:
        OSError: a part of the path is missing, or there are too many links.
    """
    place, ahead, links = base, path.split("/")[::-1], 0
    route: list[tuple[int, int, int]] = []
    while ahead:
        part = ahead.pop()
        if part in ("", "."):
            continue
        if part == "..":
            place = os.path.dirname(place)
            continue
        found = os.lstat(step := os.path.join(place, part))
        if not stat.S_ISLNK(found.st_mode):
            route.append((found.st_dev, found.st_ino, 0))
            place = step
            continue
        if (links := links + 1) > MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        route.append((found.st_dev, found.st_ino, found.st_ctime_ns))
        target = os.readlink(step)
        if target.startswith("/"):
            place = "/"
        ahead += target.split("/")[::-1]
    return place, route


class LoraNames:
    """Names of the contents of adapters, one per path. Each name is made when `name` is first called for the path.

    To make a name, this class reads all of the adapter's weights and configuration while a request waits; the engine
    reads the same bytes to load the adapter. After the files have changed, it is unknown which content the engine
    computes with. The engine keeps the former content until it loads the adapter again, and it does not report such a
    load.

    The name is valid only in this process in these cases:
      - An error occurs while the files are read. The caller is the engine's scheduler, which must go on.
      - The adapter's weights have more than `MOST_NAMED_BYTES`.
      - The adapter is not a folder on this machine.

    If an adapter's files changed after `since_ns` and before they were named, and `sees_loads` is false, then no name
    is valid: the adapter counts as changed from the beginning. The engine may have read it before the change, and may
    read it again at any time, for example after it has evicted the adapter. KV computed with one content must not be
    found with a different one.

    Args:
        since_ns: a time (unix, ns) before the engine reads any adapter; None for the time of this call.
        sees_loads: whether `name` is called for each adapter before the engine first reads it.
    """

    def __init__(self, since_ns: int | None = None, sees_loads: bool = False) -> None:
        self._since_ns = time.time_ns() if since_ns is None else since_ns
        if sees_loads:
            self._since_ns = NO_TIME
        self._named: dict[str, tuple[Stamp, str]] = {}
        self._changed: set[str] = set()

    def name(self, path: str) -> str:
        """The name of the content that was at `path` (a folder, or a hub name) at the first call for that path. Equal
        content has the same name in every process. A name that is valid only in this process (see the class) begins
        with RUN_PREFIX.
        """
        if (known := self._named.get(path)) is None:
            folder = _folder(path)
            # The stamp is taken before the files are read, so that `has_changed` detects a change made meanwhile.
            stamp = Stamp.of(folder)
            known = self._named[path] = (stamp, self._new_name(path, folder, stamp))
        return known[1]

    def has_changed(self, path: str) -> bool:
        """Whether the content at a path has changed in any way since `name` was first called for it, or may have
        changed after the engine read it. Once true, this stays true, because the engine may still hold any content that
        was ever at the path. Costs a few calls of `stat`.
        """
        if path in self._changed:
            return True
        if Stamp.of(_folder(path)) == self._named[path][0]:
            return False
        self._changed.add(path)
        logger.warning(
            "adapter %s has changed since it was first used: nothing more is stored or loaded for it in this run. Load "
            "changed weights from a new path",
            path,
        )
        return True

    def _new_name(self, path: str, folder: Path, stamp: Stamp) -> str:
        try:
            return content_before(folder, self._since_ns, MOST_NAMED_BYTES)
        except ConfigError as error:
            reason = str(error)
        # No other failure may stop the engine either, such as a lack of memory or of threads for the digest.
        except Exception as error:
            reason = f"adapter {folder} was not read ({type(error).__name__}: {error})"
        if stamp.changed_ns >= self._since_ns:
            self._changed.add(path)
            logger.warning("%s: nothing is stored or loaded for it in this run", reason)
        else:
            logger.warning("%s; KV computed with it is found again in this run only", reason)
        return f"{RUN_PREFIX}{os.urandom(16).hex()}"


def _folder(path: str) -> Path:
    # For the home of an unknown user, Path.expanduser would raise; os.path.expanduser returns the path unchanged.
    return Path(os.path.expanduser(path))


def content_before(folder: Path, since_ns: int, most_bytes: int | None = None) -> str:
    """A string that identifies the content of an adapter: it differs if the weights or the configuration differ. All
    bytes of both are read.

    Args:
        since_ns: a time (unix, ns) before the engine reads the adapter.
        most_bytes: largest size of the adapter's weights that is accepted; None for any size.

    Raises:
        ConfigError: a file, the folder or a link on the path changed after `since_ns`, so that the engine may have read
            different content; there is no folder with weights of a known format; or the weights are larger than
            `most_bytes`.
    """
    before = Stamp.of(folder)
    if not before.files:
        raise ConfigError(
            f"adapter {folder} is no folder with files on this machine, so nothing names its content"
        )
    try:
        weights = whole_identity(folder, most_bytes)
        config = folder / CONFIG_NAME
        settings = config.read_bytes() if config.is_file() else b""
        # A commit's files are the same whenever they are downloaded, so a download after `since_ns` is not a change.
        if before.changed_ns >= since_ns and not _is_as_downloaded(folder):
            raise ConfigError(
                f"adapter {folder}: its files changed after the engine's start, which may have read others"
            )
    except OSError as error:
        raise ConfigError(f"adapter {folder}: {error}") from error
    if Stamp.of(folder) != before:
        raise ConfigError(f"adapter {folder}: its files are changing")
    return f"{weights}+{hashlib.sha256(settings).hexdigest()}"


def _is_as_downloaded(folder: Path) -> bool:
    """Whether `folder` is the folder of a commit in the hub's cache, and its files are unchanged since the download.
    Reads all of its files.

    A commit's folder contains links to files, each of which is named by a digest of its content.
    """
    if COMMIT.search(os.path.normpath(folder)) is None:
        return False
    files = [file for file in folder.iterdir() if file.is_file()]
    return all(file.is_symlink() and _digest_like(Path(os.readlink(file)).name, file) for file in files)


def _digest_like(name: str, file: Path) -> bool:
    """Whether `name` is the digest of the file's content: that of its git object if the name has GIT_DIGITS digits,
    otherwise its SHA-256."""
    size = file.stat().st_size
    digest = hashlib.sha256()
    if len(name) == GIT_DIGITS:
        digest = hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
    with file.open("rb") as content:
        while piece := content.read(READ_BYTES):
            digest.update(piece)
    return digest.hexdigest() == name
