"""docs/dependencies.md gives a reason for every package that is installed or imported."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tests.unit.build.test_import_rules import imported_modules

ROOT = Path(__file__).resolve().parents[3]
EXPLAINED_TOGETHER = ("vllm-cpu-minimal.txt", "sglang-minimal.txt")
PACKAGE_OF_MODULE = {"yaml": "pyyaml"}
OPTIONAL = {"opentelemetry": {"flexkv/observe/spans.py"}}
"""Modules that come with some engines, and that flexkv uses if they are installed. For each: the files outside the
adapters that try to import it."""

OURS = {"flexkv", "demo", "benchmarks", "build_support", "examples", "tests"}
NAME = re.compile(r"^\s*\"?([A-Za-z0-9_.-]+)")


def declared() -> set[str]:
    """Returns the packages in pyproject.toml's dependencies, and the packages of the requirements files that the page
    explains package by package.
    """
    project = (ROOT / "pyproject.toml").read_text()
    blocks = re.findall(r"^(?:dependencies|requires) = \[(.*?)\]", project, re.S | re.M)
    entries = [entry for block in blocks for entry in re.findall(r'"([^"]+)"', block)]
    for path in sorted((ROOT / "requirements").glob("*.txt")):
        if path.name not in EXPLAINED_TOGETHER:
            entries += [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return {match[1] for entry in entries if (match := NAME.match(entry))}


def test_every_dependency_has_a_reason() -> None:
    names = declared()
    assert {"numpy", "pydantic", "pytest", "vllm-cpu", "pybind11"} <= names
    text = (ROOT / "docs" / "dependencies.md").read_text()
    assert all(name in text for name in EXPLAINED_TOGETHER)
    assert {name for name in names if f"`{name}`" not in text} == set()


def test_the_test_extra_is_what_the_tests_install() -> None:
    (extra,) = re.findall(r"^test = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(), re.M)
    assert re.findall(r'"([^"]+)"', extra) == (ROOT / "requirements" / "test.txt").read_text().split()


def test_the_gpu_extra_is_what_the_tests_install() -> None:
    (extra,) = re.findall(r"^gpu = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(), re.M)
    assert re.findall(r'"([^"]+)"', extra) == (ROOT / "requirements" / "gpu.txt").read_text().split()


def third_party(*folders: str) -> dict[str, set[str]]:
    """Returns the files that import each top-level module of a third-party package, by the module's name."""
    found: dict[str, set[str]] = {}
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for module in imported_modules(path.read_text()):
                top = module.partition(".")[0]
                if top not in OURS and top not in sys.stdlib_module_names:
                    found.setdefault(top, set()).add(str(path.relative_to(ROOT)))
    return found


def test_every_import_from_elsewhere_has_a_reason() -> None:
    text = (ROOT / "docs" / "dependencies.md").read_text()
    found = third_party("flexkv", "benchmarks", "demo", "build_support", "examples")
    assert {"numpy", "pydantic", "yaml", "click", "rich", "vllm", "torch"} <= set(found)
    for module, files in found.items():
        name = PACKAGE_OF_MODULE.get(module, module)
        assert f"`{name}`" in text, f"{name} is imported by {sorted(files)} and not in docs/dependencies.md"


def test_what_runs_without_an_engine_needs_the_declared_dependencies_only() -> None:
    """Outside adapters and integration, flexkv imports only declared dependencies and extras. The modules in OPTIONAL
    are the exceptions.
    """
    project = (ROOT / "pyproject.toml").read_text()
    (block,) = re.findall(r"^dependencies = \[(.*?)\]", project, re.S | re.M)
    (extras,) = re.findall(r"^\[project.optional-dependencies\]\n(.*?)\n\n", project, re.S | re.M)
    declared = set(re.findall(r'"([a-z]+)', block + extras))
    for module, files in third_party("flexkv").items():
        outside = {name for name in files if not name.startswith(("flexkv/adapters/", "flexkv/integration/"))}
        if outside - OPTIONAL.get(module, set()):
            assert PACKAGE_OF_MODULE.get(module, module) in declared, f"{module}: {sorted(outside)}"
