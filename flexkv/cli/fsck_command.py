"""`flexkv fsck`: verifies every page on disk."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console

from flexkv.errors import ConfigError, DiskError
from flexkv.storage.folder import closed_folders, unit_folders
from flexkv.storage.fsck import MOST_NAMED, FsckReport, SlabReport, check_folder

NOT_CLEAN_EXIT_CODE = 1

DAMAGED = (
    "damaged: the slot does not contain the page that was written to it. Such a page is never served, and a later "
    "write takes its slot. --repair empties the slot."
)
MISSING = "missing: the index lists a page that is not complete, so it is a miss. --repair removes it from the index."


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--repair",
    is_flag=True,
    help="Correct the index. If it is lost or damaged, build it again from the pages.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def command(folder: Path, repair: bool, as_json: bool) -> int:
    """Verify every slot of the disk tier under FOLDER, which is a disk's folder or that of one unit. Exit code 1: a
    unit is not clean, or a folder cannot be read."""
    closed = closed_folders(folder)
    reports: list[FsckReport] = []
    failed: list[DiskError] = []
    for unit in unit_folders(folder):
        if unit in closed:
            continue
        try:
            reports.append(check_folder(unit, repair))
        except DiskError as error:  # the other units are checked all the same
            failed.append(error)
    if not reports and failed:
        raise failed[0]
    if not reports and closed:
        raise DiskError(f"no slabs can be found: {'; '.join(closed.values())}")
    if not reports:
        raise ConfigError(f"{folder}: no slabs lie under it; a disk's folder is one of disk.folders")
    if as_json:
        click.echo(json.dumps([{**asdict(r), "clean": r.clean} for r in reports], indent=2, default=str))
    else:
        console = Console(markup=False, highlight=False, soft_wrap=True)
        for report in reports:
            _show(console, report)
        slabs = [slab for report in reports for slab in report.slabs]
        if any(slab.damaged for slab in slabs) and not repair:
            console.print(DAMAGED)
        if any(slab.missing for slab in slabs) and not repair:
            console.print(MISSING)
    for words in closed.values():
        click.echo(f"{words}: what lies in it was not verified", err=True)
    for refusal in failed:
        click.echo(f"not checked: {refusal}", err=True)
    is_clean = not closed and not failed and all(report.clean for report in reports)
    return 0 if is_clean else NOT_CLEAN_EXIT_CODE


def _show(console: Console, report: FsckReport) -> None:
    console.print(f"{report.folder}: {'clean' if report.clean else 'NOT CLEAN'}")
    for problem in report.problems:
        console.print(f"  {problem}")
    for slab in report.slabs:
        console.print(
            f"  {slab.path.name} ({slab.model}): {slab.slots} slots, {slab.good} good, {slab.empty} empty, "
            f"{slab.stale} stale, {len(slab.orphans)} orphans, {len(slab.damaged)} damaged, "
            f"{len(slab.missing)} missing"
        )
        if len(report.slabs) + len(slab.groups) > 2:  # with one slab and one group, the totals above suffice
            for group in slab.groups:
                console.print(f"    group {group.group} ({group.rule}, {group.format_id}): {group.good} good")
        _name(console, slab)
    if report.repaired:
        console.print("  the index was repaired")


def _name(console: Console, slab: SlabReport) -> None:
    for slot, reason in slab.damaged[:MOST_NAMED]:
        console.print(f"    slot {slot}: {reason}")
    lists: Sequence[tuple[str, Sequence[int]]] = [("orphans", slab.orphans), ("missing", slab.missing)]
    for name, slots in lists:
        if slots:
            more = f" and {len(slots) - MOST_NAMED} more" if len(slots) > MOST_NAMED else ""
            console.print(f"    {name}: {', '.join(map(str, slots[:MOST_NAMED]))}{more}")
