"""The state of one plugin in the keeper: its process, or the pause until the process is started again."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Callable

from flexkv.plugins.base import Program, Times
from flexkv.plugins.keeper.output import (
    BURST_READS,
    READ_BYTES,
    READS_PER_S,
    OutputLines,
    TokenBucket,
)

PR_SET_PDEATHSIG = 1
"""Option of prctl, from linux/prctl.h."""

Say = Callable[[str, str, str], None]
"""Logs a line. Arguments: level (a letter of `LEVELS` in `launcher`), the plugin's name, the line."""

PRCTL = ctypes.CDLL(None).prctl


class PluginRun:
    """One plugin's process, and when to start it again. Times are in seconds of the monotonic clock.

    Attributes:
        pid: id of the process, which leads its own session; 0 while there is none.
        output: descriptor from which the process's output is read; -1 after its end.
        starts_at_s: when to start the process; None while it runs, and if it is not started again.
        reads_at_s: when to read the output again; 0 for at once.
        is_ending: whether the keeper ends its plugins, so that the process is not started again.
    """

    def __init__(self, program: Program, folder: str, times: Times, say: Say, now_s: float) -> None:
        self.program = program
        self.pid = 0
        self.output = -1
        self.starts_at_s: float | None = now_s
        self.reads_at_s = 0.0
        self.is_ending = False
        self._folder, self._times, self._say = folder, times, say
        self._pause_s = 0.0
        self._started_s = now_s
        self._lines = OutputLines(now_s)
        self._reads = TokenBucket(READS_PER_S, BURST_READS, now_s)

    def start(self, now_s: float) -> None:
        """Starts the process. If it cannot be started, that counts as a failed run."""
        self.starts_at_s = None
        self._started_s, self._lines = now_s, OutputLines(now_s)
        ours, theirs = os.pipe()
        os.set_blocking(ours, False)
        try:
            process = subprocess.Popen(
                self.program.command,
                stdin=subprocess.DEVNULL,
                stdout=theirs,
                stderr=theirs,
                cwd=self._folder,
                start_new_session=True,
                preexec_fn=_die_with_parent,  # safe, because the keeper has one thread
            )
        except (OSError, subprocess.SubprocessError) as error:
            os.close(ours)
            self._fail(f"cannot be started: {error}", now_s)
            return
        finally:
            os.close(theirs)
        self.pid, self.output = process.pid, ours
        process.returncode = 0  # so that subprocess does not reap the process: the keeper does
        self._say("I", self.program.name, f"is started as process {self.pid}")

    def read(self, now_s: float, is_last: bool = False) -> None:
        """Reads one piece of output. Sets `reads_at_s` if the plugin has written enough for now.

        Args:
            is_last: whether the process has ended. One more piece is then read, even if the plugin has written enough
                for now.
        """
        self.reads_at_s = 0.0
        if not self._reads.take(now_s) and not is_last:
            self.reads_at_s = now_s + self._reads.wait_s()
            return
        try:
            chunk = os.read(self.output, READ_BYTES)
        except BlockingIOError:
            return
        for line in self._lines.take(chunk, now_s):
            self._say("I", self.program.name, line)
        if not chunk:
            self._close_output(now_s)

    def ended(self, code: int, now_s: float) -> None:
        """Records that the process has ended and was reaped. A negative `code` is the number of a signal."""
        self.pid = 0
        if self.output >= 0:
            self.read(now_s, is_last=True)  # reads at most one piece
            self._close_output(now_s)
        how = f"ended by signal {-code}" if code < 0 else f"ended with {code}"
        if code and not self.is_ending:
            self._fail(how, now_s)
        else:
            self._say("I", self.program.name, f"{how}, and is not started again")

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to all processes of the plugin's process group."""
        if self.pid:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def _fail(self, reason: str, now_s: float) -> None:
        self._pause_s = self._times.pause_after(self._pause_s, now_s - self._started_s)
        self.starts_at_s = now_s + self._pause_s
        self._say("W", self.program.name, f"{reason}; it is started again in {self._pause_s:g} s")

    def _close_output(self, now_s: float) -> None:
        if self.output >= 0:
            for line in self._lines.end(now_s):
                self._say("I", self.program.name, line)
            os.close(self.output)
            self.output = -1
        self.reads_at_s = 0.0


def _die_with_parent() -> None:
    PRCTL(PR_SET_PDEATHSIG, signal.SIGKILL)
