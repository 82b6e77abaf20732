"""How much host memory there is, and how much of it one unit takes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flexkv.config.model import FlexKVConfig
from flexkv.config.sizes import format_size
from flexkv.errors import CapacityError, ConfigError, ContractError


@dataclass(frozen=True, slots=True)
class MemoryState:
    """Memory this process could use, in bytes.

    Attributes:
        total: of the machine.
        usable: what this process may take: the least of MemAvailable and what each control group above it has left.
        limited_by: what decides `usable`: `MemAvailable`, or the control group's file.
        huge_page_bytes: size of a huge page (2 MiB on x86-64); 0 if there are none.
        huge_pages_free: reserved and unused pages of that size; they are not part of `usable`.
    """

    total: int
    usable: int
    limited_by: str
    huge_page_bytes: int
    huge_pages_free: int


def read_memory(root: Path = Path("/")) -> MemoryState:
    """The memory of this machine and control group; `root` stands for / in tests.

    Raises:
        ConfigError: /proc/meminfo does not say how much is available.
        ImportError: the native core was not built.
    """
    from flexkv import c_ext  # settings are read, and errors told, where the native core was not built

    meminfo = root / "proc/meminfo"
    try:
        usable, limited_by = c_ext.available_memory(str(root / "proc"), str(root / "sys/fs/cgroup"))
    except ContractError as error:
        raise ConfigError(f"{error}: set host.bytes") from error
    fields: dict[str, int] = {}
    for line in meminfo.read_text().splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            fields[name] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    return MemoryState(
        total=fields.get("MemTotal", 0),
        usable=usable,
        limited_by=limited_by,
        huge_page_bytes=fields.get("Hugepagesize", 0),
        huge_pages_free=fields.get("HugePages_Free", 0),
    )


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
