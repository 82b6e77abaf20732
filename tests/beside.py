"""Programs that run beside the tests, for a core left idle: compilers, sanitizers and SGLang's engines (`apart.py`).

A test marked `beside(*arguments)` takes the fixture `beside`: how `python *arguments` ended. These programs start
once the tests are collected, and tests that wait for them come last. While other tests run it is one program at a time,
of low priority; then two.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

Command = tuple[str, ...]
"""What follows `python`."""

NICENESS = "10"
MOST_AT_ONCE = 2

TO_END_S = 30.0
"""Of a program that was asked to end: what it started goes with it, engines in sessions of their own too."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a program ended: its exit code, and all it said."""

    code: int
    output: str


class Beside:
    """Runs programs in the order given.

    Args:
        alone: nothing else runs, so that two may run at once from the start.
    """

    def __init__(self, commands: Iterable[Command], alone: bool) -> None:
        self._futures: dict[Command, Future[Ended]] = {command: Future() for command in commands}
        self._waiting = deque(self._futures)
        self._lock = threading.Lock()
        self._closed = False
        self._running: dict[Command, subprocess.Popen[str]] = {}
        self._threads: list[threading.Thread] = []
        jobs = max(1, len(os.sched_getaffinity(0)) // MOST_AT_ONCE)
        self._environ = {"MAX_JOBS": str(jobs), **os.environ}
        self._environ.pop("PYTEST_ADDOPTS", None)  # meant for the session that was started by hand
        for _ in range(MOST_AT_ONCE if alone else 1):
            self._start_thread()

    def ended(self, command: Command) -> Ended:
        """Waits for the end of a program; the test's own limit is the deadline. From now on two run at once."""
        if len(self._threads) < MOST_AT_ONCE:
            self._start_thread()
        return self._futures[command].result()

    def end(self, command: Command) -> None:
        """Ends a program if it runs, with its compilers and tests."""
        with self._lock:
            process = self._running.get(command)
        if process is not None:
            _end([process])

    def close(self) -> None:
        """Ends what runs and starts nothing more."""
        with self._lock:
            self._closed = True
            running = list(self._running.values())
        _end(running)
        for thread in self._threads:
            thread.join()

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._work, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _work(self) -> None:
        while (command := self._next()) is not None:
            future = self._futures[command]
            process = self._running.get(command)
            if process is None:
                continue  # it could not be started
            output, _ = process.communicate()
            with self._lock:
                del self._running[command]
            future.set_result(Ended(process.returncode, output))

    def _next(self) -> Command | None:
        """The next command, which has been started, or of which the future says why not."""
        with self._lock:
            if self._closed or not self._waiting:
                return None
            command = self._waiting.popleft()
            try:
                self._running[command] = self._start(command)
            except OSError as error:
                self._futures[command].set_exception(error)
            return command

    def _start(self, command: Command) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["nice", "-n", NICENESS, sys.executable, *command],
            cwd=ROOT,
            env=self._environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )


def _end(processes: Iterable[subprocess.Popen[str]]) -> None:
    """Asks groups of processes to end as Ctrl-C does, so that they end what they have started; then ends them."""
    for sent, wait_s in ((signal.SIGINT, TO_END_S), (signal.SIGTERM, TO_END_S), (signal.SIGKILL, TO_END_S)):
        ends_s = time.monotonic() + wait_s
        left = [process for process in processes if process.poll() is None]
        for process in left:
            with suppress(ProcessLookupError):  # it has just ended
                os.killpg(process.pid, sent)
        for process in left:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, ends_s - time.monotonic()))
