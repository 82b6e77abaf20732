"""Collects the facts that `flexkv info` shows, as plain data whose keys are documented and do not change. Needs the
native core."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from flexkv import c_ext
from flexkv.cli.gpu_facts import gpu_facts
from flexkv.cli.hints import Machine, gpu_driver_is_loaded, hints
from flexkv.cli.model_size import ModelSize
from flexkv.cli.package_facts import Facts, package_facts
from flexkv.config import (
    STEP_LOADS_NEED,
    DiskConfig,
    FlexKVConfig,
    MemoryState,
    TransferConfig,
    read_memory,
    resolve_host_bytes,
)
from flexkv.config.memory import allowed_nodes
from flexkv.errors import ConfigError, DiskError, FlexKVError
from flexkv.storage.folder import held_bytes, unit_folders
from flexkv.storage.folder_share import (
    WholeSlots,
    device_of,
    folder_faults,
    nearest_there,
    shared_file_systems,
)
from flexkv.storage.header import read_header
from flexkv.storage.other_keys import describe, older_units
from flexkv.transfer import nvtx
from flexkv.transfer.cufile_library import find_cufile
from flexkv.transfer.ways_file import ways_of
from flexkv.unit.start_check import start_faults
from flexkv.weights.table import WeightsTable

PRIVATE_PAGES = "/sys/kernel/mm/transparent_hugepage/enabled"
SHARED_PAGES = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"


def collect(config: FlexKVConfig, model: Path | None) -> Facts:
    """Collects all facts, problems and hints.

    Args:
        model: folder of a model that is to be served; None if there is none.

    Raises:
        ConfigError: the model's configuration cannot be read.
    """
    memory = read_memory()
    # An engine owns only the bytes of its own model in a folder. The model is not known here, so all bytes count as the
    # engine's.
    lost = folder_faults(config, held_bytes, _whole_slots(config.disk))
    facts = package_facts() | {"gpu": gpu_facts()} | machine_facts(memory) | tier_facts(config, memory, lost)
    facts["cufile"] = asdict(find_cufile())
    facts["copy_ways"] = copy_ways_facts(config.transfer)
    facts["gds_pool"] = gds_pool_facts(config, facts["gpu"]["devices"])
    refused = start_faults(config, 1, lost)
    facts["problems"] = [str(fault) for fault in refused]
    if not any(isinstance(fault, DiskError) for fault in refused):
        facts["problems"] += [
            f"the engine would start without the disk {folder}: {reason}" for folder, reason in lost.items()
        ]
    facts["problems"] += [table["refused"] for table in facts["copy_ways"]["tables"] if table["refused"]]
    try:
        nvtx.enable(config.observe.nvtx)
    except ConfigError as fault:
        facts["problems"].append(str(fault))
    facts["hints"] = machine_hints(facts) + folder_hints(config.disk) + mode_hints(config)
    facts["model"] = None
    if model is not None:
        size, host_bytes = ModelSize.of(model), facts["host_tier"]["bytes"] or 0
        tier = size.host_tier(host_bytes)
        facts["model"] = {
            "folder": str(model),
            "token_bytes": size.token_bytes,
            "prompt_tokens": size.prompt_tokens,
            "prompt_bytes": tier.needed_setting(size.limit),
            "host_tokens": tier.tokens,
        }
        if words := tier.shortage(size.limit):
            facts["hints"].append(words)
    return facts


def machine_facts(memory: MemoryState) -> Facts:
    """Returns facts about CPUs, memory and huge pages."""
    return {
        "cpus": {"usable": len(os.sched_getaffinity(0)), "total": os.cpu_count()},
        "memory": {
            "usable_bytes": memory.usable,
            "total_bytes": memory.total,
            "limited_by": memory.limited_by,
            "numa_nodes": sorted(allowed_nodes()),
        },
        "huge_pages": {
            "private": _mode(PRIVATE_PAGES),
            "shared": _mode(SHARED_PAGES),
            "page_bytes": memory.huge_page_bytes,
            "free_pages": memory.huge_pages_free,
        },
    }


def copy_ways_facts(settings: TransferConfig) -> Facts:
    """Returns for each GPU the table that decides which runs the kernel copies instead of the copy engine.

    `kernel_below_bytes` contains one limit for loads and one for stores: the kernel copies the runs that are shorter
    than the limit. "all" means runs of every length. `kernel_below_bytes` is None for the built-in table, and for a
    table that is refused.
    """
    tables = []
    for device in range(c_ext.cuda_info()["device_count"]):
        table: Facts = {"gpu": device, "from": settings.ways_file or "built in", "refused": ""}
        table["kernel_below_bytes"] = None
        try:
            if (ways := ways_of(settings, device)) is not None:
                table["kernel_below_bytes"] = ways.written()
        except ConfigError as fault:
            table["refused"] = str(fault)
        tables.append(table)
    return {"file": settings.ways_file or None, "tables": tables}


def gds_pool_facts(config: FlexKVConfig, devices: list[Facts]) -> Facts:
    """Returns for each GPU the size of the largest pool of contiguous blocks that can be registered with cuFile.

    `most_bytes` is None if the size of the GPU's BAR1 is unknown. cuFile's own limit does not count, because flexkv
    raises it to the GPU's memory when an engine starts. So cuFile's driver is not opened here.
    """
    limits = [
        {
            "gpu": number,
            "memory_bytes": device["bytes"],
            "most_bytes": min(device["bytes"], device["bar_bytes"]) if device["bar_bytes"] else None,
        }
        for number, device in enumerate(devices)
    ]
    return {"register_pool": config.gds.register_pool, "limits": limits}


def tier_facts(config: FlexKVConfig, memory: MemoryState, lost: Mapping[str, str]) -> Facts:
    """Returns facts about the tiers with the current settings and one rank. The host tier's `bytes` is None if no host
    tier is possible.

    Args:
        lost: maps each folder that cannot be used to the reason.
    """
    huge = memory.huge_page_bytes * memory.huge_pages_free
    host_bytes: int | None = None
    with contextlib.suppress(FlexKVError):  # the list of problems has the error
        host_bytes = resolve_host_bytes(config, 1, memory.usable, huge)
    refusal = c_ext.uring_refusal()
    return {
        "host_tier": {"bytes": host_bytes, "ranks": 1, "numa_node": config.host.numa_node},
        "eviction": {"policy": config.index.policy},
        "disk_tier": {
            "mode": config.disk.mode,
            "io": "threads" if refusal or config.disk.io == "threads" else "io_uring",
            "io_uring_refusal": refusal,
            "folders": [_folder(folder, lost) for folder in config.disk.folders],
        },
    }


def _whole_slots(disk: DiskConfig) -> WholeSlots:
    """Returns a function that rounds a number of bytes down to complete slots. The engine's slot size is not known
    here, so the function takes the largest slots of all units in the folders."""
    largest = 1
    for unit in (unit for folder in disk.folders for unit in unit_folders(Path(folder))):
        with contextlib.suppress(DiskError):  # `flexkv fsck` reports damaged headers
            largest = max(
                largest, sum(read_header(str(slab)).slot_bytes for slab in unit.glob("group*.slab"))
            )
    return lambda asked: asked // largest * largest


def _folder(folder: str, faults: Mapping[str, str]) -> Facts:
    path = Path(folder)
    there = nearest_there(path)
    try:
        total, _, free = shutil.disk_usage(there)
    except OSError:  # the entry's `fault` says why
        free, total = 0, 0
    units = [unit for unit in unit_folders(path) if unit != path] if there == path and path.is_dir() else []
    return {
        "path": folder,
        "exists": there == path,
        "free_bytes": free,
        "total_bytes": total,
        "units": len(units),
        "held_bytes": sum(map(held_bytes, units)),
        "named_files": len(WeightsTable(path)),
        "fault": faults.get(folder, ""),
    }


def machine_hints(facts: Facts) -> list[str]:
    """Returns the hints about this machine."""
    huge = facts["huge_pages"]
    return hints(
        Machine(
            private_pages=huge["private"],
            shared_pages=huge["shared"],
            huge_page_bytes=huge["page_bytes"],
            huge_pages_free=huge["free_pages"],
            host_bytes=facts["host_tier"]["bytes"] or 0,
            uring_refusal=facts["disk_tier"]["io_uring_refusal"],
            has_gpu=gpu_driver_is_loaded(),
            with_cuda=facts["native_core"]["with_cuda"],
        )
    )


def folder_hints(disk: DiskConfig) -> list[str]:
    """Returns hints about disk folders that can be used, but are set up in an unusual way."""
    found = [
        f"{' and '.join(map(str, roots))} lie on one file system, which striping over them does not make faster"
        for roots in shared_file_systems(disk)
    ]
    root = os.stat("/").st_dev
    for folder in disk.folders:
        with contextlib.suppress(OSError):  # the list of problems has the error
            if not Path(folder).exists() and device_of(Path(folder)) == root:
                found.append(
                    f"{folder} is not there and would lie on the root file system: is its disk mounted?"
                )
        with contextlib.suppress(OSError):
            if older := older_units(Path(folder)):
                found.append(
                    f"{folder} has pages that were last used under other keys than those of later pages of the same "
                    f"model: {describe(Path(folder), older)}"
                )
    return found


def mode_hints(config: FlexKVConfig) -> list[str]:
    """Returns a hint that says what the load mode requires of the engine, because `flexkv info` cannot check this."""
    mode = config.load.mode
    return [] if mode == "async" else [f"load.mode={mode}: {STEP_LOADS_NEED}"]


def _mode(path: str) -> str:
    """Returns the word in brackets of a kernel setting such as "always [madvise] never": the value in force."""
    try:
        words = Path(path).read_text().split()
    except OSError:
        return "not available"
    return next((word.strip("[]") for word in words if word.startswith("[")), " ".join(words))
