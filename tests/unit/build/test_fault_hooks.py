"""Tests inject faults with decorators around movers, queues and devices. The product's code neither contains nor names
these decorators.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from flexkv import c_ext
from flexkv.errors import ContractError
from tests import testing_ext

ROOT = Path(__file__).resolve().parents[3]
NATIVE = re.compile(r"Faulty|FaultRule|FaultAction|for_test|test_hook|lane_by_lane|\btesting/", re.I)
PYTHON = re.compile(r"Fault(y|Rule|Action|$)|.*for_test|.*test_hook")


def names_in(source: str) -> Iterator[str]:
    """Yields every name that Python code uses or defines."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name


def has_hook(path: str, source: str) -> bool:
    """Returns whether the source of a product file contains a name for injected faults."""
    if path.endswith(".py"):
        return any(PYTHON.match(used) for used in names_in(source))
    code = re.sub(r"//[^\n]*", "", source)
    return NATIVE.search(code) is not None


def product_files() -> list[Path]:
    patterns = ("csrc/**/*.h", "csrc/**/*.cpp", "csrc/**/*.cu", "flexkv/**/*.py")
    found = (path for pattern in patterns for path in ROOT.glob(pattern))
    return sorted(path for path in found if not path.is_relative_to(ROOT / "csrc" / "testing"))


def test_no_file_of_the_product_knows_of_faults() -> None:
    files = product_files()
    assert len(files) > 100
    names = [str(path.relative_to(ROOT)) for path in files]
    assert [name for name in names if has_hook(name, (ROOT / name).read_text())] == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("csrc/transfer/engine.cpp", "void TransferEngine::fail_next_for_test() {}"),
        ("csrc/transfer/lane.h", '#include "testing/faulty_mover.h"'),
        ("csrc/rope/rotate.h", "void rotate_lane_by_lane(const RotationRows& rows);"),
        ("flexkv/transfer/engine.py", "mover = c_ext.FaultyMover(c_ext.HostMover(), [])"),
        ("flexkv/cache/manager.py", "def _lose_slots_for_tests(self): ..."),
    ],
)
def test_a_hook_is_found(path: str, source: str) -> None:
    assert has_hook(path, source)


def test_a_comment_is_no_hook() -> None:
    assert not has_hook("csrc/transfer/lane.h", "int lanes = 2;  // faulty_mover.h counts them")
    assert not has_hook("flexkv/transfer/engine.py", "default = 3")


@pytest.mark.parametrize("decorator", [b"FaultyMover", b"CountingMover", b"FaultyQueue"])
def test_the_native_core_is_linked_without_decorators(decorator: bytes) -> None:
    assert decorator not in Path(c_ext.__file__).read_bytes()
    assert decorator in Path(testing_ext.__file__).read_bytes()  # the control


def test_an_error_that_a_decorator_raises_is_the_products() -> None:
    with pytest.raises(ContractError, match="no op kind 99"):
        testing_ext.CountingMover(c_ext.HostMover()).count(99)
