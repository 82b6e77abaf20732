"""Makes the command for a process that runs this same package, whatever its parent's folder and environment are."""

from __future__ import annotations

import sys
from pathlib import Path

import flexkv

# `python -m` looks into the current folder first, which may hold another flexkv, such as a clone.
START = (
    "import runpy, sys; sys.path[:] = [sys.argv[1], *filter(None, sys.path)]; program = sys.argv[2]; "
    "del sys.argv[1:3]; "
    "runpy.run_module(program, run_name='__main__', alter_sys=True)"
)


def own_program(module: str) -> list[str]:
    """The beginning of a command that runs `module` of this package with this interpreter, as `python -m` would. The
    module's arguments follow."""
    return [sys.executable, "-c", START, str(Path(flexkv.__file__).resolve().parent.parent), module]
