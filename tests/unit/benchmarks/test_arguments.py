"""Every benchmark program rejects a number of rounds or runs that is below one."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

import pytest

import benchmarks
from benchmarks.arguments import at_least_one

FOLDER = Path(next(iter(benchmarks.__path__)))
REPEATED = re.compile(r'add_argument\(\s*"--(?:rounds|runs)",([^)]*)\)')


@pytest.mark.parametrize(("text", "number"), [("1", 1), (" 12 ", 12), ("+3", 3)])
def test_a_number_from_one_on_is_taken(text: str, number: int) -> None:
    assert at_least_one(text) == number


@pytest.mark.parametrize("text", ["0", "-1", "", "x", "1.5", "1e3"])
def test_what_leaves_nothing_to_measure_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="no whole number from 1 on"):
        at_least_one(text)


def test_each_program_asks_for_one_at_least() -> None:
    asked = {file.name: REPEATED.findall(file.read_text()) for file in FOLDER.glob("*.py")}
    assert sum(map(len, asked.values())) > 10
    assert [name for name, all_of in asked.items() if any("at_least_one" not in one for one in all_of)] == []


def test_a_program_ends_with_its_usage() -> None:
    command = [sys.executable, "-m", "benchmarks.weight_start", "--rounds", "0"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=FOLDER.parent, timeout=120)
    assert done.returncode == 2
    assert done.stderr.endswith("argument --rounds: '0' is no whole number from 1 on\n")
