"""docs/dependencies.md gives a reason for everything that is installed."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
EXPLAINED_TOGETHER = "vllm-cpu-minimal.txt"
NAME = re.compile(r"^\s*\"?([A-Za-z0-9_.-]+)")


def declared() -> set[str]:
    """Names in pyproject.toml's dependencies and in the requirements files that are explained one by one."""
    project = (ROOT / "pyproject.toml").read_text()
    blocks = re.findall(r"^(?:dependencies|requires) = \[(.*?)\]", project, re.S | re.M)
    entries = [entry for block in blocks for entry in re.findall(r'"([^"]+)"', block)]
    for path in sorted((ROOT / "requirements").glob("*.txt")):
        if path.name != EXPLAINED_TOGETHER:
            entries += [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return {match[1] for entry in entries if (match := NAME.match(entry))}


def test_every_dependency_has_a_reason() -> None:
    names = declared()
    assert {"numpy", "pydantic", "pytest", "vllm-cpu", "pybind11"} <= names
    text = (ROOT / "docs" / "dependencies.md").read_text()
    assert EXPLAINED_TOGETHER in text
    assert {name for name in names if f"`{name}`" not in text} == set()
