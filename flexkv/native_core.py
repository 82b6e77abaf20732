"""Checks that the native core beside this package was built from the same source."""

from __future__ import annotations

import hashlib
from pathlib import Path

from flexkv.errors import NativeCoreError

STUB = Path(__file__).with_name("c_ext.pyi")
DIGITS = 12
"""Digits of the digest that are compared; the build writes as many (`build_support.ninja_file.interface_id`)."""
UNKNOWN = "unknown (older than this check)"


def check_native_core() -> None:
    """Compares the interface that the native core was built from, a digest of the stub, with this package's.

    Does not raise if the core is missing or cannot be loaded, because reading settings needs none.

    Raises:
        NativeCoreError: it was built from another version of the source.
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
