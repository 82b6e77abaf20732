"""The documentation lists all state that flexkv keeps for the complete process: variables of modules, and changes to
the process itself.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SECTION = "## What units share"
OUTSIDE = ("os.environ", "os.putenv", "signal.signal")
"""Beginnings of expressions that access state of the complete process, not only of flexkv."""
READERS = frozenset({"get", "items", "copy", "__contains__"})
OWN_PROCESSES = frozenset({"flexkv/plugins/keeper/__main__.py", "flexkv/remote/helper/__main__.py"})
"""Programs that run as separate processes of flexkv, in which no engine's code runs."""


def kept_names(source: str) -> list[str]:
    """Returns the module-level names whose values may change. Omits constants (upper case), types and the logger."""
    found = []
    for node in ast.parse(source).body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        found += [n for n in names if n.strip("_")[:1].islower() and not n.startswith("__") and n != "logger"]
    return found


def written(source: str) -> list[str]:
    """Returns the calls and assignments with which a file changes the process, such as its environment variables and
    signal handlers.
    """
    nodes = list(ast.walk(ast.parse(source)))
    calls = [ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)]
    found = [text for text in calls if text.startswith(OUTSIDE) and text.rpartition(".")[2] not in READERS]
    for node in nodes:
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            found += [text for text in [ast.unparse(node)] if text.startswith(OUTSIDE)]
    return found


def package_files() -> list[Path]:
    return sorted((ROOT / "flexkv").rglob("*.py"))


def judged(page: str) -> set[tuple[str, str]]:
    """Returns the pairs of a name and a file in the first column of the section's table."""
    section = page.split(SECTION)[1].split("\n## ")[0]
    found = set()
    for line in section.splitlines():
        first = line.split("|")[1] if line.startswith("|") else ""
        words = first.split("`")[1::2]
        file = next((word.rpartition("/")[2] for word in words if word.endswith(".py")), "")
        found |= {(word, file) for word in words if "/" not in word}
    return found


def test_what_a_module_keeps_is_judged_for_two_units() -> None:
    kept = {(name, path.name) for path in package_files() for name in kept_names(path.read_text())}
    page = (ROOT / "docs" / "architecture.md").read_text()
    of_modules = {(name, file) for name, file in judged(page) if file.endswith(".py")}
    assert kept == of_modules, f"add to, or take from, the table under {SECTION!r} in docs/architecture.md"


def test_nothing_of_the_process_is_changed() -> None:
    found = {path.relative_to(ROOT).as_posix(): written(path.read_text()) for path in package_files()}
    assert {path for path, changes in found.items() if changes} == OWN_PROCESSES


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("_cache: dict[int, int] = {}", ["_cache"]),
        ("a = b = []", ["a", "b"]),
        ("LIMIT = 3\nlogger = get_logger(__name__)\nKeys = bytes\n__all__ = []", []),
        ("def f():\n    local = {}", []),
    ],
)
def test_kept_names_are_found(source: str, names: list[str]) -> None:
    assert kept_names(source) == names


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("import os\nos.environ['A'] = '1'", 1),
        ("import os\ndel os.environ['A']", 1),
        ("import os\nos.environ.update(A='1')", 1),
        ("import os\nos.environ.setdefault('A', '1')", 1),
        ("import signal\nsignal.signal(15, stop)", 1),
        ("import os\na = os.environ['A']\nb = os.environ.get('B')", 0),
    ],
)
def test_changes_of_the_process_are_found(source: str, count: int) -> None:
    assert len(written(source)) == count
