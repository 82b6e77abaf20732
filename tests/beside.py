"""Programs that run beside the tests: minutes of compiling and of running under sanitizers, for a core left idle.

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
        self._running: set[subprocess.Popen[str]] = set()
        self._threads: list[threading.Thread] = []
        jobs = max(1, len(os.sched_getaffinity(0)) // MOST_AT_ONCE)
        self._environ = {"MAX_JOBS": str(jobs), **os.environ}
        for _ in range(MOST_AT_ONCE if alone else 1):
            self._start_thread()

    def ended(self, command: Command) -> Ended:
        """Waits for the end of a program; the test's own limit is the deadline. From now on two run at once."""
        if len(self._threads) < MOST_AT_ONCE:
            self._start_thread()
        return self._futures[command].result()

    def close(self) -> None:
        """Ends what runs and starts nothing more."""
        with self._lock:
            self._closed = True
            for process in self._running:
                with suppress(ProcessLookupError):  # it has just ended
                    os.killpg(process.pid, signal.SIGTERM)  # its compilers and tests too
        for thread in self._threads:
            thread.join()

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._work, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _work(self) -> None:
        while (process_of := self._next()) is not None:
            process, future = process_of
            output, _ = process.communicate()
            with self._lock:
                self._running.remove(process)
            future.set_result(Ended(process.returncode, output))

    def _next(self) -> tuple[subprocess.Popen[str], Future[Ended]] | None:
        with self._lock:
            if self._closed or not self._waiting:
                return None
            command = self._waiting.popleft()
            process = subprocess.Popen(
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
            self._running.add(process)
            return process, self._futures[command]
