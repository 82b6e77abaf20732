"""The keeper's entry point. Its only thread runs the plugins of an `Order` until the engine's process closes the pipe
or is gone."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import sys
import time

from flexkv.plugins.base import Order
from flexkv.plugins.keeper.run import PR_SET_PDEATHSIG, PluginRun
from flexkv.plugins.process_tree import kill_descendants

PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
"""Options of prctl, from linux/prctl.h."""

STDIN, STDOUT = 0, 1

KILL_LOOK_S = 0.01
"""Seconds between two checks of whether the processes that the keeper has killed are gone."""


class Keeper:
    """Runs the plugins of one `Order` on one thread until the engine closes the pipe or the engine's process is gone.

    Args:
        order: the plugins, their folder and their deadlines.
        woken: descriptor that becomes readable when a signal arrives.
    """

    def __init__(self, order: Order, woken: int) -> None:
        now_s = time.monotonic()
        self._times = order.times
        self._woken = woken
        self._lost = 0
        self._runs = [
            PluginRun(program, order.folder, order.times, self.say, now_s) for program in order.programs
        ]

    def say(self, level: str, name: str, line: str) -> None:
        """Writes a message for the engine's log. If the pipe is full, the message is dropped and counted."""
        if self._lost and self._write("W", "keeper", f"{self._lost} lines were lost: the engine reads none"):
            self._lost = 0
        if not self._write(level, name, line):
            self._lost += 1

    def _write(self, level: str, name: str, line: str) -> bool:
        try:
            os.write(STDOUT, f"{level} {name}: {line}\n".encode())
        except OSError:  # the pipe is full, or the engine is gone
            return False
        return True

    def serve(self, is_ending: list[bool]) -> None:
        """Runs the plugins until `is_ending` has an item or the engine closes its end of the pipe, then ends them."""
        while not is_ending:
            now_s = time.monotonic()
            for run in self._runs:
                if run.starts_at_s is not None and run.starts_at_s <= now_s:
                    run.start(now_s)
            if STDIN in self._wait(self._wake_s(now_s), STDIN):
                break
        self._end()

    def _wake_s(self, now_s: float) -> float | None:
        """Returns the seconds until the next planned start of a plugin or read of its output; None if there is none."""
        due = [run.starts_at_s for run in self._runs if run.starts_at_s is not None]
        due += [run.reads_at_s for run in self._runs if run.reads_at_s]
        return max(0.0, min(due) - now_s) if due else None

    def _wait(self, timeout_s: float | None, *others: int) -> list[int]:
        """Waits for plugins' output, for processes that end, and for the descriptors `others`. Reads the output, reaps
        the processes, and returns those of `others` that are readable."""
        poll = select.poll()
        now_s = time.monotonic()
        by_output = {run.output: run for run in self._runs if run.output >= 0 and run.reads_at_s <= now_s}
        for descriptor in (*by_output, *others, self._woken):
            poll.register(descriptor, select.POLLIN)
        timeout_ms = None if timeout_s is None else 1000 * max(0.0, timeout_s) + 1
        ready = [number for number, _ in poll.poll(timeout_ms)]
        now_s = time.monotonic()
        for descriptor in ready:
            if descriptor in by_output:
                by_output[descriptor].read(now_s)
        if self._woken in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._woken, 4096)
        self._reap(now_s)
        return [descriptor for descriptor in others if descriptor in ready]

    def _reap(self, now_s: float) -> None:
        """Reaps every process that has ended: plugins, and their orphans, whose parent is now the keeper."""
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            run = next((run for run in self._runs if run.pid == ended.si_pid), None)
            if run is not None:
                # Kills the rest of the plugin's process group before the plugin is reaped. Once the plugin is reaped,
                # another process group could get the same number.
                run.signal(signal.SIGKILL)
            _, status = os.waitpid(ended.si_pid, 0)
            if run is not None:
                run.ended(os.waitstatus_to_exitcode(status), now_s)

    def _end(self) -> None:
        """Sends SIGTERM to all plugins, gives them `grace_s` seconds to end, then kills the remaining processes."""
        for run in self._runs:
            run.is_ending = True
            run.signal(signal.SIGTERM)
        ends_s = time.monotonic() + self._times.grace_s
        while any(run.pid for run in self._runs) and time.monotonic() < ends_s:
            self._wait(ends_s - time.monotonic())
        if late := [run.program.name for run in self._runs if run.pid]:
            self.say("W", "keeper", f"killed after {self._times.grace_s:g} s: {', '.join(late)}")
        ends_s = time.monotonic() + self._times.kill_s
        while kill_descendants(os.getpid()) and time.monotonic() < ends_s:
            self._reap(time.monotonic())
            time.sleep(KILL_LOOK_S)


def main() -> None:
    order = Order.of(json.loads(sys.argv[1]))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    # The keeper ends with the engine's thread that started it, and becomes the parent of plugins' orphans. Neither the
    # keeper nor a plugin can gain rights, for example from a file that runs as root.
    for option, value in (
        (PR_SET_PDEATHSIG, int(signal.SIGTERM)),
        (PR_SET_CHILD_SUBREAPER, 1),
        (PR_SET_NO_NEW_PRIVS, 1),
    ):
        if prctl(option, value, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), f"prctl({option}) failed")
    is_ending: list[bool] = []
    woken, wakes = os.pipe()
    for descriptor in (woken, wakes, STDOUT):
        os.set_blocking(descriptor, False)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: is_ending.append(True))
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if os.getppid() == order.parent:  # otherwise the engine has ended before `prctl` was called
        Keeper(order, woken).serve(is_ending)


if __name__ == "__main__":
    main()
