"""Facts about this machine's GPUs, read through NVIDIA's Python bindings, which the extra `flexkv[gpu]` installs."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

from flexkv.cli.driver_calls import DriverRefused, done
from flexkv.cli.package_facts import Facts

PACKAGES = ("cuda-bindings", "cuda-pathfinder")
"""Packages that the extra `flexkv[gpu]` installs."""
HOW = "pip install cuda-bindings cuda-pathfinder (the extra flexkv[gpu])"
NAME_BYTES, ADDRESS_BYTES = 256, 32
PCI_DEVICES = Path("/sys/bus/pci/devices")

ATTRIBUTES = {
    "multiprocessors": "CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT",
    "compute_major": "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR",
    "compute_minor": "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR",
    "copy_engines": "CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT",
    "max_pitch_bytes": "CU_DEVICE_ATTRIBUTE_MAX_PITCH",
    "host_pointer_is_device_pointer": "CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM",
    "numa_node": "CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID",
}
"""Maps each key of a device's facts to the driver attribute with the key's value. These attributes decide how copies
can be made.
"""


def gpu_facts() -> Facts:
    """Returns the versions of the packages of the extra `flexkv[gpu]`, and each device's attributes.

    `reason` says why `devices` is empty: the extra is missing, there is no driver, or the driver returned an error.
    The extra's packages are imported here and not before, because the rest of `flexkv info` works without them.
    """
    versions = {name: _version(name) for name in PACKAGES}
    facts: Facts = {"packages": versions, "devices": [], "reason": ""}
    if missing := [name for name, version in versions.items() if version is None]:
        return facts | {"reason": f"{' and '.join(missing)} not installed: {HOW}"}
    try:
        from cuda.bindings import driver
    except ImportError as error:
        return facts | {"reason": f"cuda-bindings cannot be loaded: {error}"}
    try:
        return facts | {"devices": devices(driver)}
    except DriverRefused as error:
        return facts | {"reason": str(error)}
    except RuntimeError as error:  # the bindings found no libcuda, and their message is too long
        from flexkv import c_ext  # imported here, because a build may lack the native core

        return facts | {
            "reason": "no NVIDIA driver" if not c_ext.cuda_info()["driver"] else str(error).strip()
        }


def devices(driver: Any) -> list[Facts]:
    """Returns the name, memory in bytes, PCI address, BAR1 size in bytes and ATTRIBUTES of every device. An attribute
    that the driver does not know is None.

    Args:
        driver: the module `cuda.bindings.driver`.

    Raises:
        DriverRefused: a call of the driver failed.
        RuntimeError: there is no driver.
    """
    done(driver.cuInit(0), "cuInit")
    found = []
    for number in range(done(driver.cuDeviceGetCount(), "cuDeviceGetCount")):
        device = done(driver.cuDeviceGet(number), "cuDeviceGet")
        facts: Facts = {
            "name": _text(done(driver.cuDeviceGetName(NAME_BYTES, device), "cuDeviceGetName")),
            "bytes": int(done(driver.cuDeviceTotalMem(device), "cuDeviceTotalMem")),
            "pci": _text(done(driver.cuDeviceGetPCIBusId(ADDRESS_BYTES, device), "cuDeviceGetPCIBusId")),
        }
        facts["bar_bytes"] = bar_bytes(facts["pci"])
        for key, attribute in ATTRIBUTES.items():
            facts[key] = None
            if (number_of := getattr(driver.CUdevice_attribute, attribute, None)) is not None:
                code, value = driver.cuDeviceGetAttribute(number_of, device)
                facts[key] = int(value) if code == 0 else None
        found.append(facts)
    return found


def bar_bytes(pci: str, devices: Path = PCI_DEVICES) -> int:
    """Returns the size in bytes of the largest window that a PCI device has on the bus. For an NVIDIA GPU this is BAR1,
    through which disks reach its memory. 0 if the kernel does not list the device's windows."""
    try:
        lines = (devices / pci.lower() / "resource").read_text().splitlines()
    except OSError:
        return 0
    windows = [[int(number, 16) for number in line.split()[:2]] for line in lines]
    return max((last - first + 1 for first, last in windows if last > first), default=0)


def words(facts: Facts) -> str:
    """Describes one device in one line."""

    def known(key: str) -> object:
        return "?" if facts[key] is None else facts[key]

    return (
        f"{facts['name']}, {facts['bytes'] / (1 << 30):.1f} GiB, compute {known('compute_major')}."
        f"{known('compute_minor')}, {known('multiprocessors')} multiprocessors, {known('copy_engines')} copy engines, "
        f"PCI {facts['pci']}"
    )


def _text(value: bytes) -> str:
    return value.split(b"\0", 1)[0].decode(errors="replace")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
