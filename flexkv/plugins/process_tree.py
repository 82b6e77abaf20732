"""Finds and kills the descendants of a process."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path


def children_of(pid: int) -> list[int]:
    """Returns the processes whose parent is `pid`, including those that have ended but were not reaped."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        with contextlib.suppress(OSError):  # the process has ended meanwhile
            # The process's name, in brackets, may have any characters. The process's state and its parent's id follow
            # the last bracket.
            fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
            if int(fields[1]) == pid:
                found.append(int(folder.name))
    return found


def kill_descendants(pid: int) -> int:
    """Sends SIGKILL to all descendants of `pid`, parents first. Returns the number of processes that got the signal."""
    waiting, killed = children_of(pid), 0
    while waiting:
        child = waiting.pop()
        waiting += children_of(child)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(child, signal.SIGKILL)
            killed += 1
    return killed
