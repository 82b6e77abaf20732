"""The contracts of plugins: where they run, what they get, how they are restarted and ended.

```
engine's process                 keeper (one process per place)         plugins
  PluginLauncher --- a pipe ---> starts, restarts, ends  ------------>  scheduler_*, all_*
    (a thread)   <-- lines ----  bounds their output     <-- output --  worker_0_*, all_*
```

The keeper is in between so that a plugin's output, its end and the processes that it leaves behind cost the engine no
time.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

ROLE_VARIABLE = "FLEXKV_PLUGIN_ROLE"
RANK_VARIABLE = "FLEXKV_PLUGIN_RANK"
SOCKET_VARIABLE = "FLEXKV_PLUGIN_SOCKET"


class Role(Enum):
    """The process that a plugin accompanies."""

    SCHEDULER = "scheduler"
    """The unit, in the process of its manager."""
    WORKER = "worker"
    """One rank."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where plugins run.

    Attributes:
        rank: the worker's rank; None beside a unit.
        socket: name of the unit's socket; see `UnitServer`.
    """

    role: Role
    rank: int | None
    socket: str

    def variables(self) -> dict[str, str]:
        """Environment variables of plugins. A unit's plugins have an empty rank."""
        rank = "" if self.rank is None else str(self.rank)
        return {ROLE_VARIABLE: self.role.value, RANK_VARIABLE: rank, SOCKET_VARIABLE: self.socket}

    def __str__(self) -> str:
        return self.role.value if self.rank is None else f"{self.role.value} {self.rank}"


@dataclass(frozen=True, slots=True)
class Program:
    """One plugin.

    Attributes:
        name: its file's name.
        command: what runs it.
    """

    name: str
    command: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Times:
    """Deadlines and pauses, in seconds.

    Attributes:
        first_restart_s: pause before a plugin that failed is started again; each further failure doubles it.
        longest_restart_s: the longest pause. After a run of that length the pause is the first one again.
        grace_s: time for a plugin to end after SIGTERM. kill_s: time for the kernel to end the remaining processes
            after SIGKILL.
    """

    first_restart_s: float = 1.0
    longest_restart_s: float = 60.0
    grace_s: float = 2.0
    kill_s: float = 2.0

    def pause_after(self, pause_s: float, ran_s: float) -> float:
        """The pause after a run of `ran_s` seconds; `pause_s` is the last pause, 0 before the first."""
        if not pause_s or ran_s >= self.longest_restart_s:
            return self.first_restart_s
        return min(2 * pause_s, self.longest_restart_s)


@dataclass(frozen=True, slots=True)
class Order:
    """Arguments of a keeper.

    Attributes:
        parent: process that started it.
        folder: the plugins' current folder.
    """

    parent: int
    folder: str
    programs: tuple[Program, ...]
    times: Times

    def plain(self) -> dict[str, Any]:
        """The order as JSON takes it."""
        return asdict(self)

    @classmethod
    def of(cls, plain: dict[str, Any]) -> Order:
        programs = tuple(Program(each["name"], tuple(each["command"])) for each in plain["programs"])
        return cls(plain["parent"], plain["folder"], programs, Times(**plain["times"]))
