"""c_ext.pyi declares exactly the content of the native core: each function, class and member, with its parameters."""

from __future__ import annotations

import ast
import copy
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from flexkv import c_ext

STUB = ast.parse(Path(inspect.getfile(c_ext)).with_name("c_ext.pyi").read_text())
# Base classes of the stub's classes that exist only for type checkers, and not in the native core.
TYPES_ONLY = ("TypedDict", "Protocol")
# Attributes that every class has from pybind11 or Python.
OF_EVERY_CLASS = set(dir(object)) | {"__module__", "__doc__", "__annotations__", "__dict__", "__weakref__"}


def functions(body: list[ast.stmt]) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in body if isinstance(node, ast.FunctionDef)}


def names(body: list[ast.stmt]) -> set[str]:
    found = set()
    for node in body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            if not any(isinstance(base, ast.Name) and base.id in TYPES_ONLY for base in node.bases):
                found.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found


CLASSES = {
    node.name: node
    for node in STUB.body
    if isinstance(node, ast.ClassDef) and inspect.isclass(getattr(c_ext, node.name, None))
}


def test_no_name_is_missing_or_left_over() -> None:
    native = {name for name in dir(c_ext) if not name.startswith("_")}
    stub = {name for name in names(STUB.body) if not name.startswith("_")}
    assert stub == native


@pytest.mark.parametrize("name", CLASSES)
def test_members_are_those_of_the_core(name: str) -> None:
    native = set(vars(getattr(c_ext, name))) - OF_EVERY_CLASS
    stub = names(CLASSES[name].body)
    assert {member for member in native if not member.startswith("_")} == {
        member for member in stub if not member.startswith("_")
    }


def parameters(native: object) -> list[str] | None:
    """Returns the names of a native function's parameters, which pybind11 writes into the first line of the function's
    docstring. Returns None for an overloaded function.
    """
    first, _, rest = (getattr(native, "__doc__", "") or "").partition("\n")
    match = re.match(r"^\w+\((.*)\) -> ", first)
    if match is None or "Overloaded" in rest:
        return None
    flat, innermost = match[1], r"\[[^\[\]]*\]"
    while re.search(innermost, flat):
        flat = re.sub(innermost, "", flat)
    found = re.findall(r"(?:^|, )(\*?\*?\w+)(?=:|,|$)", flat)
    return [name for name in found if not name.startswith("*")]


def callables() -> Iterator[tuple[str, ast.FunctionDef, object]]:
    """Yields the name of each function of the stub and of each method of its classes, its node in the stub, and the
    core's object of that name."""
    for name, node in functions(STUB.body).items():
        yield name, node, getattr(c_ext, name)
    for owner, tree in CLASSES.items():
        for name, node in functions(tree.body).items():
            if not any(isinstance(mark, ast.Name) and mark.id == "property" for mark in node.decorator_list):
                yield f"{owner}.{name}", node, getattr(getattr(c_ext, owner), name)


COMPARED = [
    (name, node, given) for name, node, native in callables() if (given := parameters(native)) is not None
]


@pytest.mark.parametrize(("name", "node", "given"), COMPARED, ids=[name for name, _, _ in COMPARED])
def test_parameters_are_those_of_the_core(name: str, node: ast.FunctionDef, given: list[str]) -> None:
    stub = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    assert stub == given


def test_control_a_renamed_parameter_is_seen() -> None:
    name, node, given = next(row for row in COMPARED if row[0] == "BlockIndex.insert")
    renamed = copy.deepcopy(node)
    renamed.args.args[-1].arg = "other"
    with pytest.raises(AssertionError, match="other"):
        test_parameters_are_those_of_the_core(name, renamed, given)


def test_functions_and_methods_are_compared() -> None:
    names = [name for name, _, _ in COMPARED]
    assert sum("." in name for name in names) > 50
    assert sum("." not in name for name in names) > 10
