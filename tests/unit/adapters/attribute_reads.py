"""Records which attributes of vLLM's objects the adapter reads while it runs. The adapter's modules are compiled so
that each read of an attribute, and each `getattr` or `hasattr` with a literal name, calls a function of this module.

As a pytest plugin (`-p tests.unit.adapters.attribute_reads`), this module fails a run in which the adapter reads a name
that `build_support/vllm_names.py` does not list.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from inspect import get_annotations
from types import CodeType, ModuleType
from typing import Any

import pytest

PACKAGES = ("flexkv.adapters.vllm", "flexkv.integration")
OF_CODE, OF_NAME = "_note_read", "_note_asked"

_reads: set[tuple[Any, str]] = set()
"""Each entry: a class or module of vLLM, and the name of an attribute that was read from it or from one of its
instances.
"""
_own: set[str] = set()
"""Attributes that the adapter's classes set on themselves."""


def note_read(owner: Any, name: str) -> Any:
    value = getattr(owner, name)
    _note(owner, name)
    return value


def note_asked(owner: Any, name: str) -> Any:
    if hasattr(owner, name):
        _note(owner, name)
    return owner


def _note(owner: Any, name: str) -> None:
    if name.startswith("__"):
        return
    if isinstance(owner, ModuleType):
        if _package(owner.__name__) == "vllm":
            _reads.add((owner, name))
        return
    is_super = type(owner) is super
    kind = owner.__thisclass__ if is_super else owner if isinstance(owner, type) else type(owner)
    bases = kind.__mro__[is_super:]
    if not any(_package(base.__module__) == "vllm" for base in bases):
        return
    for base in bases:
        is_ours = _package(base.__module__) in ("flexkv", "tests")
        if is_ours and name in (*vars(base), *get_annotations(base), *_own):
            return
        if name in vars(base) and _package(base.__module__) != "vllm":
            return  # Python itself defines the attribute, such as `name` of an enum member
    _reads.add((kind, name))


def _package(module: str) -> str:
    return module.partition(".")[0]


class _Noting(ast.NodeTransformer):
    """Rewrites each read of an attribute into a call that records the read. Annotations and the patterns of `match`
    statements stay as they are, because they read no attribute.
    """

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.ctx, ast.Load):
            return _call(OF_CODE, node.value, ast.Constant(node.attr), node)
        if isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name) and node.value.id == "self":
            _own.add(node.attr)
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        asks = isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr")
        if asks and isinstance(node.args[1], ast.Constant):
            node.args[0] = _call(OF_NAME, node.args[0], node.args[1], node)
        self.generic_visit(node)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AnnAssign:
        node.target = self.visit(node.target)
        node.value = node.value and self.visit(node.value)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        returns, node.returns = node.returns, None
        self.generic_visit(node)
        node.returns = returns
        return node

    def _leave(self, node: ast.AST) -> ast.AST:
        return node

    visit_arg = visit_MatchValue = visit_MatchClass = _leave


def _call(function: str, owner: ast.expr, name: ast.expr, where: ast.expr) -> ast.Call:
    call = ast.Call(ast.Name(function, ast.Load()), [owner, name], [])
    return ast.fix_missing_locations(ast.copy_location(call, where))


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        tree = _Noting().visit(ast.parse(self.get_data(path)))
        return compile(tree, path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update({OF_CODE: note_read, OF_NAME: note_asked})
        super().exec_module(module)


class _Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if not any(f"{fullname}.".startswith(f"{package}.") for package in PACKAGES):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def start() -> None:
    """Starts recording the attributes that the adapter reads. Call it before the adapter is imported."""
    early = [name for name in sys.modules if any(f"{name}.".startswith(f"{one}.") for one in PACKAGES)]
    assert not early, f"imported before: {early}"
    sys.meta_path.insert(0, _Finder())


def unlisted(names: Iterable[str]) -> list[str]:
    """Returns the names that the adapter read but that are not among `names`."""
    from build_support.vllm_names import owner_of

    listed: dict[str, list[Any]] = {}
    for name in names:
        module, _, path = name.partition(":")
        first, _, attribute = path.partition(".")
        listed.setdefault(first, []).append(sys.modules.get(module))
        listed.setdefault(attribute, []).append(owner_of(name))

    def is_listed(owner: Any, attribute: str) -> bool:
        known = listed.get(attribute, ())
        bases = owner.__mro__ if isinstance(owner, type) else (owner,)
        return any(one is base for one in known for base in bases)

    return sorted(
        f"{owner.__name__}:{attribute}"
        if isinstance(owner, ModuleType)
        else f"{owner.__module__}:{owner.__name__}.{attribute}"
        for owner, attribute in _reads
        if not is_listed(owner, attribute)
    )


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    start()


def pytest_sessionfinish(session: pytest.Session) -> None:
    from build_support.vllm_names import touched

    assert _reads, "nothing of vLLM was read"
    if found := unlisted(touched()):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        print("\nnot in build_support/vllm_names.py:", *found, sep="\n")
