"""CUDA's headers and compiler, which `make env-test` puts into a folder of the environment for these tests."""

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
"""Folders of headers, by CUDA's major version."""


def require(path: Path) -> None:
    assert path.exists(), f"{path} is missing: make env-test brings CUDA's headers and compiler"


def compile_with_headers(source: str, major: int) -> subprocess.CompletedProcess[str]:
    """Has the C++ compiler check `source`, with this project's headers and those of CUDA `major`."""
    for folder in INCLUDES[major]:
        require(folder)
    program = (compiler() or "g++").split()
    includes = [f"-I{ROOT / 'csrc'}", f"-I{Path(__file__).parent}"]
    includes += [f"-isystem{folder}" for folder in INCLUDES[major]]
    command = [*program, "-std=c++20", "-Wall", "-Wextra", "-fsyntax-only", *includes, "-x", "c++", "-"]
    return subprocess.run(command, input=source, capture_output=True, text=True, timeout=120)
