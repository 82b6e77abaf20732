"""The part of the plugins' code that runs in the engine's process. It starts, restarts and ends the keeper (the process
that runs the plugins), and logs the keeper's messages.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time

from flexkv.observe import get_logger
from flexkv.observe.named_thread import NamedThread
from flexkv.plugins.base import Order, Place, Program, Times
from flexkv.plugins.process_tree import kill_descendants
from flexkv.remote.own_program import own_program

logger = get_logger(__name__)

LEVELS = {"I": logger.info, "W": logger.warning}
"""First letter of a keeper's message -> function that logs the message. Other lines are Python's own messages about a
keeper that failed."""

LINE_BYTES = 4096
"""The length of the longest line that is read at once, in bytes. A keeper does not write longer lines."""

MARGIN_S = 2.0
"""After its plugins' deadlines, a keeper (the process that runs the plugins) has this many more seconds to end, because
a busy machine may schedule it late.
"""


class PluginLauncher:
    """A thread that runs the keeper, the process that runs the plugins of one place. The thread lives as long as the
    unit or rank, because Linux ends the keeper when the thread that started it ends. Only `close` waits. No method
    raises, because an engine can run without plugins.

    Args:
        place: the process beside which the plugins run.
        programs: the plugins that run beside that process; at least one.
        folder: current folder of the plugins' processes.
        times: deadlines and pauses; None for the defaults.
    """

    def __init__(
        self, place: Place, programs: tuple[Program, ...], folder: str, times: Times | None = None
    ) -> None:
        self._place = place
        self._times = times or Times()
        self._programs, self._folder = programs, folder
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = NamedThread("flexkv-plugins", self._run)
        try:
            self._thread.start()
        except RuntimeError as error:  # the system allows no more threads
            logger.error("plugins of the %s are not started: %s", place, error)
            self._closing.set()

    def _run(self) -> None:
        pause_s = 0.0
        while not self._closing.is_set():
            started_s = time.monotonic()
            ended = self._keep()
            if self._closing.is_set():
                return
            pause_s = self._times.pause_after(pause_s, time.monotonic() - started_s)
            logger.warning(
                "the keeper of the plugins of the %s %s; it is started again in %g s",
                self._place,
                ended,
                pause_s,
            )
            self._closing.wait(pause_s)

    def _keep(self) -> str:
        """Runs one keeper until it ends, and returns how it ended."""
        order = Order(os.getpid(), self._folder, self._programs, self._times)
        try:
            with self._lock:
                if self._closing.is_set():
                    return "is not started any more"
                self._process = process = subprocess.Popen(
                    [*own_program("flexkv.plugins.keeper"), json.dumps(order.plain())],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **self._place.variables()},
                    start_new_session=True,
                )
        except OSError as error:
            return f"cannot be started: {error}"
        assert process.stdout is not None
        while line := process.stdout.readline(LINE_BYTES):
            text = line.decode(errors="replace").rstrip()
            level, _, rest = text.partition(" ")
            if level in LEVELS:
                LEVELS[level]("plugin of the %s, %s", self._place, rest)
            else:
                logger.error("keeper of the plugins of the %s: %s", self._place, text)
        code = process.wait()
        with self._lock:
            self._process = None
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()
        return f"ended by signal {-code}" if code < 0 else f"ended with {code}"

    def begin_close(self) -> None:
        """Asks the keeper to end the plugins, without waiting. Idempotent."""
        self._closing.set()
        with self._lock:
            if self._process is not None and self._process.stdin is not None:
                self._process.stdin.close()

    def close(self) -> bool:
        """Ends the plugins and waits for the keeper. Returns whether the keeper ended in time. Idempotent."""
        self.begin_close()
        if not self._thread.ident:
            return True
        self._thread.join(self._times.grace_s + self._times.kill_s + MARGIN_S)
        if self._thread.is_alive():
            self._kill()
            self._thread.join(self._times.kill_s)
        if self._thread.is_alive():
            logger.error("the plugins of the %s did not end", self._place)
        return not self._thread.is_alive()

    def _kill(self) -> None:
        with self._lock:
            if self._process is None:
                return
            logger.warning("the keeper of the plugins of the %s is killed: it does not end", self._place)
            kill_descendants(self._process.pid)
            self._process.kill()
