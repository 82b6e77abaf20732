"""Builds libraries that tests preload into a process to observe or change its system calls."""

from __future__ import annotations

import subprocess
from pathlib import Path

from build_support.preflight import compiler

HERE = Path(__file__).resolve().parent


def build_preload(source: str, folder: Path) -> Path:
    """Compiles a source file of this package into a library in `folder`, and returns the library's path."""
    library = (folder / source).with_suffix(".so")
    command = [*(compiler() or "g++").split(), "-std=c++20", "-O1", "-shared", "-fPIC", "-o", str(library)]
    subprocess.run([*command, str(HERE / source), "-ldl"], check=True)
    return library
