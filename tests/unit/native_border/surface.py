"""Finds everything that a module offers to Python: every function, constructor, method and property, with its
parameters.

This module uses introspection, so that a new binding is fuzzed without a change here. The types of parameters come from
the stub, which `tests/unit/build/test_stub.py` compares with the core.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Literal

Kind = Literal["function", "constructor", "method", "static", "property"]
SPECIAL = ("__len__", "__repr__", "__eq__")


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a target.

    Attributes:
        annotation: the parameter's type in the stub; empty if the stub has none.
    """

    name: str
    annotation: str = ""
    keyword_only: bool = False


@dataclass(frozen=True, slots=True)
class Target:
    """A function, constructor, method or property.

    Attributes:
        owner: its class; empty for a function.
        member: its name in the class or module.
    """

    kind: Kind
    owner: str
    member: str
    parameters: tuple[Parameter, ...]

    @property
    def name(self) -> str:
        return f"{self.owner}.{self.member}" if self.owner else self.member


def classes(module: ModuleType) -> dict[str, type]:
    return {
        name: value
        for name, value in sorted(vars(module).items())
        if inspect.isclass(value) and value.__module__ == module.__name__
    }


def targets(module: ModuleType) -> list[Target]:
    stub = _stub_of(module)
    found = [
        Target("function", "", name, _parameters(value, stub.get(name)))
        for name, value in sorted(vars(module).items())
        if not name.startswith("_") and inspect.isroutine(value)
    ]
    for owner, cls in classes(module).items():
        found += _members(owner, cls, stub)
    return found


def _members(owner: str, cls: type, stub: dict[str, ast.FunctionDef]) -> Iterator[Target]:
    for member, value in sorted(vars(cls).items()):
        if member.startswith("_") and member not in (*SPECIAL, "__init__"):
            continue
        if isinstance(value, property):
            yield Target("property", owner, member, ())
            continue
        if not callable(value) and not isinstance(value, staticmethod):
            continue
        given = _parameters(getattr(cls, member), stub.get(f"{owner}.{member}"))
        static = isinstance(value, staticmethod)
        kind: Kind = "constructor" if member == "__init__" else "static" if static else "method"
        yield Target(kind, owner, member, given)


def _parameters(native: object, stub: ast.FunctionDef | None) -> tuple[Parameter, ...]:
    """Returns the parameters of a native function, with their names in the core and their annotations in the stub."""
    args = stub.args if stub else None
    known = [*args.posonlyargs, *args.args, *args.kwonlyargs] if args else []
    by_name = {arg.arg: ast.unparse(arg.annotation) if arg.annotation else "" for arg in known}
    keyword_only = {arg.arg for arg in args.kwonlyargs} if args else set()
    names = [name for name in _names(native) if name != "self"]
    return tuple(Parameter(name, by_name.get(name, ""), name in keyword_only) for name in names)


def _names(native: object) -> tuple[str, ...]:
    """Returns the names of a native function's parameters. They come from the first line that pybind11 writes into its
    docstring, or from its signature.
    """
    first = (getattr(native, "__doc__", "") or "").partition("\n")[0]
    match = re.match(r"^\w+\((.*)\) -> ", first)
    if match is not None:
        flat, inner = match[1], r"\[[^\[\]]*\]"
        while re.search(inner, flat):
            flat = re.sub(inner, "", flat)
        return tuple(re.findall(r"(?:^|, )([A-Za-z_]\w*)(?=:|,|$| =)", flat))
    if inspect.isfunction(native):
        return tuple(inspect.signature(native).parameters)
    return ()


def _stub_of(module: ModuleType) -> dict[str, ast.FunctionDef]:
    """Returns the functions in a module's stub by name, and its methods by `Class.name`. Returns nothing if the module
    has no stub."""
    path = Path(inspect.getfile(module)).with_name(f"{module.__name__.rpartition('.')[2]}.pyi")
    if not path.exists():
        return {}
    found: dict[str, ast.FunctionDef] = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.ClassDef):
            found |= {
                f"{node.name}.{member.name}": member
                for member in node.body
                if isinstance(member, ast.FunctionDef)
            }
    return found
