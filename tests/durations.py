"""Shows where a run of the tests spent its time. Run `make test` with PYTEST_ADDOPTS=--junitxml=FILE, then `python -m
tests.durations FILE`.

It writes `tests/durations.md`: seconds per folder, per slow file and per slow test, including set-up and tear-down. If
several tests share an engine, the start of the engine counts for the first of these tests.
"""

from __future__ import annotations

import os
import platform
from argparse import ArgumentParser
from collections import defaultdict
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from xml.etree import ElementTree

PAGE = Path(__file__).with_name("durations.md")
ROWS = 40


def read(report: Path) -> dict[str, float]:
    """Reads the JUnit XML that pytest writes. Returns the seconds of each test, by `folder/file.py::test`."""
    seconds: dict[str, float] = defaultdict(float)
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        file = case.attrib["classname"].removeprefix("tests.").replace(".", "/") + ".py"
        seconds[f"{file}::{case.attrib['name']}"] += float(case.attrib["time"])
    return seconds


def page(seconds: Mapping[str, float]) -> str:
    """Returns the Markdown page for these seconds per test."""
    folders: dict[str, float] = defaultdict(float)
    files: dict[str, float] = defaultdict(float)
    for test, took in seconds.items():
        file = test.partition("::")[0]
        parts = file.split("/")
        folders["/".join(parts[: 2 if parts[0] == "unit" else 1])] += took
        files[file] += took
    minutes = sum(seconds.values()) / 60
    machine = f"{os.cpu_count()} cores, Python {platform.python_version()}"
    parts_of_page = [
        "# Durations",
        f"{len(seconds)} tests, {minutes:.0f} minutes added up; the workers of `make test` share them. "
        f"{machine}, {date.today()}, by `tests/durations.py`.",
        _table("folder", folders, len(folders)),
        _table("file", files),
        _table("test", seconds),
    ]
    return "\n\n".join(parts_of_page) + "\n"


def _table(what: str, seconds: Mapping[str, float], rows: int = ROWS) -> str:
    """Returns a Markdown table of the `rows` entries with the longest times, longest first."""
    longest = sorted(seconds.items(), key=lambda row: -row[1])[:rows]
    lines = [f"| {what} | seconds |", "|---|---:|"]
    names = [(name.replace("|", "/"), took) for name, took in longest]
    return "\n".join([*lines, *(f"| `{name}` | {took:.1f} |" for name, took in names)])


def main() -> None:
    parser = ArgumentParser(description="Writes tests/durations.md from a report of pytest on this machine.")
    parser.add_argument("report", type=Path, help="what --junitxml has written")
    PAGE.write_text(page(read(parser.parse_args().report)))


if __name__ == "__main__":
    main()
