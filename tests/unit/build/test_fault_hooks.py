"""Faults are decorators around movers and stores: the product has no hooks for tests."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
NATIVE = re.compile(r"Faulty|FaultRule|FaultAction|for_test|test_hook", re.I)
PYTHON = re.compile(r"Fault(y|Rule|Action|$)|.*for_test|.*test_hook")


def names_in(source: str) -> Iterator[str]:
    """Every name that Python code uses or defines."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name


def has_hook(path: str, source: str) -> bool:
    """The decorators themselves are files called faulty_*; the bindings hand them to tests."""
    name = Path(path).name
    if name.startswith("faulty_") or path.startswith("csrc/bindings/"):
        return False
    if path.endswith(".py"):
        return any(PYTHON.match(used) for used in names_in(source))
    code = re.sub(r"//[^\n]*", "", source)
    return NATIVE.search(code) is not None


def product_files() -> list[Path]:
    patterns = ("csrc/**/*.h", "csrc/**/*.cpp", "csrc/**/*.cu", "flexkv/**/*.py")
    return sorted(path for pattern in patterns for path in ROOT.glob(pattern))


def test_no_file_of_the_product_knows_of_faults() -> None:
    files = product_files()
    assert len(files) > 100
    names = [str(path.relative_to(ROOT)) for path in files]
    assert [name for name in names if has_hook(name, (ROOT / name).read_text())] == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("csrc/transfer/engine.cpp", "void TransferEngine::fail_next_for_test() {}"),
        ("csrc/transfer/lane.h", '#include "transfer/faulty_mover.h"'),
        ("flexkv/transfer/engine.py", "mover = c_ext.FaultyMover(c_ext.HostMover(), [])"),
        ("flexkv/cache/manager.py", "def _lose_slots_for_tests(self): ..."),
    ],
)
def test_a_hook_is_found(path: str, source: str) -> None:
    assert has_hook(path, source)


def test_the_decorators_are_none() -> None:
    assert not has_hook("csrc/transfer/faulty_mover.h", "class FaultyMover {};")
    assert not has_hook("csrc/transfer/lane.h", "int lanes = 2;  // faulty_mover.h counts them")
    assert not has_hook("flexkv/transfer/engine.py", "default = 3")
