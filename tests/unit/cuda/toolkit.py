"""Finds CUDA's headers and compiler. `make env-test` installs them for these tests, in a folder of the environment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from build_support.environment import CUDA_FOLDER
from build_support.ninja_file import ROOT
from build_support.preflight import compiler

FOLDER = Path(sys.prefix) / CUDA_FOLDER / "nvidia"
NVCC = FOLDER / "cu13" / "bin" / "nvcc"
INCLUDES = {
    12: (FOLDER / "cuda_runtime" / "include", FOLDER / "cufile" / "include"),
    13: (FOLDER / "cu13" / "include",),
}
"""For each major version of CUDA, the folders with its headers."""


def require(path: Path) -> None:
    assert path.exists(), f"{path} is missing: make env-test brings CUDA's headers and compiler"


def compile_with_headers(source: str, major: int) -> subprocess.CompletedProcess[str]:
    """Runs the C++ compiler on `source`, with this project's headers and those of CUDA `major`. The compiler only
    checks the code and generates none.
    """
    for folder in INCLUDES[major]:
        require(folder)
    program = (compiler() or "g++").split()
    includes = [f"-I{ROOT / 'csrc'}", f"-I{Path(__file__).parent}"]
    includes += [f"-isystem{folder}" for folder in INCLUDES[major]]
    command = [*program, "-std=c++20", "-Wall", "-Wextra", "-fsyntax-only", *includes, "-x", "c++", "-"]
    return subprocess.run(command, input=source, capture_output=True, text=True, timeout=120)
