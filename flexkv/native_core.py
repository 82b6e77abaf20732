"""Raises errors with an explanation if the native core is missing or was built from another version of the source."""

from __future__ import annotations

import hashlib
from importlib import import_module
from pathlib import Path
from typing import Any

from flexkv.errors import NativeCoreError

STUB = Path(__file__).with_name("c_ext.pyi")
DIGITS = 12
"""`check_native_core` compares this many digits of the digests. The build writes as many digits into the native core
(`build_support.ninja_file.interface_id`).
"""
UNKNOWN = "unknown (older than this check)"


def missing_core(error: ImportError) -> NativeCoreError | None:
    """Returns an error that explains an import of the missing native core; None if `error` is about another module."""
    # After `from flexkv import c_ext`, the error has the package's name; after `import flexkv.c_ext`, it has the
    # module's name.
    if error.name not in ("flexkv", "flexkv.c_ext"):
        return None
    return NativeCoreError(
        f"the native core of the package in {STUB.parent} cannot be imported: {error}. If this is a source folder, "
        "build the core with `make build`; if flexkv is also installed, start from another folder, because Python "
        "finds this one first"
    )


def import_with_core(module: str, name: str) -> Any:
    """Imports a module of this package and returns its attribute `name`.

    Raises:
        NativeCoreError: the native core is missing. The message says what to do.
        ImportError: another module cannot be imported.
    """
    try:
        return getattr(import_module(module), name)
    except ImportError as error:
        raise missing_core(error) or error from None


def check_native_core() -> None:
    """Compares two digests of the stub `c_ext.pyi`: the one in the native core, written when it was built, and that of
    the stub in this package.

    Returns silently if the core is missing or cannot be loaded, because settings can be read without it.

    Raises:
        NativeCoreError: the core was built from another version of the source.
    """
    try:
        from flexkv import c_ext

        stub = STUB.read_bytes()
    except (ImportError, OSError):
        return
    built = getattr(c_ext, "__interface__", UNKNOWN)
    wanted = hashlib.sha256(stub).hexdigest()[:DIGITS]
    if built != wanted:
        raise NativeCoreError(
            f"{c_ext.__file__} was built from another version of flexkv: its interface is {built}, this package's is "
            f"{wanted}; build it again with `make build`, or install the package again with `pip install .`"
        )
