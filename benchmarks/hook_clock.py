"""Times the hooks that an engine calls, and lets another process read the times.

Each time is the calling thread's CPU time, so that other work on the machine does not count. Each process of the engine
keeps its sums in its own memory-mapped file, so that reading them does not disturb the engine. flexkv's own threads are
found by their names, and their CPU time is read from the kernel's accounting.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

FOLDER_VARIABLE = "COST_FOLDER"
THREAD_PREFIX = "flexkv-"


def hooks_of(kind: type) -> tuple[str, ...]:
    """Returns the names of the public methods that a class defines itself."""
    return tuple(
        name for name, hook in vars(kind).items() if inspect.isfunction(hook) and not name.startswith("_")
    )


class Ledger:
    """CPU seconds and number of calls of every hook in one process. A file named after the process id contains them as
    float64 [hooks, 2]. A second file, with the suffix .json, lists the hooks' names.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self._pid = -1
        self._sums: Any = None

    def put_clocks(self, target: type, base: type, names: Sequence[str]) -> None:
        """Adds timed versions of the methods `names` of the class `base` to the class `target`."""
        for name in names:
            self.names.append(name)
            setattr(target, name, self._timed(len(self.names) - 1, getattr(base, name)))

    def add(self, hook: int, seconds: float) -> None:
        if self._pid != os.getpid():
            self._pid = os.getpid()
            path = Path(os.environ[FOLDER_VARIABLE]) / str(self._pid)
            self._sums = np.memmap(path, dtype=np.float64, mode="w+", shape=(len(self.names), 2))
            # The list of names is written last, because a reader that finds it must also find the file with the sums.
            path.with_suffix(".json").write_text(json.dumps(self.names))
        self._sums[hook] += (seconds, 1)

    def _timed(self, number: int, hook: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(hook)
        def timed(*arguments: Any, **named: Any) -> Any:
            started_s = time.thread_time()
            try:
                return hook(*arguments, **named)
            finally:
                self.add(number, time.thread_time() - started_s)

        return timed


@dataclass(frozen=True, slots=True)
class Costs:
    """The CPU time that flexkv has used so far in all processes of an engine.

    Attributes:
        hooks: CPU seconds of each hook.
        calls: number of calls of each hook.
        threads: CPU seconds of flexkv's running threads, by thread name.
    """

    hooks: dict[str, float]
    calls: dict[str, int]
    threads: dict[str, float]

    @property
    def seconds(self) -> float:
        return sum(self.hooks.values()) + sum(self.threads.values())

    @classmethod
    def read(cls, folder: Path) -> Costs:
        """Reads the ledgers in `folder`, and the CPU time of the threads of the processes that write them."""
        costs = cls({}, {}, {})
        for names in folder.glob("*.json"):
            hooks = json.loads(names.read_text())
            sums = np.fromfile(names.with_suffix(""), dtype=np.float64).reshape(len(hooks), 2)
            for hook, (seconds, calls) in zip(hooks, sums, strict=True):
                if calls:
                    costs.hooks[hook] = costs.hooks.get(hook, 0.0) + float(seconds)
                    costs.calls[hook] = costs.calls.get(hook, 0) + int(calls)
            for task in Path(f"/proc/{names.stem}/task").iterdir():
                name = (task / "comm").read_text().strip()
                if name.startswith(THREAD_PREFIX):
                    # The first number of schedstat is the time on a CPU in nanoseconds.
                    used = int((task / "schedstat").read_text().split()[0]) * 1e-9
                    costs.threads[name] = costs.threads.get(name, 0.0) + used
        return costs

    def since(self, before: Costs, requests: int = 1) -> dict[str, float]:
        """Returns by how much the CPU seconds of hooks, the CPU seconds of threads, and the number of calls have grown
        since the reading `before`, divided by `requests`.
        """
        return {
            kind: (sum(getattr(self, kind).values()) - sum(getattr(before, kind).values())) / requests
            for kind in ("hooks", "threads", "calls")
        }
