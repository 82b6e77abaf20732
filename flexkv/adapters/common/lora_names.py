"""What tells one LoRA adapter's content from another's: a name and a path stay the same when it is trained anew."""

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
"""Rank, scale and target modules: the same matrices under another scale are another adapter."""

MOST_LINKS = 40
"""On the way to one file; Linux follows as many."""

MOST_NAMED_BYTES = 128 << 20
"""Largest adapter that is named while a request waits, and the engine's scheduler with it: a tenth of a second."""

READ_BYTES = 1 << 20
"""At a time, of a file that is read whole."""

GIT_DIGITS = 40
"""Of a git object's name, by which the hub's cache keeps small files; large ones are kept by their SHA-256."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """Changes whenever a file of an adapter does, or another folder or file comes to lie at its path.

    Attributes:
        files: of each its name, bytes, times of change (content, inode; ns) and inode; none without a folder.
        route: of the path's folders and of all links, those of files too, device, inode and time of change (ns).
            The last is 0 for the folders above: they change with all that lies beside the adapter.
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
        except (OSError, ValueError):  # there is no such file, or can be none by this name
            return cls()
        return cls(
            tuple((n, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino) for n, s in found), tuple(route)
        )

    @property
    def changed_ns(self) -> int:
        """When the last change was. A copy that keeps the time of content has a new one of the inode."""
        of_files = (max(mtime, ctime) for _, _, mtime, ctime, _ in self.files)
        return max((*of_files, *(ctime for _, _, ctime in self.route)), default=0)


def _walk(base: str, path: str) -> tuple[str, list[tuple[int, int, int]]]:
    """Where `path` ends, and what lies on the way there from `base`, a folder without links in its path.

    Raises:
        OSError: something on the way is missing, or there are too many links.
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
    """Names of adapters' contents, one for each path, made when the path is met first or its files have changed.
    Whatever goes wrong meanwhile leads to a name of this process alone: who asks is the engine's scheduler.

    Looking costs a few stats a call. To make a name, all of weights and configuration is read while a request waits,
    as much as the engine reads to load the adapter. One of more than `MOST_NAMED_BYTES` gets a name of this process
    alone.

    An engine reads an adapter some time after its start, keeps it, and does not say which content it has. So an
    adapter whose files changed after `since_ns`, or that is no folder on this machine, gets a name of this process
    alone: KV that was computed with either content must not be found under the name of one. The same holds from the
    moment when anything else comes to lie at a path that was named, however old it is.

    Args:
        since_ns: unix time, before the engine has read any adapter; the moment of the call when None.
    """

    def __init__(self, since_ns: int | None = None) -> None:
        self._since_ns = time.time_ns() if since_ns is None else since_ns
        self._named: dict[str, tuple[Stamp, str]] = {}

    def name(self, path: str) -> str:
        """The name of the content at `path` (a folder, or a hub name): equal for equal content in every process,
        but for a name of this process alone (see above)."""
        # Unlike Path's, it takes the home of a user who is not here for a name like any other.
        folder = Path(os.path.expanduser(path))
        stamp = Stamp.of(folder)
        known = self._named.get(path)
        if known is None or known[0] != stamp:
            known = self._named[path] = (stamp, self._new_name(folder, known is not None))
        return known[1]

    def _new_name(self, folder: Path, changed: bool) -> str:
        try:
            if changed:
                raise ConfigError(f"adapter {folder} is another than at an earlier request")
            return content_before(folder, self._since_ns, MOST_NAMED_BYTES)
        except ConfigError as error:
            reason = str(error)
        except Exception as error:  # no memory or no thread for the digest, say: the engine must go on
            reason = f"adapter {folder} was not read ({type(error).__name__}: {error})"
        logger.warning("%s; KV computed with it is found again in this run only", reason)
        return f"run:{os.urandom(16).hex()}"


def content_before(folder: Path, since_ns: int, most_bytes: int | None = None) -> str:
    """A string that differs for adapters of different weights or configuration, of which all bytes are read.

    Args:
        most_bytes: of an adapter's weights; None for any.

    Raises:
        ConfigError: a file, the folder or a link on the way changed after `since_ns` (unix time), so that an engine
            may have read other content; there is no folder with weights that we know; or there are more bytes.
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
        # The files of a commit may have been downloaded after the start, and are no others for that.
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
    """Whether `folder` is of a commit in the hub's cache and holds what it did when it was downloaded. Reads all of it.

    A commit's folder has links to files that are named by a digest of what they hold.
    """
    if COMMIT.search(os.path.normpath(folder)) is None:
        return False
    files = [file for file in folder.iterdir() if file.is_file()]
    return all(file.is_symlink() and _digest_like(Path(os.readlink(file)).name, file) for file in files)


def _digest_like(name: str, file: Path) -> bool:
    """Whether `name` is the file's digest: that of git's object, or SHA-256."""
    size = file.stat().st_size
    digest = hashlib.sha256()
    if len(name) == GIT_DIGITS:
        digest = hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
    with file.open("rb") as content:
        while piece := content.read(READ_BYTES):
            digest.update(piece)
    return digest.hexdigest() == name
