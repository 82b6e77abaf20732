"""Checks that this machine has what the settings require, before flexkv takes any resource. An engine's start and
`flexkv info` run these checks.
"""

from __future__ import annotations

from collections.abc import Mapping

from flexkv.cache.tiers.remote import remote_faults
from flexkv.config import FlexKVConfig, read_memory, resolve_host_bytes
from flexkv.config.memory import check_numa_node
from flexkv.errors import ConfigError, DiskError, FlexKVError
from flexkv.storage.folder_share import OwnBytes, WholeSlots, folder_faults, same_folders


def start_faults(config: FlexKVConfig, ranks: int, lost: Mapping[str, str]) -> list[FlexKVError]:
    """Returns the reasons why a unit of `ranks` ranks cannot start on this machine, as far as they can be found without
    the unit's model.

    Args:
        lost: the folders of `disk.folders` that cannot be used, each with the reason (`folder_faults`). If no folder
            can be used, the last fault is a `DiskError` that lists all of them.
    """
    faults: list[FlexKVError] = []
    try:
        memory = read_memory()
        resolve_host_bytes(config, ranks, memory.usable, memory.huge_page_bytes * memory.huge_pages_free)
    except FlexKVError as fault:
        faults.append(fault)
    try:
        check_numa_node(config)
    except ConfigError as fault:
        faults.append(fault)
    faults += remote_faults(config)
    faults += [
        ConfigError(f"disk.folders: {first} and {second} are one folder; name it once")
        for first, second in same_folders(config.disk)
    ]
    if lost and len(lost) == len(config.disk.folders):
        reasons = "; ".join(f"{folder}: {reason}" for folder, reason in lost.items())
        faults.append(DiskError(f"no disk can be used: {reasons}"))
    return faults


def check_start(config: FlexKVConfig, ranks: int, own: OwnBytes, whole: WholeSlots) -> None:
    """Raises an error if a unit of `ranks` ranks cannot start on this machine.

    Args:
        own: takes a folder, and returns the number of bytes in it that the unit may overwrite, because it wrote them
            earlier.
        whole: takes the number of bytes that the unit may fill in a folder, and returns the number of bytes that its
            slabs will take. That number may be smaller, because slabs consist of complete slots.

    Raises:
        FlexKVError: the unit cannot start. If there are several reasons, a ConfigError lists all of them.
    """
    faults = start_faults(config, ranks, folder_faults(config, own, whole))
    if len(faults) > 1:
        lines = [
            f"{len(faults)} settings cannot be had on this machine:",
            *(f"- {fault}" for fault in faults),
        ]
        raise ConfigError("\n".join(lines))
    if faults:
        raise faults[0]
