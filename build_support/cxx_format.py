"""Formats the C++ and CUDA sources with clang-format 19. With --check it changes nothing, and fails if a file is not
formatted.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from build_support.console import fail

ROOT = Path(__file__).resolve().parents[1]
MAJOR = 19
"""The required version of clang-format. Other versions format the code differently with the same .clang-format file."""
SUFFIXES = (".h", ".cpp", ".cu", ".cuh")


def find_program() -> str:
    """Returns the path of clang-format 19: this environment's, or one on PATH if the environment has none.

    Raises:
        SystemExit: neither the environment nor PATH has clang-format 19.
    """
    own = Path(sys.executable).with_name("clang-format")
    candidates = [
        str(own) if own.exists() else None,
        *map(shutil.which, (f"clang-format-{MAJOR}", "clang-format")),
    ]
    for program in filter(None, candidates):
        version = subprocess.run([program, "--version"], capture_output=True, text=True).stdout
        found = re.search(r"version (\d+)\.", version)
        if found and int(found[1]) == MAJOR:
            return program
    fail(f"no clang-format {MAJOR}: pip install 'clang-format=={MAJOR}.*'")


def sources() -> list[Path]:
    """Returns every C++ and CUDA file of the native core, its tests and the benchmarks."""
    return sorted(
        path
        for folder in ("csrc", "tests", "benchmarks")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in SUFFIXES
    )


def main() -> None:
    mode = ["--dry-run", "-Werror"] if "--check" in sys.argv[1:] else ["-i"]
    files = sources()
    raise SystemExit(subprocess.run([find_program(), *mode, *map(str, files)]).returncode if files else 0)


if __name__ == "__main__":
    main()
