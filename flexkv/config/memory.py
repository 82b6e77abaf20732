"""Finds out how much host memory this machine has, and how much of it one unit takes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flexkv.config.model import FlexKVConfig
from flexkv.config.sizes import format_size
from flexkv.errors import CapacityError, ConfigError, ContractError

HEADROOM_BYTES = 256 << 20
"""Available memory that the native host pool leaves free (`kHeadroomBytes` in C++)."""

SMALLEST_SLOT_BYTES = 4096
"""Size of the smallest slot in bytes. Slot images are rounded up to a multiple of it."""


@dataclass(frozen=True, slots=True)
class MemoryState:
    """Memory that this process could use, in bytes.

    Attributes:
        total: memory of the machine.
        usable: memory that this process may take: the least of MemAvailable and the memory that is left in each control
            group above the process.
        limited_by: the limit that determines `usable`: `MemAvailable`, or the control group's file.
        huge_page_bytes: size of a huge page (2 MiB on x86-64); 0 if the kernel has none.
        huge_pages_free: number of huge pages that are reserved and unused. They are not part of `usable`.
    """

    total: int
    usable: int
    limited_by: str
    huge_page_bytes: int
    huge_pages_free: int


def read_memory(root: Path = Path("/")) -> MemoryState:
    """Reads the memory of this machine and of this process's control groups. Tests pass another folder as `root`.

    Raises:
        ConfigError: /proc/meminfo does not say how much memory is available.
        ImportError: the native core was not built.
    """
    # Imported here, because reading settings and reporting errors must work without a native core.
    from flexkv import c_ext

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
    """Returns the bytes of host memory that one ownership unit takes.

    Args:
        ranks: number of workers of the unit.
        available_bytes: memory that this process may take (`read_memory().usable`).
        huge_free_bytes: bytes of unused reserved huge pages. They count only if a setting gives the size.

    Raises:
        ConfigError: `ranks` is less than 1.
        CapacityError: the requested size is not available, or is too small for any model's block. The message says
            which setting is wrong and what is allowed.
    """
    if ranks < 1:
        raise ConfigError(f"ranks={ranks}: a unit has at least 1 rank")
    host = config.host
    if host.bytes is not None:
        size, key = host.bytes, "host.bytes"
    elif host.bytes_per_rank is not None:
        size, key = host.bytes_per_rank * ranks, "host.bytes_per_rank"
    else:
        share = int(available_bytes * host.memory_share)
        return min(share, max(0, available_bytes - HEADROOM_BYTES)) // host.units_per_node
    times = f" x {ranks} ranks" if key == "host.bytes_per_rank" else ""
    asked = f"{key} ({config.origin(key)}){times} asks for {format_size(size)} of host memory"
    # The host pool uses reserved huge pages if all of the pool fits into them.
    room = max(0, available_bytes - HEADROOM_BYTES, huge_free_bytes)
    if size > room:
        raise CapacityError(
            f"{asked}, but {format_size(room)} can be had: set it to {room // times_of(key, ranks)} or less, or leave "
            "it unset to take host.memory_share of what is free"
        )
    if size < SMALLEST_SLOT_BYTES:
        raise CapacityError(
            f"{asked}, which holds no block of any model: set it to gigabytes, or leave it unset to take "
            "host.memory_share of what is free"
        )
    return size


def times_of(key: str, ranks: int) -> int:
    """Returns the factor by which a unit multiplies the size that the setting gives."""
    return ranks if key == "host.bytes_per_rank" else 1


def check_numa_node(config: FlexKVConfig, root: Path = Path("/")) -> None:
    """Checks that memory can be taken from `host.numa_node`, if that is set.

    Raises:
        ConfigError: this machine has no such node with memory, or this process may not use the node. The message lists
            the allowed nodes.
    """
    node = config.host.numa_node
    nodes = allowed_nodes(root)
    if node is not None and nodes and node not in nodes:
        raise ConfigError(
            f"host.numa_node ({config.origin('host.numa_node')}) is {node}: memory of this machine that this process "
            f"may use lies on {', '.join(map(str, sorted(nodes)))}; set it to one of them, or leave it unset"
        )


def allowed_nodes(root: Path = Path("/")) -> set[int]:
    """Returns the NUMA nodes with memory that this process may use; empty if the kernel does not report them."""
    found: set[int] | None = None
    for text in (_allowed_list(root), _text(root / "sys/devices/system/node/has_memory")):
        if text:
            nodes = _parse_list(text)
            found = nodes if found is None else found & nodes
    return found or set()


def _allowed_list(root: Path) -> str:
    lines = _text(root / "proc/self/status").splitlines()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("Mems_allowed_list:")), ""
    )


def _text(path: Path) -> str:
    return path.read_text().strip() if path.is_file() else ""


def _parse_list(text: str) -> set[int]:
    """Returns the numbers of a list in the kernel's notation, such as "0-2,7"."""
    numbers: set[int] = set()
    for part in text.split(","):
        low, _, high = part.partition("-")
        numbers.update(range(int(low), int(high or low) + 1))
    return numbers
