"""Compiles fake_nvtx.c, a fake NVTX library."""

from __future__ import annotations

import functools
import os
import subprocess
from pathlib import Path

from build_support.preflight import compiler

COMPILE_S = 180


@functools.cache
def build_fake_nvtx(folder: Path) -> Path:
    """Builds the fake library in `folder`, and returns its path."""
    library = folder / "libfake_nvtx.so"
    command = [*(compiler() or "g++").split(), "-x", "c", "-std=gnu11", "-shared", "-fPIC"]
    command += [str(Path(__file__).with_suffix(".c")), "-o", str(library)]
    # This process may run under a sanitizer, whose runtime the compiler must not load.
    environ = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    subprocess.run(command, check=True, env=environ, timeout=COMPILE_S)
    return library
