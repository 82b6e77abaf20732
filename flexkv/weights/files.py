"""Finds the files from which an engine may load weights, and detects changes of these files."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from flexkv.errors import ConfigError

WEIGHT_PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
"""Patterns for the names of weights files. All matching files count as weights, because an engine's options
(`--load-format`) decide which of the files it loads. Engines look only in the model's folder itself, not in folders
inside it.
"""

INDEX_PATTERN = "*.index.json"
"""Pattern for the names of indexes, which list the files that an engine loads. An index counts only if there are
weights in the same folder."""

NOT_LOADED = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")
"""Endings of the names of files that training leaves beside the weights and that engines do not load."""

GGUF_PART = re.compile(r"(?P<model>.+)-\d{5}-of-(?P<parts>\d{5})\.gguf")
"""Name of one part of a split GGUF model. An engine that loads one part also loads the other parts."""

START_TICKS_FIELD = 19
"""Index of the process's start time in /proc/self/stat, counted from the field after the command's name. The time is in
clock ticks since the machine booted."""


@dataclass(frozen=True, slots=True)
class WeightsContent:
    """The weights of an engine that can be identified only by their content.

    Attributes:
        paths: folders or files of these weights. Empty if all weights are identified in another way: by a commit, a
            seed or the user.
        unnamed: why nothing can identify some of the weights; empty if all can be identified.
    """

    paths: tuple[str, ...] = ()
    unnamed: str = ""

    @property
    def is_named(self) -> bool:
        """Whether the namespace of the keys identifies all weights, so that no file has to be read."""
        return not self.paths and not self.unnamed

    def joined(self, other: WeightsContent) -> WeightsContent:
        """Returns the weights of this object and of `other` together, for example of a model and its draft model."""
        return WeightsContent(self.paths + other.paths, self.unnamed or other.unnamed)


NAMED = WeightsContent()
"""The value for an engine whose weights are all identified by a hub's commit, a seed or the user."""


class FileState(NamedTuple):
    """The attributes of a file that change when the file's content changes, or when a different file gets its name. For
    a symbolic link, these are the attributes of its target.
    """

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    device: int

    @classmethod
    def of(cls, file: Path | int) -> FileState:
        """Returns the current state of a file.

        Args:
            file: a path or an open descriptor.

        Raises:
            OSError: the file does not exist or is not accessible.
        """
        found = os.stat(file)
        return cls(found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev)

    def is_known_as(self, before: FileState) -> bool:
        """Returns whether a file in this state still has the content that was read at the same path in state `before`,
        even if the file system was remounted meanwhile.

        The device is ignored, because many mounts (NFS, overlays, volumes of containers) get a new device number each
        time. Size, times and inode are sufficient: any write changes the inode's time, which no program can set, so a
        different file would need the same nanosecond and the same inode by chance.
        """
        return self._replace(device=before.device) == before

    def is_touched(self, before: FileState) -> bool:
        """Returns whether only the file's ctime has changed since `before`. This means that the file's owner, mode or
        number of links changed. According to its mtime, its content did not change.
        """
        return self != before and self._replace(ctime_ns=before.ctime_ns) == before

    @property
    def changed_ns(self) -> int:
        """Time of the last change to content or inode, in Unix nanoseconds."""
        return max(self.mtime_ns, self.ctime_ns)


def weight_files(path: Path) -> list[Path]:
    """Returns all files from which an engine may load weights, sorted by name, followed by the indexes.

    Args:
        path: a folder or a file. If it is a file, the result is that file. If the file is a part of a split GGUF model,
            the result has all parts of the model.

    Raises:
        ConfigError: the folder has no such files. The message says what to set.
        OSError: the folder cannot be read.
    """
    if not path.is_dir():
        return _parts_of(path)
    names = sorted(os.listdir(path))
    weights = [name for name in names if _is_weights(name)]
    if not weights:
        raise ConfigError(
            f"{path} holds no weights ({', '.join(WEIGHT_PATTERNS)}), so nothing tells it from other models; "
            "set identity.model to a name or revision of the weights"
        )
    indexes = [name for name in names if fnmatch(name, INDEX_PATTERN)]
    return [path / name for name in weights + indexes if not (path / name).is_dir()]


def _is_weights(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in WEIGHT_PATTERNS) and not name.endswith(NOT_LOADED)


def _parts_of(file: Path) -> list[Path]:
    part = GGUF_PART.fullmatch(file.name)
    if part is None:
        return [file]
    found = ((name, GGUF_PART.fullmatch(name)) for name in sorted(os.listdir(file.parent)))
    return [
        file.parent / name for name, other in found if other is not None and other.groups() == part.groups()
    ]


def process_start_ns() -> int:
    """Returns when this process started, in Unix nanoseconds. The result is too late by at most one tick of the
    kernel's clock (10 ms). A file that was written within that tick counts as older than the process, which is
    harmless, because no engine reads weights that early.
    """
    ticks = 1 + int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[START_TICKS_FIELD])
    age_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    return time.time_ns() - age_ns
