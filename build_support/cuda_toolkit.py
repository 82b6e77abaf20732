"""Finds a CUDA toolkit, and checks that it can compile and link before a build uses it."""

from __future__ import annotations

import glob
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

PROBE_SOURCE = """
#include <cuda_runtime.h>
__global__ void probe() {}
int probe_devices() { int n = 0; probe<<<1, 1>>>(); return cudaGetDeviceCount(&n); }
"""


@dataclass(frozen=True)
class CudaToolkit:
    """A toolkit that compiled and linked the probe kernel."""

    nvcc: str
    home: str
    version: tuple[int, int]


def find_nvcc() -> str | None:
    """Returns the first executable nvcc from FLEXKV_NVCC, CUDA_HOME, CUDA_PATH, PATH and the usual folders, in this
    order; None if there is none.
    """
    candidates: list[str | None] = [os.environ.get("FLEXKV_NVCC")]
    candidates += [
        os.path.join(os.environ[name], "bin", "nvcc")
        for name in ("CUDA_HOME", "CUDA_PATH")
        if os.environ.get(name)
    ]
    candidates += [shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc"]
    candidates += sorted(glob.glob("/usr/local/cuda-*/bin/nvcc"), reverse=True)
    candidates += [os.path.join(path, "nvidia/cu13/bin/nvcc") for path in sys.path]
    return next((c for c in candidates if c and os.access(c, os.X_OK)), None)


def probe(nvcc: str) -> CudaToolkit | str:
    """Compiles and links a probe kernel with the toolkit of `nvcc`. Returns the toolkit if this works, otherwise a text
    that says why it does not."""
    version_text = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    match = re.search(r"release (\d+)\.(\d+)", version_text)
    version = (int(match[1]), int(match[2])) if match else (0, 0)
    # nvcc may be a wrapper script or a link, so its folder need not be the toolkit's folder. A dry run of nvcc prints
    # the toolkit's folder.
    dry = subprocess.run([nvcc, "--dryrun", "-c", "x.cu"], capture_output=True, text=True).stderr
    top = re.search(r"^#\$ TOP=(.*)$", dry, re.M)
    home = os.path.realpath(top[1].strip()) if top else str(Path(os.path.realpath(nvcc)).parents[1])
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "probe.cu").write_text(PROBE_SOURCE)
        command = [nvcc, "-shared", "-Xcompiler", "-fPIC", "-cudart", "static"]
        done = subprocess.run(
            [*command, "-o", f"{folder}/probe.so", f"{folder}/probe.cu"], capture_output=True, text=True
        )
    if done.returncode != 0:
        return f"{nvcc} cannot build a one-kernel probe: {(done.stderr or done.stdout)[-400:]}"
    return CudaToolkit(nvcc, home, version)


def select_toolkit(mode: str) -> CudaToolkit | None:
    """Returns the toolkit for FLEXKV_CUDA=`mode`. `auto` uses one if it works, `1` requires one, and `0` uses none.

    Raises:
        ValueError: `mode` is none of these three values.
        RuntimeError: `mode` is `1` and no toolkit works.
    """
    if mode not in ("auto", "0", "1"):
        raise ValueError(f"FLEXKV_CUDA={mode!r}: allowed are 'auto', '1' and '0'")
    if mode == "0":
        return None
    nvcc = find_nvcc()
    found = probe(nvcc) if nvcc else "no nvcc in FLEXKV_NVCC, CUDA_HOME, CUDA_PATH, PATH or /usr/local/cuda*"
    if isinstance(found, CudaToolkit):
        return found
    if mode == "1":
        raise RuntimeError(f"FLEXKV_CUDA=1, but {found}")
    return None
