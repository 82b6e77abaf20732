"""The ways of a GPU's copies as measured on one machine: a file that `flexkv bench transfer --save` writes and the
setting `transfer.ways_file` names.

A table holds for one GPU in one slot with one driver and one version of flexkv. Anything else is refused: a threshold
from another link would be silently wrong. An engine names one file for all its GPUs, so the others use the built-in
lengths, and a warning says so.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import flexkv
from flexkv import c_ext
from flexkv.config import TransferConfig
from flexkv.errors import ConfigError
from flexkv.observe import get_logger

FORMAT = "flexkv copy ways 1"
ALL_RUNS = (1 << 63) - 1
"""As a threshold: the kernel copies runs of every length. In a file: "all"."""
MOST_BELOW = 1 << 40
"""Bytes. A larger threshold in a file is a mistake."""
MOST_FILE_BYTES = 1 << 20
MOST_WORD = 128
PCI_DEVICES = Path("/sys/bus/pci/devices")
KERNEL_MODULE = Path("/proc/driver/nvidia/version")
GENERATIONS = {"2.5": 1, "5.0": 2, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6}
"""GT/s of a lane -> generation of PCI Express."""
logger = get_logger(__name__)

HOW = "measure it with `flexkv bench transfer --save`"


class OtherKeyError(ConfigError):
    """A table was measured on another GPU, link, driver or version."""


@dataclass(frozen=True, slots=True)
class WaysKey:
    """The setup that a table was measured on.

    Attributes:
        device: the GPU's UUID.
        link_width: lanes of its link; 0 where the kernel does not say.
        link_generation: of PCI Express; 0 where the kernel does not say.
        driver: its CUDA version, and the kernel module's version if that is known.
        flexkv: the version of flexkv that measured.
    """

    device: str
    link_width: int
    link_generation: int
    driver: str
    flexkv: str

    def __str__(self) -> str:
        return (
            f"{self.device} at x{self.link_width} of generation {self.link_generation}, driver {self.driver}, "
            f"flexkv {self.flexkv}"
        )


@dataclass(frozen=True, slots=True)
class CopyWays:
    """The kernel loads and stores runs of fewer bytes than these."""

    load_kernel_below: int
    store_kernel_below: int

    def written(self) -> dict[str, int | str]:
        """As a file has them."""
        below = {"h2d": self.load_kernel_below, "d2h": self.store_kernel_below}
        return {way: "all" if bytes == ALL_RUNS else bytes for way, bytes in below.items()}


def this_key(device: int) -> WaysKey:
    """The key of a CUDA device of this machine.

    Raises:
        ConfigError: there is no such device.
    """
    uuid, pci = c_ext.cuda_identity(device)
    return WaysKey(uuid, *pci_link(pci), driver_version(c_ext.cuda_info()["driver"]), flexkv.__version__)


def pci_link(pci: str, devices: Path = PCI_DEVICES) -> tuple[int, int]:
    """Width and generation of a device's link; 0 if the kernel does not report them.

    The generation is the highest that both ends support, because an idle GPU lets its link slow down.
    """
    device = devices / pci.lower()
    width = re.fullmatch(r"(\d{1,3})", _line(device / "current_link_width"))
    ends = [_line(end / "max_link_speed").split(" ")[0] for end in (device, device.resolve().parent)]
    found = [GENERATIONS[speed] for speed in ends if speed in GENERATIONS]
    return int(width[1]) if width else 0, min(found, default=0)


def driver_version(cuda: int, module: Path = KERNEL_MODULE) -> str:
    """Such as "13.0 (580.159.04)".

    Args:
        cuda: as CUDA counts: 13000 is 13.0.
    """
    version = f"{cuda // 1000}.{cuda % 1000 // 10}"
    found = re.search(r"\b(\d+(?:\.\d+)+)\b", _line(module))
    return f"{version} ({found[1]})" if found else version


def ways_of(settings: TransferConfig, device: int | None) -> CopyWays | None:
    """The table in force on a device; None for the built-in lengths.

    Raises:
        ConfigError: see `read_ways`, and `this_key`.
    """
    if device is None or not settings.ways_file:
        return None
    return read_ways(settings.ways_file, this_key(device))


def usable_ways(settings: TransferConfig, device: int | None) -> CopyWays | None:
    """The table to copy by on a device; None for the built-in lengths, with a warning if the table has another key.

    Raises:
        ConfigError: the file has no complete table.
    """
    try:
        return ways_of(settings, device)
    except OtherKeyError as error:
        logger.warning("%s; this GPU's copies go by what is built in", error)
        return None


def check_ways_file(settings: TransferConfig) -> None:
    """Checks at an engine's start that the file has a complete table, whatever its key.

    Raises:
        ConfigError: it has none.
    """
    if settings.ways_file:
        _checked(settings.ways_file, _content(settings.ways_file))


def read_ways(path: str, key: WaysKey) -> CopyWays:
    """Reads a table that was measured on `key`.

    Raises:
        ConfigError: the file has no complete table.
        OtherKeyError: it has another key; the message names both.
    """
    table = _checked(path, _content(path))
    found = WaysKey(**table["key"])
    if found != key:
        raise OtherKeyError(
            f"transfer.ways_file: {path} was measured on {found}, and this is {key}: {HOW} here"
        )
    below = table["kernel_below_bytes"]
    loads, stores = (ALL_RUNS if below[way] == "all" else below[way] for way in ("h2d", "d2h"))
    return CopyWays(loads, stores)


def write_ways(path: Path, key: WaysKey, ways: CopyWays, measured: Sequence[Mapping[str, Any]]) -> None:
    """Writes a table with its key and measurements. A reader always sees a complete file.

    Raises:
        OSError: it cannot be written.
    """
    table = {
        "format": FORMAT,
        "key": asdict(key),
        "kernel_below_bytes": ways.written(),
        "measured": list(measured),
    }
    target = path.resolve()
    beside = target.with_name(f".{target.name}.part")
    with beside.open("w") as file:
        json.dump(table, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, target)


def _content(path: str) -> bytes:
    def without_waiting(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NONBLOCK)  # a pipe would wait for its other end

    try:
        with open(path, "rb", opener=without_waiting) as stream:
            regular = stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
            content = stream.read(MOST_FILE_BYTES + 1) if regular else b""
    except (OSError, ValueError) as error:
        raise ConfigError(f"transfer.ways_file: {path!r} cannot be read: {error}") from error
    if not regular:
        raise ConfigError(f"transfer.ways_file: {path} is not a regular file")
    if len(content) > MOST_FILE_BYTES:
        raise ConfigError(f"transfer.ways_file: {path} has more than {MOST_FILE_BYTES} bytes: {HOW}")
    return content


def _checked(path: str, content: bytes) -> dict[str, Any]:
    """The table in a file."""

    def refuse(why: str) -> ConfigError:
        return ConfigError(f"transfer.ways_file: {path} is not a whole table of ways: {why}; {HOW}")

    try:
        table = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise refuse(f"{type(error).__name__}: {error}") from error
    if not isinstance(table, dict) or table.get("format") != FORMAT:
        raise refuse(f"it has no `format` {FORMAT!r}")
    key, below = table.get("key"), table.get("kernel_below_bytes")
    if not isinstance(key, dict) or set(key) != {field.name for field in fields(WaysKey)}:
        raise refuse("its `key` has other names")
    for name, value in key.items():
        if name.startswith("link_"):
            good = type(value) is int and 0 <= value < 1000
        else:
            good = isinstance(value, str) and 0 < len(value) <= MOST_WORD and value.isprintable()
        if not good:
            raise refuse(f"its `key.{name}` is {value!r:.80}")
    if not isinstance(below, dict) or set(below) != {"h2d", "d2h"}:
        raise refuse("its `kernel_below_bytes` has other names than h2d and d2h")
    for name, value in below.items():
        if value != "all" and not (type(value) is int and 0 <= value <= MOST_BELOW):
            raise refuse(
                f"its `kernel_below_bytes.{name}` is {value!r:.80}: allowed are 'all' and bytes in [0, {MOST_BELOW}]"
            )
    return table


def _line(path: Path) -> str:
    try:
        return path.read_text().partition("\n")[0].strip()
    except OSError:
        return ""
