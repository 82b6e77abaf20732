"""What tells one LoRA adapter's content from another's: a name and a path stay the same when it is trained anew."""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

from flexkv.adapters.common.weights import COMMIT_PREFIX, weights_identity
from flexkv.errors import ConfigError
from flexkv.observe import get_logger

logger = get_logger(__name__)

START_TICKS_FIELD = 19
"""Of /proc/self/stat, counted after the command's name: clock ticks from the machine's start to the process's."""

CONFIG_NAME = "adapter_config.json"
"""Rank, scale and target modules: the same matrices under another scale are another adapter."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """Changes whenever a file of an adapter does.

    Attributes:
        files: of each its name, bytes, times of change (content, inode; ns) and inode; none without a folder.
    """

    files: tuple[tuple[str, int, int, int, int], ...] = ()

    @classmethod
    def of(cls, folder: Path) -> Stamp:
        try:
            with os.scandir(folder) as entries:
                found = [(entry.name, entry.stat()) for entry in entries if entry.is_file()]
        except OSError:
            return cls()
        return cls(tuple(sorted((n, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino) for n, s in found)))

    @property
    def changed_ns(self) -> int:
        """When the last of the files changed. A copy that keeps the time of content has a new one of the inode."""
        return max((max(mtime, ctime) for _, _, mtime, ctime, _ in self.files), default=0)


class AdapterNames:
    """Names of adapters' contents, one for each path, made when the path is met first or its files have changed.

    Looking costs a few stats a call. To make a name, samples of the weights and all of the configuration are read.

    An engine reads an adapter some time after its start, keeps it, and does not say which content it has. So an
    adapter whose files changed after `since_ns`, or that is no folder on this machine, gets a name of this process
    alone: KV that was computed with either content must not be found under the name of one.

    Args:
        since_ns: unix time, before the engine has read any adapter; the moment of the call when None.
    """

    def __init__(self, since_ns: int | None = None) -> None:
        self._since_ns = time.time_ns() if since_ns is None else since_ns
        self._named: dict[str, tuple[Stamp, str]] = {}

    def name(self, path: str) -> str:
        """The name of the content at `path` (a folder, or a hub name): equal for equal content in every process,
        but for a name of this process alone (see above)."""
        folder = Path(path).expanduser()
        stamp = Stamp.of(folder)
        known = self._named.get(path)
        if known is None or known[0] != stamp:
            known = self._named[path] = (stamp, self._new_name(folder))
        return known[1]

    def _new_name(self, folder: Path) -> str:
        try:
            return content_before(folder, self._since_ns)
        except ConfigError as error:
            logger.warning("%s; KV computed with it is found again in this run only", error)
            return f"run:{os.urandom(16).hex()}"


def content_before(folder: Path, since_ns: int) -> str:
    """A string that differs for adapters of different weights or configuration.

    Raises:
        ConfigError: a file changed after `since_ns` (unix time), so that an engine may have read other content; or
            there is no folder with weights that we know.
    """
    before = Stamp.of(folder)
    if not before.files:
        raise ConfigError(
            f"adapter {folder} is no folder with files on this machine, so nothing names its content"
        )
    try:
        weights = weights_identity(str(folder), None)
        config = folder / CONFIG_NAME
        settings = config.read_bytes() if config.is_file() else b""
    except OSError as error:
        raise ConfigError(f"adapter {folder}: {error}") from error
    # A commit's files never change; they may have been downloaded after the start.
    if not weights.startswith(COMMIT_PREFIX) and before.changed_ns >= since_ns:
        raise ConfigError(
            f"adapter {folder}: its files changed after the engine's start, which may have read others"
        )
    if Stamp.of(folder) != before:
        raise ConfigError(f"adapter {folder}: its files are changing")
    return f"{weights}+{hashlib.sha256(settings).hexdigest()}"


def process_start_ns() -> int:
    """Unix time at which this process began, at most one tick of the kernel's clock (10 ms) too late: what was written
    right before it counts as old, and no engine reads an adapter so soon."""
    ticks = 1 + int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[START_TICKS_FIELD])
    age_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    return time.time_ns() - age_ns
