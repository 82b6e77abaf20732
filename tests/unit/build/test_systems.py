"""docs/systems.md is right: the files that it names exist and contain the names that it gives for them. Each row names
a test, or gives a reason why there is no test.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "systems.md").read_text(encoding="utf-8")
HEADING = "| what | where | state | shown by |\n|---|---|---|---|\n"
SPAN = re.compile(r"`([^`]+)`")
TEST_FILE = re.compile(r"tests/(?:[a-z0-9_]+/)+test_[a-z0-9_]+\.(?:py|cpp)")
STATE = re.compile(r"(?:works|(?:in part|missing): \S)")


class Row(NamedTuple):
    what: str
    where: str
    state: str
    shown_by: str


def rows_of(page: str) -> list[Row]:
    """Returns all rows of the page's tables of systems."""
    tables = [part.partition("\n\n")[0] for part in page.split(HEADING)[1:]]
    return [
        Row(*(cell.strip() for cell in line.split("|")[1:-1]))
        for part in tables
        for line in part.splitlines()
    ]


def paths_in(text: str) -> list[str]:
    return [span for span in SPAN.findall(text) if "/" in span]


def faults_of(row: Row) -> list[str]:
    """Returns the faults of a row. Does not report paths that do not exist."""
    files = [ROOT / path for path in paths_in(row.where) if (ROOT / path).is_file()]
    code = "\n".join(file.read_text(encoding="utf-8") for file in files)
    names = set(SPAN.findall(row.where)) - set(paths_in(row.where))
    faults = [f"{name} is in none of its files" for name in names if not re.search(rf"\b{name}\b", code)]
    faults += [f"{path} is no test" for path in SPAN.findall(row.shown_by) if not TEST_FILE.fullmatch(path)]
    if not STATE.match(row.state):
        faults.append("the state begins with none of the three words, or gives no reason")
    if not row.state.startswith("missing") and not (files and SPAN.findall(row.shown_by)):
        faults.append("no file or no test")
    return faults


def missing_paths(text: str) -> list[str]:
    return [path for path in paths_in(text) if not (ROOT / path).exists()]


def test_every_path_exists() -> None:
    assert len(paths_in(PAGE)) > 200
    assert missing_paths(PAGE) == []


def test_every_row_has_its_names_and_its_test() -> None:
    rows = rows_of(PAGE)
    assert len(rows) > 60
    assert {row.what: faults for row in rows if (faults := faults_of(row))} == {}


def test_the_states_are_the_three_that_the_page_explains() -> None:
    explained = PAGE.partition("| state | meaning |\n|---|---|\n")[2].partition("\n\n")[0]
    assert re.findall(r"^\| ([a-z ]+) \|", explained, re.MULTILINE) == ["works", "in part", "missing"]
    assert {row.state.partition(":")[0] for row in rows_of(PAGE)} >= {"works", "in part", "missing"}


def test_control_a_path_that_is_gone_is_found() -> None:
    path = "flexkv/transfer/layerwise/load.py"
    assert missing_paths(f"`{path}` `{path}x`") == [f"{path}x"]


RIGHT = "| a | `flexkv/transfer/layerwise/load.py` `get_kv` | works | `tests/unit/build/test_systems.py` |"


@pytest.mark.parametrize(
    ("right", "wrong", "fault"),
    [
        ("`get_kv`", "`get_kvs`", "get_kvs is in none of its files"),
        ("test_systems.py", "conftest.py", "tests/unit/build/conftest.py is no test"),
        ("works", "in part", "the state begins with none of the three words, or gives no reason"),
        ("`tests/unit/build/test_systems.py`", "", "no file or no test"),
        ("`flexkv/transfer/layerwise/load.py` `get_kv`", "", "no file or no test"),
    ],
)
def test_control_a_faulty_row_is_found(right: str, wrong: str, fault: str) -> None:
    (row,) = rows_of(HEADING + RIGHT)
    assert faults_of(row) == []
    (row,) = rows_of(HEADING + RIGHT.replace(right, wrong))
    assert faults_of(row) == [fault]
