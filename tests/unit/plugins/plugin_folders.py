"""Helpers for tests of plugins. They write plugins into folders, and find processes and resources that plugins leave
behind."""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from flexkv.plugins.base import Times

DEADLINE_S = 60.0
QUICK = Times(first_restart_s=0.05, longest_restart_s=60.0, grace_s=0.3, kill_s=20.0)
"""Time limits for plugins in tests. A plugin that hangs is killed soon. The kernel gets a long time to carry out the
kill."""

SLEEPS = "#!/bin/sh\nexec sleep 1000\n"
HANGS = "#!/bin/sh\ntrap '' TERM INT HUP\necho deaf\nwhile :; do sleep 1000; done\n"
FLOODS = "#!/bin/sh\nexec yes flood\n"
EXITS = "#!/bin/sh\necho here\nexit 3\n"
ENDS = "#!/bin/sh\necho done\n"
LEAVES = "#!/bin/sh\nsetsid sleep 1000 &\nsleep 1000 &\necho left\nexec sleep 1000\n"
"""The source of a plugin that starts two processes: one in a new session, and one in the plugin's session."""


def plugin(folder: Path, name: str, text: str = SLEEPS, mode: int = 0o755) -> Path:
    """Writes a plugin into the folder, with permissions `mode` whatever the umask is. Returns the plugin's path."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)
    path = folder / name
    path.write_text(text)
    path.chmod(mode)
    return path


def wait_for(condition: Callable[[], object], what: str, within_s: float = DEADLINE_S) -> None:
    ends_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < ends_s, f"{what}: not within {within_s:g} s"
        time.sleep(0.01)


def processes_of(folder: Path) -> set[int]:
    """Returns the ids of the processes that run in a folder, or that have the folder in their command line: its
    plugins, the processes that these plugins have started, and the plugins' keepers."""
    found = set()
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            try:
                here = (process / "cwd").readlink() == folder
                named = os.fsencode(folder) in (process / "cmdline").read_bytes()
            except OSError:  # the process has ended during this search
                continue
            if (here or named) and int(process.name) != os.getpid():
                found.add(int(process.name))
    return found


class Held:
    """The resources that this process holds when the object is made: the names of its flexkv threads, and its file
    descriptors. Two such objects are equal if they have the same threads and equally many descriptors.
    """

    def __init__(self) -> None:
        gc.collect()  # the core's lane keeps descriptors until its Python object is destroyed
        self.threads = {thread.name for thread in threading.enumerate() if thread.name.startswith("flexkv-")}
        self.descriptors = sorted(
            os.readlink(f"/proc/self/fd/{number}") if os.path.exists(f"/proc/self/fd/{number}") else ""
            for number in os.listdir("/proc/self/fd")
        )

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Held)
        return self.threads == other.threads and len(self.descriptors) == len(other.descriptors)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{sorted(self.threads)} {self.descriptors}"


class Lines(logging.Handler):
    """A log handler that keeps the messages of plugins' loggers."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")

    def count(self, text: str) -> int:
        return sum(text in line for line in self.lines)

    def wait_for(self, text: str, times: int = 1) -> None:
        wait_for(lambda: self.count(text) >= times, f"{text!r} in {self.lines[-5:]}")
