"""The files from which an engine may load weights, and how to detect that one of them changed."""

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
"""Which of these files an engine loads depends on its options (`--load-format`), so all of them count. Engines look
only in the model's folder, not below it.
"""

INDEX_PATTERN = "*.index.json"
"""An index says which of the files an engine loads; it counts only if there are weights beside it."""

NOT_LOADED = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")
"""Endings of names that engines do not load: files that training left beside the weights."""

GGUF_PART = re.compile(r"(?P<model>.+)-\d{5}-of-(?P<parts>\d{5})\.gguf")
"""One part of a split model; an engine that loads it also loads the other parts."""

START_TICKS_FIELD = 19
"""Field of /proc/self/stat, counted after the command's name: clock ticks from the machine's start to the process's."""


@dataclass(frozen=True, slots=True)
class WeightsContent:
    """The part of an engine's weights that only its content identifies.

    Attributes:
        paths: folders or files of weights; empty if a commit or the user identifies all weights.
        unnamed: why nothing can identify the weights; empty if something does.
    """

    paths: tuple[str, ...] = ()
    unnamed: str = ""

    @property
    def is_named(self) -> bool:
        """Whether the keys' namespace names all weights, so that no file has to be read."""
        return not self.paths and not self.unnamed

    def joined(self, other: WeightsContent) -> WeightsContent:
        """The weights of both, such as a model's and its draft's."""
        return WeightsContent(self.paths + other.paths, self.unnamed or other.unnamed)


NAMED = WeightsContent()
"""Weights that a hub's commit, a seed or the user identifies."""


class FileState(NamedTuple):
    """The attributes that change with a file's content, or when another file takes its name; for a link, those of its
    target.
    """

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    device: int

    @classmethod
    def of(cls, file: Path | int) -> FileState:
        """
        Args:
            file: a path or an open descriptor.

        Raises:
            OSError: the file cannot be looked at.
        """
        found = os.stat(file)
        return cls(found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev)

    def is_known_as(self, before: FileState) -> bool:
        """Whether content that was read at this path in state `before` is unchanged, even if it was remounted.

        Ignores the device, because many mounts get a new number each time (NFS, overlays, volumes of containers). Size,
        times and inode are enough: any write changes the inode's time, which no program can set, so another file would
        need the same nanosecond and the same inode by chance.
        """
        return self._replace(device=before.device) == before

    def is_touched(self, before: FileState) -> bool:
        """Whether this is the file of `before`, changed but not written according to its mtime: a new owner, mode or
        link changes only the inode's ctime.
        """
        return self != before and self._replace(ctime_ns=before.ctime_ns) == before

    @property
    def changed_ns(self) -> int:
        """Unix time of the last change to content or inode."""
        return max(self.mtime_ns, self.ctime_ns)


def weight_files(path: Path) -> list[Path]:
    """Every file from which an engine may load weights, sorted by name, and then the indexes.

    Args:
        path: a folder, or a file; for a part of a split GGUF model this includes the other parts.

    Raises:
        ConfigError: there are none; the message says what to set.
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
    """Unix time at which this process began, at most one tick of the kernel's clock (10 ms) too late. A file written
    within that tick counts as old, which is harmless, because no engine reads weights that early.
    """
    ticks = 1 + int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[START_TICKS_FIELD])
    age_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    return time.time_ns() - age_ns
