"""Runs ninja and says how far it is: on a terminal in ninja's own single line, in a log in a line now and then."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence

from build_support.console import say

EVERY_S = 15.0
"""Between two lines of a log."""

STATUS = re.compile(r"\[(\d+)/(\d+)\] ")
NOISE = ("ninja: Entering directory", "ninja: no work to do")


def run_ninja(command: Sequence[str], name: str) -> None:
    """Runs `command`; what it says about failures is passed on.

    Args:
        name: of what is built, for the lines.

    Raises:
        subprocess.CalledProcessError: a compile or link step failed.
    """
    environ = {**os.environ, "NINJA_STATUS": "[%f/%t] "}
    if sys.stdout.isatty():
        subprocess.check_call(command, env=environ)
        return
    began = said = time.monotonic()
    done = total = 0
    with subprocess.Popen(
        command, env=environ, stdout=subprocess.PIPE, text=True, errors="replace", bufsize=1
    ) as ninja:
        assert ninja.stdout is not None
        for line in ninja.stdout:
            status = STATUS.match(line)
            if status is None:
                if not line.startswith(NOISE):
                    print(line, end="", flush=True)
                continue
            done, total = int(status[1]), int(status[2])
            if time.monotonic() - said >= EVERY_S:
                said = time.monotonic()
                say(f"{name}: {done} of {total} files, {said - began:.0f} s")
    if ninja.returncode != 0:
        raise subprocess.CalledProcessError(ninja.returncode, command)
    if total:
        say(f"{name}: {done} of {total} files, {time.monotonic() - began:.0f} s")
