"""`flexkv info`: what this build and this machine can do."""

from __future__ import annotations

import json
import os
import platform
import shutil
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

import flexkv
from flexkv.cli.hints import Machine, gpu_driver_is_loaded, hints
from flexkv.cli.tables import print_table
from flexkv.config import load_config, read_memory, resolve_host_bytes
from flexkv.config.sizes import format_size

PRIVATE_PAGES = "/sys/kernel/mm/transparent_hugepage/enabled"
SHARED_PAGES = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def command(as_json: bool) -> None:
    """Show what this build and this machine can do, and what could be changed about it."""
    facts = {**build_facts(), **machine_facts(), **disk_facts()}
    advice = machine_hints()
    if as_json:
        click.echo(json.dumps({**facts, "hints": advice}, indent=2))
        return
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in facts.items():
        table.add_row(name, value)
    print_table(table)
    console = Console(markup=False, highlight=False)
    for hint in advice:
        console.print(f"hint: {hint}", soft_wrap=True)  # commands stay whole for copying


def build_facts() -> dict[str, str]:
    """The package and its native core."""
    facts = {"flexkv": flexkv.__version__, "python": platform.python_version()}
    try:
        from flexkv import c_ext
    except ImportError as error:
        return {**facts, "native core": f"missing ({error}): run `make build`"}
    build = c_ext.build_info()
    facts["native core"] = f"{c_ext.__variant__}, compiler {build['compiler']}"
    cuda = c_ext.cuda_info()
    usable = (
        f"{cuda['device_count']} device(s), driver {cuda['driver'] // 1000}.{cuda['driver'] % 1000 // 10}"
    )
    facts["cuda"] = usable if cuda["device_count"] else f"not used: {cuda['reason']}"
    return facts


def machine_facts() -> dict[str, str]:
    """CPUs, memory and huge pages."""
    cpus = f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}"
    try:
        memory = read_memory()
    except ImportError:
        return {"cpus": cpus, "memory": "not known without the native core"}
    host_bytes = resolve_host_bytes(load_config(), 1, memory.usable)
    return {
        "cpus": cpus,
        "memory": f"{format_size(memory.usable)} usable ({memory.limited_by}) of {format_size(memory.total)}",
        "host tier": f"{format_size(host_bytes)} with the current settings and one rank",
        "huge pages, private": _mode(PRIVATE_PAGES),
        "huge pages, shared": _mode(SHARED_PAGES),
        "huge pages, reserved": f"{memory.huge_pages_free} free of {format_size(memory.huge_page_bytes)}",
    }


def disk_facts() -> dict[str, str]:
    """The disk tier's folders with the current settings, and how their slabs are read."""
    try:
        from flexkv import c_ext
    except ImportError:
        return {}
    disk = load_config().disk
    refusal = c_ext.uring_refusal()
    facts = {
        "disk tier": f"{len(disk.folders)} folder(s), disk.mode {disk.mode}"
        if disk.folders
        else "off: disk.folders is unset",
        "disk I/O": f"a pool of threads: {refusal}" if refusal else "io_uring",
    }
    return facts | {f"disk {folder}": _folder_fact(Path(folder)) for folder in disk.folders}


def _folder_fact(folder: Path) -> str:
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir():
        return f"cannot be used: {there} is no folder"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"cannot be used: no permission to write in {there}"
    usage = shutil.disk_usage(there)
    room = f"{format_size(usage.free)} free of {format_size(usage.total)}"
    if there != folder:
        return f"{room}; made at the engine's start"
    from flexkv.storage.folder import held_bytes, unit_folders  # wants the native core, which may be missing

    units = [unit for unit in unit_folders(folder) if unit != folder]
    return f"{room}; {len(units)} unit(s) hold {format_size(sum(map(held_bytes, units)))}"


def machine_hints() -> list[str]:
    """What could be changed; nothing without the native core."""
    try:
        from flexkv import c_ext

        memory = read_memory()
    except ImportError:
        return []
    return hints(
        Machine(
            private_pages=_mode(PRIVATE_PAGES),
            shared_pages=_mode(SHARED_PAGES),
            huge_page_bytes=memory.huge_page_bytes,
            huge_pages_free=memory.huge_pages_free,
            host_bytes=resolve_host_bytes(load_config(), 1, memory.usable),
            uring_refusal=c_ext.uring_refusal(),
            has_gpu=gpu_driver_is_loaded(),
            with_cuda=bool(c_ext.build_info()["cuda"]),
        )
    )


def _mode(path: str) -> str:
    """The word in brackets of a kernel setting such as "always [madvise] never"."""
    try:
        words = Path(path).read_text().split()
    except OSError:
        return "not available"
    return next((word.strip("[]") for word in words if word.startswith("[")), " ".join(words))
