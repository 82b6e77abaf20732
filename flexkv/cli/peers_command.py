"""`flexkv peers`: shows, for each of the user's running units on this machine, with which units it shares pages, how
many pages it copied or missed, and why it does not share pages with other units."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from flexkv.cli.tables import print_table
from flexkv.config import load_config
from flexkv.peers.card import MOST_CARD_BYTES, name_of
from flexkv.peers.pool_reader import OUTCOMES
from flexkv.peers.runtime_folder import read_cards, runtime_folder, socket_path
from flexkv.peers.watch import ASK_STATUS, MOST_FILES
from flexkv.same_user import is_same_user

ANSWER_S = 5.0
"""Seconds that a unit may take to answer."""

SILENT_EXIT_CODE = 1

MOST_STATUS_BYTES = 128 << 10


@click.command()
@click.option(
    "--folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder in which the units find each other. Default: the setting peers.folder.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def command(folder: Path | None, as_json: bool) -> int:
    """List this user's running units on this machine that share pages. For each of them, show how many pages it finds
    and has copied from every other unit, including units on other machines. Also show with which units it does not
    share pages, and why. Exit code 1: a unit did not answer."""
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
        who = (name_of(unit), str(unit.get("model")), "+".join(unit.get("shares", [])))
        for row in unit["peers"]:
            missed = sum(row[outcome] for outcome in OUTCOMES[1:])
            table.add_row(
                *who,
                f"{name_of(row)} of {row['machine']}" if row.get("machine") else name_of(row),
                *map(str, (row["host_pages"], row["disk_pages"], row["copied"], missed)),
            )
        if not unit["peers"]:
            table.add_row(*who, "nobody", "", "", "", "")
    print_table(table)
    for unit in units:
        name = f"process {name_of(unit)}"
        if once := unit.get("once"):
            click.echo(
                f"{name} stores once: {once['left_out']} pages left out, which others keep, "
                f"{once['promoted']} promoted, {once['lost']} lost"
            )
        for other, why in unit["refused"].items():
            click.echo(f"{name} does not share with process {other}: {why}")
        if "error" in unit:
            click.echo(f"{name}: {unit['error']}", err=True)


def ask_units(folder: Path, deadline_s: float) -> list[dict[str, Any]]:
    """Returns each unit's status. If a unit does not answer within `deadline_s` seconds, its entry contains the facts
    from the unit's file and an `error` instead."""
    return [_ask(folder, unit, facts, deadline_s) for unit, facts in read_cards(folder)]


def _ask(folder: Path, unit: str, facts: dict[str, Any], deadline_s: float) -> dict[str, Any]:
    silent = {"peers": [], "refused": {}} | facts | {"unit": unit}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        line.settimeout(deadline_s)
        try:
            line.connect(str(socket_path(folder, unit)))
            if not is_same_user(line):
                return silent | {"error": "another user's"}
            _, files, _, _ = socket.recv_fds(line, MOST_CARD_BYTES, MOST_FILES)
            for file in files:
                os.close(file)
            line.send(ASK_STATUS)
            told = json.loads(line.recv(MOST_STATUS_BYTES))
        except (ConnectionRefusedError, FileNotFoundError):
            return silent | {"error": "has ended"}
        except (OSError, ValueError) as error:
            return silent | {"error": f"does not answer: {error}"}
    return silent | told if isinstance(told, dict) else silent | {"error": "does not answer"}
