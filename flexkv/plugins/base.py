"""The contracts of plugins: beside which processes they run, which environment variables they get, and how they are
restarted and ended.

```
engine's process                 keeper (one process per place)         plugins
  PluginLauncher --- a pipe ---> starts, restarts, ends  ------------>  scheduler_*, all_*
    (a thread)   <-- lines ----  bounds their output     <-- output --  worker_0_*, all_*
```

The keeper is a separate process, so that the engine spends no time on plugins' output, on plugins that end, or on the
processes that they leave behind.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

ROLE_VARIABLE = "FLEXKV_PLUGIN_ROLE"
RANK_VARIABLE = "FLEXKV_PLUGIN_RANK"
SOCKET_VARIABLE = "FLEXKV_PLUGIN_SOCKET"


class Role(Enum):
    """The process beside which a plugin runs."""

    SCHEDULER = "scheduler"
    """The process of the unit's manager."""
    WORKER = "worker"
    """The process of one rank."""


@dataclass(frozen=True, slots=True)
class Place:
    """A process beside which plugins run.

    Attributes:
        rank: the worker's rank; None if the plugins run beside the unit's manager.
        socket: name of the unit's socket, on which `UnitServer` serves the plugins' calls.
    """

    role: Role
    rank: int | None
    socket: str

    def variables(self) -> dict[str, str]:
        """Returns the environment variables that plugins get. The rank is empty if the plugins run beside the unit's
        manager.
        """
        rank = "" if self.rank is None else str(self.rank)
        return {ROLE_VARIABLE: self.role.value, RANK_VARIABLE: rank, SOCKET_VARIABLE: self.socket}

    def __str__(self) -> str:
        return self.role.value if self.rank is None else f"{self.role.value} {self.rank}"


@dataclass(frozen=True, slots=True)
class Program:
    """One plugin.

    Attributes:
        name: name of the plugin's file.
        command: the command that runs the plugin.
    """

    name: str
    command: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Times:
    """Deadlines and pauses, in seconds.

    Attributes:
        first_restart_s: pause before a plugin that failed is started again. Each further failure doubles the pause.
        longest_restart_s: the longest pause. If a plugin ran at least this long before it failed, the pause is
            `first_restart_s` again.
        grace_s: time that a plugin has to end after SIGTERM.
        kill_s: time that the kernel has to end the remaining processes after SIGKILL.
    """

    first_restart_s: float = 1.0
    longest_restart_s: float = 60.0
    grace_s: float = 2.0
    kill_s: float = 2.0

    def pause_after(self, pause_s: float, ran_s: float) -> float:
        """Returns the pause after a failed run of `ran_s` seconds. `pause_s` is the previous pause, or 0 if there was
        none.
        """
        if not pause_s or ran_s >= self.longest_restart_s:
            return self.first_restart_s
        return min(2 * pause_s, self.longest_restart_s)


@dataclass(frozen=True, slots=True)
class Order:
    """The arguments with which a keeper process is started.

    Attributes:
        parent: id of the process that starts the keeper.
        folder: current folder of the plugins' processes.
        programs: the plugins to run.
        times: deadlines and pauses of the plugins.
    """

    parent: int
    folder: str
    programs: tuple[Program, ...]
    times: Times

    def plain(self) -> dict[str, Any]:
        """Returns the order in a form that JSON can encode."""
        return asdict(self)

    @classmethod
    def of(cls, plain: dict[str, Any]) -> Order:
        programs = tuple(Program(each["name"], tuple(each["command"])) for each in plain["programs"])
        return cls(plain["parent"], plain["folder"], programs, Times(**plain["times"]))
