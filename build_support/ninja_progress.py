"""Runs ninja and shows its progress. On a terminal this is ninja's own status line; a log gets an occasional line."""

from __future__ import annotations

import os
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import IO

from build_support.console import say

EVERY_S = 15.0
"""Seconds between two lines in a log."""
SILENCE_S = 1.0
"""After this many seconds without output of ninja, the program checks whether to print a line of progress. Compiling
one CUDA file can take minutes.
"""

STATUS = re.compile(r"\[(\d+)/(\d+)\] ")
NOISE = ("ninja: Entering directory", "ninja: no work to do")


def run_ninja(command: Sequence[str], name: str, variables: Mapping[str, str] | None = None) -> None:
    """Runs `command` and prints its messages about failures.

    Args:
        name: what is built; the printed lines begin with it.
        variables: more environment variables for the command.

    Raises:
        subprocess.CalledProcessError: a compile or link step failed.
    """
    environ = {**os.environ, **(variables or {}), "NINJA_STATUS": "[%f/%t] "}
    # `make -j` lists file descriptors of its job server in MAKEFLAGS, but passes these descriptors only to other makes.
    environ.pop("MAKEFLAGS", None)
    if sys.stdout.isatty():
        subprocess.check_call(command, env=environ)
        return
    began = said = time.monotonic()
    done = total = 0
    with subprocess.Popen(
        command, env=environ, stdout=subprocess.PIPE, text=True, errors="replace", bufsize=1
    ) as ninja:
        assert ninja.stdout is not None
        for line in _lines(ninja.stdout):
            status = STATUS.match(line)
            if status is not None:
                done, total = int(status[1]), int(status[2])
            elif line and not line.startswith(NOISE):
                print(line, end="", flush=True)
            if (status is not None or not line) and time.monotonic() - said >= EVERY_S:
                said = time.monotonic()
                how_far = f"{done} of {total} files" if total else "the first file"
                say(f"{name}: {how_far}, {said - began:.0f} s")
    if ninja.returncode != 0:
        raise subprocess.CalledProcessError(ninja.returncode, command)
    if total:
        say(f"{name}: {done} of {total} files, {time.monotonic() - began:.0f} s")


def _lines(stream: IO[str]) -> Iterator[str]:
    """Yields the stream's lines, and an empty string after each `SILENCE_S` seconds without a line."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        for line in stream:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            line = lines.get(timeout=SILENCE_S)
        except queue.Empty:
            yield ""
        else:
            if line is None:
                return
            yield line
