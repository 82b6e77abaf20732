"""flexkv's connector with a clock on every hook, and how another process reads the clocks.

Clocks are CPU time of the calling thread, so that other work on the machine does not count. Every process of the engine
keeps its sums in a file of its own that is mapped into memory: reading them disturbs no engine. flexkv's own threads
are found by their name and read from the kernel's accounting.
"""

from __future__ import annotations

import functools
import inspect
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flexkv.adapters.vllm.connector import FlexKVConnector

FOLDER_VARIABLE = "COST_FOLDER"
THREAD_PREFIX = "flexkv-"
HOOKS = tuple(
    name
    for name, hook in vars(FlexKVConnector).items()
    if inspect.isfunction(hook) and not name.startswith("_")
)


class Ledger:
    """CPU seconds and calls of every hook in one process: float64 [hooks, 2], a file named by the process id."""

    def __init__(self) -> None:
        self._pid = -1
        self._sums: Any = None

    def add(self, hook: int, seconds: float) -> None:
        if self._pid != os.getpid():
            self._pid = os.getpid()
            path = Path(os.environ[FOLDER_VARIABLE]) / str(self._pid)
            self._sums = np.memmap(path, dtype=np.float64, mode="w+", shape=(len(HOOKS), 2))
        self._sums[hook] += (seconds, 1)


LEDGER = Ledger()


def _timed(number: int, hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(hook)
    def timed(*arguments: Any, **named: Any) -> Any:
        started_s = time.thread_time()
        try:
            return hook(*arguments, **named)
        finally:
            LEDGER.add(number, time.thread_time() - started_s)

    return timed


class CostedConnector(FlexKVConnector):
    """As a user's connector, with its hooks timed."""


for _number, _name in enumerate(HOOKS):
    setattr(CostedConnector, _name, _timed(_number, getattr(FlexKVConnector, _name)))


@dataclass(frozen=True, slots=True)
class Costs:
    """What flexkv has used so far in all processes of an engine.

    Attributes:
        hooks: hook -> CPU seconds.
        calls: hook -> how often it was called.
        threads: thread name -> CPU seconds, of threads that live.
    """

    hooks: dict[str, float]
    calls: dict[str, int]
    threads: dict[str, float]

    @property
    def seconds(self) -> float:
        return sum(self.hooks.values()) + sum(self.threads.values())

    @classmethod
    def read(cls, folder: Path) -> Costs:
        """Reads the ledgers in `folder` and the threads of the processes that keep them."""
        sums = np.zeros((len(HOOKS), 2))
        threads: dict[str, float] = {}
        for ledger in folder.iterdir():
            sums += np.fromfile(ledger, dtype=np.float64).reshape(len(HOOKS), 2)
            for task in Path(f"/proc/{ledger.name}/task").iterdir():
                name = (task / "comm").read_text().strip()
                if name.startswith(THREAD_PREFIX):
                    # The first number of schedstat is the time on a CPU in nanoseconds.
                    used = int((task / "schedstat").read_text().split()[0]) * 1e-9
                    threads[name] = threads.get(name, 0.0) + used
        called = {name: (float(s), int(n)) for name, (s, n) in zip(HOOKS, sums, strict=True) if n}
        return cls({k: s for k, (s, _) in called.items()}, {k: n for k, (_, n) in called.items()}, threads)
