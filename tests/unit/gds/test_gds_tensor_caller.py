"""A C++ caller that uses the transfer template with torch tensors can be compiled and run. It is linked with only the
extension and torch.
"""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch

from build_support.preflight import compiler
from flexkv import c_ext
from tests.unit.gds.raw_world import SGLANG, TRTLLM, VLLM

ROOT = Path(__file__).resolve().parents[3]
COMPILE_S = 1200
"""Time limit for the compiler. torch's headers take 10 s on an idle core, and minutes on a busy one."""


@pytest.mark.timeout(COMPILE_S + 60)
def test_the_template_compiles_links_and_moves_bytes(tmp_path: Path) -> None:
    home = Path(torch.__file__).parent
    library, extension = tmp_path / "caller.so", Path(c_ext.__file__).resolve()
    command = [
        *(compiler() or "g++").split(),
        "-std=c++20",
        "-O0",
        "-shared",
        "-fPIC",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-I{ROOT}/csrc",
        f"-isystem{home}/include",
        f"-isystem{home}/include/torch/csrc/api/include",
        str(Path(__file__).with_name("tensor_caller.cpp")),
        "-o",
        str(library),
        str(extension),
        f"-L{home}/lib",
        "-ltorch_cpu",
        "-lc10",
        f"-Wl,-rpath,{home}/lib",
        # The link fails if the extension does not export a symbol that the caller needs.
        "-Wl,-z,defs",
        "-Wl,--allow-shlib-undefined",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_S)
    assert done.returncode == 0, done.stderr[-4000:]
    caller = ctypes.CDLL(str(library))
    for backend in (VLLM, TRTLLM, SGLANG):
        assert caller.round_trip(str(tmp_path / f"blocks-{backend}").encode(), backend) == 0
