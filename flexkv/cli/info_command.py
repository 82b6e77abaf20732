"""`flexkv info`: shows the capabilities of this build and this machine, and the problems that an engine's start would
have."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from flexkv.cli.gpu_facts import words as device_words
from flexkv.cli.package_facts import Facts, package_facts
from flexkv.cli.tables import print_table
from flexkv.config import load_config
from flexkv.config.sizes import format_size

PROBLEM_EXIT_CODE = 1

NOT_BUILT = "the native core of this package was not built: run `make build`"


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option(
    "--model",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of a model with its config.json. Also shows how many of its tokens the host tier holds.",
)
def command(as_json: bool, model: Path | None) -> int:
    """Show what this build and this machine can do, and which changes would make flexkv faster.

    Exit code 1: with the current settings an engine would not start here, or would start without one of its disks.
    """
    config = load_config()
    facts = package_facts()
    if facts["native_core"] is None:
        facts |= {"problems": [NOT_BUILT], "hints": [], "model": None}
    else:
        from flexkv.cli.info_facts import collect

        facts = collect(config, model)
    if as_json:
        click.echo(json.dumps(facts, indent=2))
    else:
        _print(facts)
    return PROBLEM_EXIT_CODE if facts["problems"] else 0


def _print(facts: Facts) -> None:
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in rows(facts).items():
        table.add_row(name, value)
    print_table(table)
    console = Console(markup=False, highlight=False)
    for other in facts["flexkv"]["others"]:
        words = f"{other['name']} {other['version']} in {other['folder']}"
        console.print(f"warning: another package provides `flexkv` here: {words}", soft_wrap=True)
    for kind in ("problem", "hint"):
        for words in facts[f"{kind}s"]:
            console.print(f"{kind}: {words}", soft_wrap=True)  # not wrapped, so that commands can be copied


def rows(facts: Facts) -> dict[str, str]:
    """Returns the facts as text: maps each row's name to its text."""
    package = facts["flexkv"]
    found = {"flexkv": f"{package['version']} from {package['folder']}", "python": facts["python"]}
    if facts["native_core"] is None:
        return found | {"native core": "missing"}
    core, cuda, memory = facts["native_core"], facts["cuda"], facts["memory"]
    pages, host, disk = facts["huge_pages"], facts["host_tier"], facts["disk_tier"]
    size = format_size(host["bytes"]) if host["bytes"] is not None else "none"
    found |= {
        "native core": f"{core['variant']}, compiler {core['compiler']}",
        "cuda": f"{cuda['devices']} device(s), driver {cuda['driver']}"
        if cuda["devices"]
        else f"not used: {cuda['reason']}",
        **_gpu_rows(facts["gpu"]),
        "cufile": _cufile_words(facts["cufile"]),
        "copy ways": copy_ways_words(facts["copy_ways"]),
        "gds pool": gds_pool_words(facts["gds_pool"]),
        "cpus": f"{facts['cpus']['usable']} usable of {facts['cpus']['total']}",
        "memory": f"{format_size(memory['usable_bytes'])} usable ({memory['limited_by']}) of "
        f"{format_size(memory['total_bytes'])}",
        "host tier": f"{size} with the current settings and one rank",
        "eviction": f"{facts['eviction']['policy']} (index.policy), of all tiers",
        "huge pages, private": pages["private"],
        "huge pages, shared": pages["shared"],
        "huge pages, reserved": f"{pages['free_pages']} free of {format_size(pages['page_bytes'])}",
        "disk tier": f"{len(disk['folders'])} folder(s), disk.mode {disk['mode']}"
        if disk["folders"]
        else "off: disk.folders is unset",
        "disk I/O": f"a pool of threads: {disk['io_uring_refusal'] or 'disk.io is threads'}"
        if disk["io"] == "threads"
        else "io_uring",
    }
    if facts["model"] is not None:
        of = facts["model"]
        found["host tier holds"] = (
            f"{of['host_tokens']} tokens of {of['folder']}, {of['host_tokens'] / of['prompt_tokens']:.1f} prompts of "
            f"{of['prompt_tokens']} tokens ({format_size(of['prompt_bytes'])} each)"
        )
    return found | {f"disk {folder['path']}": _folder_words(folder) for folder in disk["folders"]}


def _gpu_rows(gpu: Facts) -> dict[str, str]:
    versions = [f"{name} {version}" for name, version in gpu["packages"].items() if version]
    said = "; ".join([*versions, *([gpu["reason"]] if gpu["reason"] else [])])
    return {"gpu extra": said} | {
        f"gpu {number}": device_words(device) for number, device in enumerate(gpu["devices"])
    }


def _cufile_words(cufile: Facts) -> str:
    if not cufile["path"]:
        return str(cufile["reason"])
    return f"{cufile['version'] or 'unknown version'} from {cufile['path']} ({cufile['found']})"


def copy_ways_words(ways: Facts) -> str:
    """Describes for each GPU which run lengths a kernel copies in place of the copy engine, and names the table that
    decides this.
    """
    said = []
    for table in ways["tables"]:
        if table["refused"]:
            said.append(f"gpu {table['gpu']}: none, {table['from']} is refused")
            continue
        below = table["kernel_below_bytes"]
        runs = (
            ""
            if below is None
            else ", kernel for "
            + " and ".join(
                f"all {name}" if below[way] == "all" else f"{name} of runs below {format_size(below[way])}"
                for way, name in (("h2d", "loads"), ("d2h", "stores"))
            )
        )
        said.append(f"gpu {table['gpu']}: {table['from']}{runs}")
    return "; ".join(said) or f"no GPU; {ways['file'] or 'built in'} for one"


def gds_pool_words(pool: Facts) -> str:
    """Says on which GPUs the pages of a pool pass through a staging buffer on their way from and to disk, although each
    block is contiguous in the pool."""
    if pool["register_pool"] == "off":
        return "not registered with cuFile: gds.register_pool is off"
    said = [f"gds.register_pool {pool['register_pool']}"]
    for limit in pool["limits"]:
        most = limit["most_bytes"]
        if most is None:
            words = "its BAR1 is not known, which limits what can be registered"
        elif most < limit["memory_bytes"]:
            words = f"a pool larger than its BAR1 of {format_size(most)} passes through staging"
        else:
            words = "its BAR1 reaches all of its memory"
        said.append(f"gpu {limit['gpu']}: {words}")
    return "; ".join(said)


def _folder_words(folder: Facts) -> str:
    if folder["fault"]:
        return f"cannot be used: {folder['fault']}"
    room = f"{format_size(folder['free_bytes'])} free of {format_size(folder['total_bytes'])}"
    if not folder["exists"]:
        return f"{room}; made at the engine's start"
    named = f"; {folder['named_files']} weights file(s) are named" if folder["named_files"] else ""
    return f"{room}; {folder['units']} unit(s) hold {format_size(folder['held_bytes'])}{named}"
