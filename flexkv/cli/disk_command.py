"""`flexkv disk`: lists the units whose pages the disk tier keeps, and deletes units."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import click
from rich.table import Table

from flexkv.cli.tables import print_table
from flexkv.config.sizes import format_size
from flexkv.errors import ConfigError, DiskError
from flexkv.observe import unix_now_s
from flexkv.storage.folder import (
    LOCK_NAME,
    closed_folders,
    held_bytes,
    is_in_use,
    remove_folder,
    unit_folders,
)
from flexkv.storage.header_copy import find_header
from flexkv.storage.index_copy import pages_by_group
from flexkv.storage.other_keys import last_written
from flexkv.storage.weights_name import read_weights

DAY_S = 86_400

NAME_DIGITS = 16
"""Number of leading hex digits of the weights' digest that the table shows."""

UNLISTED_EXIT_CODE = 1
KEPT_EXIT_CODE = 1


@click.group()
def command() -> None:
    """Show or delete what the disk tier keeps."""


@command.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--pages", is_flag=True, help="Also count the pages of each KV group. This reads the whole index."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def ls(folder: Path, pages: bool, as_json: bool) -> int:
    """List the units under FOLDER with their models, KV groups, sizes and ages. Exit code 1: a folder under it cannot
    be read."""
    closed = closed_folders(folder)
    entries = [_entry(unit, folder, pages) for unit in unit_folders(folder) if unit not in closed]
    if as_json:
        click.echo(json.dumps(entries, indent=2))
    elif entries:
        _print(entries)
    elif not closed:
        click.echo(
            f"{folder}: nothing of the disk tier lies under it; a disk's folder is one of disk.folders"
        )
    for words in closed.values():
        click.echo(f"{words}: what lies in it is not listed", err=True)
    return UNLISTED_EXIT_CODE if closed else 0


def _print(entries: Sequence[dict[str, object]]) -> None:
    table = Table(box=None, pad_edge=False)
    for heading in (
        "folder",
        "model",
        "format",
        "groups",
        "size",
        "weights",
        "created",
        "last used",
        "state",
    ):
        table.add_column(heading)
    for entry in entries:
        table.add_row(
            str(entry["folder"]),
            str(entry["model"]),
            str(entry["format"]),
            _groups_text(entry["groups"]),
            format_size(int(str(entry["bytes"]))),
            str(entry["weights"])[:NAME_DIGITS],
            _age(entry["created"]),
            _age(entry["last_used"]),
            "; ".join(filter(None, ("in use" if entry["in_use"] else "", str(entry["damage"])))),
        )
    print_table(table)


@command.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("name")
@click.option("--yes", is_flag=True, help="Delete without asking.")
def drop(folder: Path, name: str, yes: bool) -> int:
    """Delete the unit NAME, or all units below NAME, as `ls FOLDER` lists them. A unit that is in use is not deleted.
    Exit code 1: a unit was kept."""
    units = {str(unit.relative_to(folder)): unit for unit in unit_folders(folder) if unit != folder}
    chosen = [unit for key, unit in units.items() if key == name or key.startswith(f"{name}/")]
    if not chosen:
        raise ConfigError(f"{name!r}: no unit of {folder}; there are {', '.join(units) or 'none'}")
    kept = 0
    for unit in chosen:
        if yes or _agreed(unit):
            click.echo(f"{unit}: {format_size(remove_folder(unit))} freed")
        else:
            kept += 1
            click.echo(f"{unit}: kept, nothing of it was deleted")
    return KEPT_EXIT_CODE if kept else 0


def _agreed(unit: Path) -> bool:
    """Asks the user whether to delete the unit's folder, and returns the answer.

    Raises:
        click.Abort: the user gave no answer; a line on stderr says so.
    """
    try:
        return click.confirm(f"delete {unit}?")
    except click.Abort:
        click.echo(f"\n{unit}: kept: no answer (--yes deletes without a question)", err=True)
        raise


def _entry(unit: Path, root: Path, pages: bool) -> dict[str, object]:
    groups: dict[int, dict[str, object]] = {}
    slots: dict[int, int] = {}
    entry: dict[str, object] = {
        "folder": str(unit.relative_to(root)),
        "model": "?",
        "format": "?",
        "groups": [],
        "bytes": held_bytes(unit),
        "weights": (read_weights(unit) or (b"", 0))[0].hex(),
        "created": 0,
        "last_used": int(last_written(unit)),
        "in_use": False,
        "damage": "",
    }
    try:
        entry["in_use"] = is_in_use(unit)
    except OSError as error:
        entry["damage"] = f"{LOCK_NAME}: {error.strerror}: whether it is in use is not known"
    for slab in sorted(unit.glob("group*.slab")):
        try:
            found = find_header(slab)
        except DiskError as error:
            entry["damage"] = str(error).removeprefix(f"{unit}/")
            continue
        header = found.header
        if fault := found.slab_fault or found.copy_fault:
            entry["damage"] = fault.removeprefix(f"{unit}/") + " (there is a whole one beside it)"
        slots[header.group] = max(0, (slab.stat().st_size - header.header_bytes) // header.slot_bytes)
        for number, group in found.groups.items():
            groups[number] = {"group": number, "rule": group.rule_text, "format": group.format_id}
        if len(slots) == 1:
            entry.update(model=header.model, format=header.format_id, created=header.created)
    entry["groups"] = [groups[number] for number in sorted(groups)]
    if pages and slots:
        try:
            counted = pages_by_group(unit, slots)
        except DiskError as error:
            entry["damage"] = entry["damage"] or f"its pages cannot be counted: {error}"
        else:
            for number, of_group in groups.items():
                of_group["pages"] = counted.get(number, 0)
    return entry


def _groups_text(groups: object) -> str:
    assert isinstance(groups, list)
    texts = []
    for group in groups:
        pages = f": {group['pages']} pages" if "pages" in group else ""
        texts.append(f"{group['rule']}{pages}")
    return "; ".join(texts)


def _age(when: object) -> str:
    if not when:
        return "?"
    seconds = max(0, unix_now_s() - int(str(when)))
    if seconds < DAY_S:
        return f"{seconds / 3600:.1f} h ago"
    return f"{seconds / DAY_S:.1f} d ago"
