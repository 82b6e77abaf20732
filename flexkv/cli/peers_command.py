"""`flexkv peers`: which units of this user share pages on this machine, what was served, and why not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from flexkv.cli.tables import print_table
from flexkv.config import load_config
from flexkv.peers.runtime_folder import runtime_folder
from flexkv.peers.status import ask_units

ANSWER_S = 5.0
"""How long a unit may take to answer."""

SILENT_EXIT_CODE = 1


@click.command()
@click.option(
    "--folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="The folder in which the units find each other, instead of the settings' peers.folder.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def command(folder: Path | None, as_json: bool) -> int:
    """List the running units of this user that share pages, what each has of the others, and with whom it does not
    share. Exit code 1: a unit did not answer."""
    where = folder or runtime_folder(load_config().peers.folder)
    units = ask_units(where, ANSWER_S)
    if as_json:
        click.echo(json.dumps(units, indent=2))
    elif units:
        _print(units)
    else:
        click.echo(f"{where}: no unit shares its pages")
    return SILENT_EXIT_CODE if any("error" in unit for unit in units) else 0


def _print(units: list[dict[str, Any]]) -> None:
    table = Table(
        "unit of process", "model", "shares", "has of", "in host memory", "on disk", "copied", "missed"
    )
    for unit in units:
        who = (str(unit.get("pid")), str(unit.get("model")), "+".join(unit.get("shares", [])))
        for row in unit["peers"]:
            missed = row["absent"] + row["changed"] + row["digest"]
            table.add_row(
                *who,
                str(row["pid"]),
                *map(str, (row["host_pages"], row["disk_pages"], row["copied"], missed)),
            )
        if not unit["peers"]:
            table.add_row(*who, "nobody", "", "", "", "")
    print_table(table)
    for unit in units:
        for pid, why in unit["refused"].items():
            click.echo(f"process {unit.get('pid')} does not share with process {pid}: {why}")
        if "error" in unit:
            click.echo(f"process {unit.get('pid')}: {unit['error']}", err=True)
