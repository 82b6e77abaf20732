"""How much host memory there is, and how much of it one unit takes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flexkv.config.model import FlexKVConfig
from flexkv.config.sizes import format_size
from flexkv.errors import CapacityError, ConfigError

CGROUP_MAX_PLAUSIBLE = 1 << 60
"""cgroup v1 writes "no limit" as a number near 2**63 rounded to a page."""


@dataclass(frozen=True, slots=True)
class MemoryState:
    """Memory this process could use, in bytes.

    Attributes:
        total: of the machine.
        available: what the kernel could hand out without swapping (MemAvailable).
        cgroup_room: what the tightest control group of this process still allows; None without a limit.
        huge_page_bytes: size of a huge page (2 MiB on x86-64); 0 if there are none.
        huge_pages_free: reserved and unused pages of that size; they are not part of `available`.
    """

    total: int
    available: int
    cgroup_room: int | None
    huge_page_bytes: int
    huge_pages_free: int

    @property
    def usable(self) -> int:
        """What this process may take."""
        return self.available if self.cgroup_room is None else max(0, min(self.available, self.cgroup_room))

    @property
    def limited_by(self) -> str:
        """What decides `usable`, for a message."""
        return "MemAvailable" if self.usable == self.available else "control group limit"


def read_memory(root: Path = Path("/")) -> MemoryState:
    """The memory of this machine and control group; `root` stands for / in tests.

    Raises:
        ConfigError: /proc/meminfo does not say how much is available.
    """
    fields: dict[str, int] = {}
    meminfo = root / "proc/meminfo"
    for line in meminfo.read_text().splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            fields[name] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    if "MemAvailable" not in fields:
        raise ConfigError(f"{meminfo} has no MemAvailable line: set host.bytes")
    return MemoryState(
        total=fields.get("MemTotal", 0),
        available=fields["MemAvailable"],
        cgroup_room=_cgroup_room(root),
        huge_page_bytes=fields.get("Hugepagesize", 0),
        huge_pages_free=fields.get("HugePages_Free", 0),
    )


def _cgroup_room(root: Path) -> int | None:
    """The least of (limit - use + reclaimable file cache) over this process's control group and those above it."""
    membership = root / "proc/self/cgroup"
    if not membership.exists():
        return None
    rooms: list[int] = []
    for line in membership.read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # In a container the path may be the host's, which is not mounted here: then only the root group applies.
        folder = base / group.strip("/")
        for candidate in (folder, *folder.parents):
            room = _group_room(candidate, *names)
            if room is not None:
                rooms.append(room)
            if candidate == base:
                break
    return min(rooms, default=None)


def _group_room(folder: Path, limit_name: str, usage_name: str, reclaimable_name: str) -> int | None:
    limit = _read_number(folder / limit_name)
    usage = _read_number(folder / usage_name)
    if limit is None or usage is None or limit >= CGROUP_MAX_PLAUSIBLE:
        return None
    reclaimable = 0
    statistics = folder / "memory.stat"
    if statistics.exists():
        for line in statistics.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == reclaimable_name:
                reclaimable = int(value)
    return limit - usage + reclaimable


def _read_number(path: Path) -> int | None:
    """The number in a control file; None where there is no file or it says "max"."""
    if not path.exists():
        return None
    text = path.read_text().strip()
    return int(text) if text.isdigit() else None


def resolve_host_bytes(
    config: FlexKVConfig, ranks: int, available_bytes: int, huge_free_bytes: int = 0
) -> int:
    """Bytes of host memory that one ownership unit takes.

    Args:
        ranks: workers of the unit.
        available_bytes: memory free for this process (`read_memory().usable`).
        huge_free_bytes: reserved huge pages that are unused; an explicit size may use them too.

    Raises:
        ConfigError: `ranks` is less than 1.
        CapacityError: the size that was asked for is not there; names the setting and what is free.
    """
    if ranks < 1:
        raise ConfigError(f"ranks={ranks}: a unit has at least 1 rank")
    host = config.host
    if host.bytes is not None:
        size, key = host.bytes, "host.bytes"
    elif host.bytes_per_rank is not None:
        size, key = host.bytes_per_rank * ranks, "host.bytes_per_rank"
    else:
        return int(available_bytes * host.memory_share) // host.units_per_node
    room = available_bytes + huge_free_bytes
    if size > room:
        times = f" x {ranks} ranks" if key == "host.bytes_per_rank" else ""
        raise CapacityError(
            f"{key} ({config.origin(key)}){times} asks for {format_size(size)} of host memory, but {format_size(room)} "
            f"are free; ask for less, or leave it unset to take host.memory_share of what is free"
        )
    return size
