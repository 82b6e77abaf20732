"""Makes the command line of a process that runs this same package, whatever the current folder and the environment
are.
"""

from __future__ import annotations

import sys
from pathlib import Path

import flexkv

# `python -m` would look into the current folder first, where another flexkv, such as a clone, may lie.
START = (
    "import runpy, sys; sys.path[:] = [sys.argv[1], *filter(None, sys.path)]; program = sys.argv[2]; "
    "del sys.argv[1:3]; "
    "runpy.run_module(program, run_name='__main__', alter_sys=True)"
)


def own_program(module: str) -> list[str]:
    """Returns the start of a command line that runs `module` of this package with this interpreter, as `python -m`
    would. The caller appends the module's arguments.
    """
    return [sys.executable, "-c", START, str(Path(flexkv.__file__).resolve().parent.parent), module]
