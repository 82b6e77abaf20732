"""Finds the plugins in a folder. Determines beside which processes each plugin runs, and which files are refused."""

from __future__ import annotations

import os
import re
import stat
import sys
from dataclasses import dataclass, field
from pathlib import Path

import flexkv
from flexkv.plugins.base import Program, Role

MOST_PROGRAMS = 16
"""The maximum number of plugins in a folder. Each plugin is a process, and a folder with more of them is probably a
mistake.
"""

NAME = re.compile(r"(?:(?P<scheduler>scheduler)|worker_(?P<rank>\d{1,6})|(?P<all>all))_.")
CLAIMS = re.compile(r"(scheduler|worker|all)_")
"""Matches the beginning of a plugin's file name. A file whose name matches this but not NAME is refused, because its
name does not say beside which rank the plugin runs.
"""

# A Python plugin finds modules in its own folder first, and then this flexkv, even if another one is installed.
START = (
    "import os, runpy, sys; del sys.argv[0]; root = sys.argv.pop(0); "
    "sys.path[:] = [os.path.dirname(sys.argv[0]), root, *filter(None, sys.path)]; "
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)


@dataclass(frozen=True, slots=True)
class FoundPrograms:
    """A folder's plugins.

    Attributes:
        places: role, rank and program of each plugin, as the name of its file says. None stands for every role, or for
            every rank.
        refused: path of each refused file, or of the folder if it was refused, and the reason.
    """

    places: list[tuple[Role | None, int | None, Program]] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)

    def at(self, role: Role, rank: int | None) -> tuple[Program, ...]:
        """Returns the programs that run beside the process of a role and rank, in order of their names."""
        return tuple(
            program
            for wanted_role, wanted_rank, program in self.places
            if wanted_role in (None, role) and wanted_rank in (None, rank)
        )


def find_programs(folder: str) -> FoundPrograms:
    """Finds the plugins of a folder. Ignores files whose names do not begin like a plugin's: data, modules, notes."""
    found = FoundPrograms()
    try:
        status = os.stat(folder)
        names = sorted(os.listdir(folder))
    except OSError as error:
        found.refused.append((folder, str(error.strerror)))
        return found
    reason = _distrusted(status) or _distrusted_above(Path(folder)) or _distrusted_modules(folder, names)
    if reason:
        found.refused.append((folder, reason))
        return found
    for name in names:
        if CLAIMS.match(name) is None:
            continue
        path = Path(folder, name)
        program, reason = _program(path)
        said = NAME.match(name)
        if said is None:
            reason = "its name says no rank; allowed are scheduler_*, worker_<rank>_* and all_*"
        elif len(found.places) == MOST_PROGRAMS:
            reason = f"the folder has {MOST_PROGRAMS} plugins already, which is the most"
        elif not _is_text(name):
            reason = "its name is no printable text"
        if reason or said is None or program is None:
            found.refused.append((str(path) if _is_text(name) else ascii(str(path)), reason))
            continue
        rank = None if said["rank"] is None else int(said["rank"])
        role = None if said["all"] else Role.WORKER if rank is not None else Role.SCHEDULER
        found.places.append((role, rank, program))
    return found


def _program(path: Path) -> tuple[Program | None, str]:
    """Returns the program of a file and an empty text, or None and why the file is not run."""
    try:
        status = path.stat()
    except OSError as error:
        return None, str(error.strerror)
    if not stat.S_ISREG(status.st_mode):
        return None, "it is no regular file"
    if reason := _distrusted(status) or (_distrusted_above(path) if path.is_symlink() else ""):
        return None, reason
    if path.suffix == ".py":
        root = str(Path(flexkv.__file__).resolve().parent.parent)
        return Program(path.name, (sys.executable, "-c", START, root, str(path))), ""
    if not os.access(path, os.X_OK):
        return None, "it is neither executable nor a .py file"
    return Program(path.name, (str(path),)), ""


def _is_text(name: str) -> bool:
    """Returns whether a file's name can be logged. For bytes that are not UTF-8, `os.listdir` returns surrogates, which
    cannot be printed."""
    return name.isprintable()


def _distrusted_modules(folder: str, names: list[str]) -> str:
    """Returns why a module in the folder is not trusted; empty if all are trusted. Python plugins import from this
    folder first."""
    for name in names:
        if name.endswith(".py") and CLAIMS.match(name) is None:
            try:
                reason = _distrusted(os.stat(Path(folder, name)))
            except OSError as error:
                reason = str(error.strerror)
            if reason:
                return f"a plugin may import {name!a}: {reason}"
    return ""


def _distrusted_above(path: Path) -> str:
    """Returns why a folder above `path` is not trusted; empty if all are trusted. Whoever may write to such a folder
    can replace the plugin's file, unless the folder's sticky bit, which /tmp has, allows only a file's owner to replace
    the file.
    """
    for above in path.resolve().parents:
        status = os.stat(above)
        if status.st_mode & stat.S_ISVTX:
            continue
        if reason := _distrusted(status):
            return f"{above}: {reason}"
    return ""


def _distrusted(status: os.stat_result) -> str:
    """Returns why a folder or file is not trusted; empty if it is trusted. It is not trusted if another user could
    change what the engine's user runs, or if the program would run as another user."""
    me = os.geteuid()
    if status.st_uid not in (0, me):
        return f"it belongs to user {status.st_uid}; allowed are the engine's user ({me}) and root"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others may write to it (mode {stat.S_IMODE(status.st_mode):o}); `chmod go-w` mends it"
    if stat.S_ISREG(status.st_mode) and status.st_mode & (stat.S_ISUID | stat.S_ISGID):
        return f"it runs as another user or group (mode {stat.S_IMODE(status.st_mode):o})"
    return ""
