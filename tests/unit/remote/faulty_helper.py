"""A helper that fails at moments that a test chooses. A test starts it in place of `flexkv.remote.helper` (see
`helper_faults.py`).

A decorator around the helper's store reads a plan from a file at certain moments, each of which has a name. The plan
has the form `MOMENT DEED`: at the moment MOMENT the helper does DEED. Without the file, the helper works as usual.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from flexkv.remote.base import Outcome, Presence, Store, StoreOptions, Value
from flexkv.remote.helper import __main__ as program
from flexkv.remote.helper import control
from flexkv.remote.stores import open_store
from flexkv.remote.values import ValueFormat

PLAN_VARIABLE = "TEST_REMOTE_FAULT_PLAN"
REACHED = ".reached"
"""Suffix of a file name. The helper makes a file with the plan's name and this suffix when it executes the plan."""


def act(moment: str) -> None:
    """Carries out the plan if it is for this moment.

    The deed `kill` or `stop` sends this process the signal of that name; `hold` waits until the plan is removed; `hang`
    blocks this thread for ever, while the process's other threads continue.
    """
    path = Path(os.environ[PLAN_VARIABLE])
    try:
        planned, deed = path.read_text().split()
    except FileNotFoundError:
        return
    if planned != moment:
        return
    Path(f"{path}{REACHED}").touch()
    if deed == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif deed == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif deed == "hold":
        while path.exists():
            time.sleep(0.005)
    else:
        assert deed == "hang"
        time.sleep(3600.0)


class FaultyStore(Store):
    """Wraps a store. It carries out the plan in the middle of each `get` and `put`, after half of the names, and before
    each call of `exists` and `alive`. The moment `check` comes after a `get`.
    """

    def __init__(self, inner: Store) -> None:
        self._inner = inner

    def exists(self, names: Sequence[str], deadline_s: float) -> list[Presence]:
        act("exists")
        presences = self._inner.exists(names, deadline_s)
        self.last_error = self._inner.last_error
        return presences

    def get(self, names: Sequence[str], values: Sequence[Value], deadline_s: float) -> list[Outcome]:
        half = len(names) // 2
        outcomes = self._inner.get(names[:half], values[:half], deadline_s)
        act("get")
        outcomes += self._inner.get(names[half:], values[half:], deadline_s)
        self.last_error = self._inner.last_error
        act("check")
        return outcomes

    def put(self, names: Sequence[str], values: Sequence[Value], deadline_s: float) -> list[Outcome]:
        half = len(names) // 2
        outcomes = self._inner.put(names[:half], values[:half], deadline_s)
        act("put")
        outcomes += self._inner.put(names[half:], values[half:], deadline_s)
        self.last_error = self._inner.last_error
        return outcomes

    def sizes(self, names: Sequence[str], deadline_s: float) -> list[int]:
        return self._inner.sizes(names, deadline_s)

    def remove(self, names: Sequence[str], deadline_s: float) -> list[bool]:
        return self._inner.remove(names, deadline_s)

    def alive(self, deadline_s: float) -> str:
        act("alive")
        return self._inner.alive(deadline_s)

    def close(self) -> None:
        self._inner.close()


def opened(options: StoreOptions) -> Store:
    return FaultyStore(open_store(options))


def unchecked(*arguments: object) -> tuple[str, str]:
    """Replaces the check of a value: it accepts any bytes as the right page, as in a broken helper."""
    return "none", ""


if __name__ == "__main__":
    act("start")
    control.open_store = opened  # type: ignore[attr-defined]
    if os.environ.get("TEST_REMOTE_UNCHECKED"):
        ValueFormat.check = unchecked  # type: ignore[assignment,method-assign]
    program.main()
