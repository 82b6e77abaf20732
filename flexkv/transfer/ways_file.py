"""Reads and writes the file of `transfer.ways_file`, a table of run lengths: shorter runs between host memory and a GPU
are copied by a CUDA kernel, longer ones by the copy engine. `flexkv bench transfer --save` measures the lengths and
writes the file.

A table is valid for one GPU on one PCI Express link, with one driver and one version of flexkv: lengths that were
measured elsewhere could make copies slower, and nothing would show it. An engine has one file for all its GPUs. GPUs to
which the table does not apply use the built-in lengths, and the log warns of that.
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
"""The threshold, in bytes, with which the CUDA kernel copies runs of every length. The file contains "all" instead of
this number.
"""
MOST_BELOW = 1 << 40
"""The largest threshold that a file may have, in bytes. A larger one is a mistake."""
MOST_FILE_BYTES = 1 << 20
MOST_WORD = 128
PCI_DEVICES = Path("/sys/bus/pci/devices")
KERNEL_MODULE = Path("/proc/driver/nvidia/version")
GENERATIONS = {"2.5": 1, "5.0": 2, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6}
"""Maps the speed of one PCI Express lane in GT/s, as Linux writes it, to the generation of PCI Express."""
logger = get_logger(__name__)

HOW = "measure it with `flexkv bench transfer --save`"


class OtherKeyError(ConfigError):
    """A table was measured on another GPU, link, driver or version of flexkv."""


@dataclass(frozen=True, slots=True)
class WaysKey:
    """The GPU, link, driver and version of flexkv on which a table was measured.

    Attributes:
        device: the GPU's UUID.
        link_width: number of PCI Express lanes of the GPU's link; 0 if Linux does not report it.
        link_generation: generation of PCI Express of the link; 0 if Linux does not report it.
        driver: the driver's CUDA version, followed by the kernel module's version if that is known.
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
    """The thresholds below which a CUDA kernel copies runs. The copy engine copies all other runs.

    Attributes:
        load_kernel_below: the kernel copies runs to the GPU that have fewer bytes than this.
        store_kernel_below: the kernel copies runs from the GPU that have fewer bytes than this.
    """

    load_kernel_below: int
    store_kernel_below: int

    def written(self) -> dict[str, int | str]:
        """Returns the thresholds in the form in which the file contains them."""
        below = {"h2d": self.load_kernel_below, "d2h": self.store_kernel_below}
        return {way: "all" if bytes == ALL_RUNS else bytes for way, bytes in below.items()}


def this_key(device: int) -> WaysKey:
    """Returns the key of one of this machine's CUDA devices.

    Raises:
        ConfigError: there is no such device.
    """
    uuid, pci = c_ext.cuda_identity(device)
    return WaysKey(uuid, *pci_link(pci), driver_version(c_ext.cuda_info()["driver"]), flexkv.__version__)


def pci_link(pci: str, devices: Path = PCI_DEVICES) -> tuple[int, int]:
    """Returns width and generation of a device's PCI Express link, each 0 if Linux does not report it.

    The generation is the highest that both ends of the link support. The link's current generation is not used, because
    an idle GPU lowers it.
    """
    device = devices / pci.lower()
    width = re.fullmatch(r"(\d{1,3})", _line(device / "current_link_width"))
    ends = [_line(end / "max_link_speed").split(" ")[0] for end in (device, device.resolve().parent)]
    found = [GENERATIONS[speed] for speed in ends if speed in GENERATIONS]
    return int(width[1]) if width else 0, min(found, default=0)


def driver_version(cuda: int, module: Path = KERNEL_MODULE) -> str:
    """Returns the driver's CUDA version and the kernel module's version, such as "13.0 (580.159.04)".

    Args:
        cuda: the CUDA version as CUDA encodes it: 13000 means 13.0.
        module: the file in which the kernel module reports its version.
    """
    version = f"{cuda // 1000}.{cuda % 1000 // 10}"
    found = re.search(r"\b(\d+(?:\.\d+)+)\b", _line(module))
    return f"{version} ({found[1]})" if found else version


def ways_of(settings: TransferConfig, device: int | None) -> CopyWays | None:
    """Returns the table of `transfer.ways_file` for a device; None if no file is set or the device is plain memory.

    Raises:
        ConfigError: the file has no complete table, or there is no such device.
        OtherKeyError: the table was measured on another GPU, link, driver or version of flexkv.
    """
    if device is None or not settings.ways_file:
        return None
    return read_ways(settings.ways_file, this_key(device))


def usable_ways(settings: TransferConfig, device: int | None) -> CopyWays | None:
    """Returns the table of `transfer.ways_file` if it applies to a device. Otherwise returns None, which stands for the
    built-in lengths. If there is a table that does not apply, a warning says so.

    Raises:
        ConfigError: the file has no complete table, or there is no such device.
    """
    try:
        return ways_of(settings, device)
    except OtherKeyError as error:
        logger.warning("%s; this GPU's copies go by what is built in", error)
        return None


def check_ways_file(settings: TransferConfig) -> None:
    """Checks that the file of `transfer.ways_file`, if set, has a complete table. Does not check to which GPU the table
    applies. Called at an engine's start.

    Raises:
        ConfigError: the file has no complete table.
    """
    if settings.ways_file:
        _checked(settings.ways_file, _content(settings.ways_file))


def read_ways(path: str, key: WaysKey) -> CopyWays:
    """Reads the table in a file. The table must have been measured on `key`.

    Raises:
        ConfigError: the file has no complete table.
        OtherKeyError: the table was measured on another key; the message shows both keys.
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
    """Writes a table with its key and measurements. A process that reads the file meanwhile sees either the old or the
    new file, complete.

    Raises:
        OSError: the file cannot be written.
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
        # O_NONBLOCK, because opening a pipe that has no writer would otherwise wait for one.
        return os.open(name, flags | os.O_NONBLOCK)

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
    """Returns the table in a file's content, after checking that it is complete.

    Raises:
        ConfigError: the content is not a complete table.
    """

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
