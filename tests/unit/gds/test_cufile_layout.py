"""Our declarations of cuFile beside the header that its wheel brings, member by member, as a compiler sees them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from build_support.ninja_file import ROOT

SAME = """
#include "cufile.h"
#include <cstddef>
#include "gds/cufile_library.h"
#include "gds/cufile_shim.h"
using namespace flexkv;
#define SAME(mine, theirs) static_assert((mine) == (theirs), #theirs)
SAME(sizeof(CufileError), sizeof(CUfileError_t));
SAME(sizeof(CufileDescription), sizeof(CUfileDescr_t));
SAME(offsetof(CufileDescription, file), offsetof(CUfileDescr_t, handle));
SAME(offsetof(CufileDescription, file_system_ops), offsetof(CUfileDescr_t, fs_ops));
SAME(offsetof(CufileProperties, nvfs.status_flags), offsetof(CUfileDrvProps_t, nvfs.dstatusflags));
SAME(offsetof(CufileProperties, nvfs.control_flags), offsetof(CUfileDrvProps_t, nvfs.dcontrolflags));
SAME(offsetof(CufileProperties, feature_flags), offsetof(CUfileDrvProps_t, fflags));
SAME(offsetof(CufileProperties, max_batch_timeout_ms), offsetof(CUfileDrvProps_t, max_batch_io_timeout_msecs));
static_assert(sizeof(CufileProperties) >= sizeof(CUfileDrvProps_t));
#ifdef CUFILE_GPU_UUID_LEN
using Gpu = CUfilePerGpuStats_t;
SAME(sizeof(CufileGpuStatistics), sizeof(Gpu));
SAME(offsetof(CufileGpuStatistics, p2p_reads), offsetof(Gpu, n_p2p_reads));
SAME(offsetof(CufileGpuStatistics, nvfs_reads), offsetof(Gpu, n_nvfs_reads));
SAME(offsetof(CufileGpuStatistics, posix_reads), offsetof(Gpu, n_posix_reads));
SAME(offsetof(CufileGpuStatistics, rerouted_reads), offsetof(Gpu, n_dr_reads));
SAME(offsetof(CufileGpuStatistics, p2p_writes), offsetof(Gpu, n_p2p_writes));
SAME(offsetof(CufileGpuStatistics, nvfs_writes), offsetof(Gpu, n_nvfs_writes));
SAME(offsetof(CufileGpuStatistics, posix_writes), offsetof(Gpu, n_posix_writes));
SAME(offsetof(CufileGpuStatistics, rerouted_writes), offsetof(Gpu, n_dr_writes));
static_assert(sizeof(CUfileStatsLevel3_t) <= kCufileStatisticsBytes);
SAME(kCufileGpus, sizeof(CUfileStatsLevel3_t::per_gpu_stats) / sizeof(Gpu));
SAME(OFFSET, offsetof(CUfileStatsLevel3_t, per_gpu_stats));
#endif
"""

OFFSETS = """
#include "gds/cufile_statistics.h"
#include <cstdio>
int main() {
  for (int version = 1000; version < 1300; version += 10) {
    const auto offset = flexkv::cufile_statistics_offset(version);
    if (offset) std::printf("1.%d %zu\\n", version % 1000 / 10, *offset);
  }
}
"""


def test_the_header_of_the_wheel_declares_the_same(tmp_path: Path) -> None:
    headers = [path for folder in sys.path for path in Path(folder).glob("nvidia/*/include/cufile.h")]
    if not headers:
        pytest.skip("the wheel nvidia-cufile is not installed")
    # Its only needs of CUDA's header.
    (tmp_path / "cuda.h").write_text("typedef int CUresult; typedef void* CUstream;\n")
    program = tmp_path / "offsets"
    compiler = ["g++", "-std=c++20", "-Icsrc", "-x", "c++", "-"]
    command = [*compiler, "-x", "none", "-o", str(program)]
    subprocess.run(
        [*command, "-x", "c++", "csrc/gds/cufile_statistics.cpp"],
        input=OFFSETS,
        text=True,
        cwd=ROOT,
        check=True,
        timeout=120,
    )
    offsets = dict(line.split() for line in subprocess.check_output([program], text=True).splitlines())
    for header in headers:
        [info] = header.parents[3].glob("nvidia_cufile*.dist-info")
        version = ".".join(info.name.split("-")[1].split(".")[:2])
        offset = offsets.get(version, "0")
        command = [*compiler, "-fsyntax-only", f"-I{tmp_path}", f"-I{header.parent}", f"-DOFFSET={offset}"]
        done = subprocess.run(
            command, input=SAME, text=True, cwd=ROOT, check=False, timeout=120, capture_output=True
        )
        assert done.returncode == 0, f"{header} of {version}: {done.stderr}"
