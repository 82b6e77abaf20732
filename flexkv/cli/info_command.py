"""`flexkv info`: what this build and this machine can do."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

import flexkv
from flexkv.config import load_config, read_memory, resolve_host_bytes
from flexkv.config.sizes import format_size


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def command(as_json: bool) -> None:
    """Show what this build and this machine can do."""
    facts = {**build_facts(), **machine_facts()}
    if as_json:
        click.echo(json.dumps(facts, indent=2))
        return
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in facts.items():
        table.add_row(name, value)
    Console(markup=False, highlight=False).print(table)


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
        "huge pages, private": _mode("/sys/kernel/mm/transparent_hugepage/enabled"),
        "huge pages, shared": _mode("/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        "huge pages, reserved": f"{memory.huge_pages_free} free of {format_size(memory.huge_page_bytes)}",
    }


def _mode(path: str) -> str:
    """The word in brackets of a kernel setting such as "always [madvise] never"."""
    try:
        words = Path(path).read_text().split()
    except OSError:
        return "not available"
    return next((word.strip("[]") for word in words if word.startswith("[")), " ".join(words))
