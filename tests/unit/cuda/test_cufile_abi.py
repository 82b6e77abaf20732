"""The declarations in csrc/gds/cufile_shim.h agree with the declarations in the real cufile.h, in CUDA 12 and 13."""

from __future__ import annotations

import re

import pytest

from build_support.ninja_file import ROOT
from tests.unit.cuda.toolkit import INCLUDES, compile_with_headers, require

FOLDER = ROOT / "csrc" / "gds"
TEXTS = [path.read_text() for path in sorted(FOLDER.glob("cufile*"))]

STRUCTS = {
    "CufileError": ("CUfileError_t", {"code": "err", "cuda_code": "cu_err"}),
    "CufileDescription": (
        "CUfileDescr_t",
        {"type": "type", "file.fd": "handle.fd", "file.handle": "handle.handle", "file_system_ops": "fs_ops"},
    ),
    "CufileProperties": (
        "CUfileDrvProps_t",
        {
            "nvfs.major_version": "nvfs.major_version",
            "nvfs.minor_version": "nvfs.minor_version",
            "nvfs.poll_threshold_bytes": "nvfs.poll_thresh_size",
            "nvfs.max_direct_io_bytes": "nvfs.max_direct_io_size",
            "nvfs.status_flags": "nvfs.dstatusflags",
            "nvfs.control_flags": "nvfs.dcontrolflags",
            "feature_flags": "fflags",
            "max_device_cache_kib": "max_device_cache_size",
            "per_buffer_cache_kib": "per_buffer_cache_size",
            "max_device_pinned_kib": "max_device_pinned_mem_size",
            "max_batch_entries": "max_batch_io_size",
            "max_batch_timeout_ms": "max_batch_io_timeout_msecs",
        },
    ),
}
"""For each structure of the shim: NVIDIA's name for it, and NVIDIA's name for each of its members."""

GPU_STATISTICS = {
    "uuid": "uuid",
    "read_bytes": "read_bytes",
    "reads": "n_total_reads",
    "p2p_reads": "n_p2p_reads",
    "nvfs_reads": "n_nvfs_reads",
    "posix_reads": "n_posix_reads",
    "unaligned_reads": "n_unaligned_reads",
    "rerouted_reads": "n_dr_reads",
    "sparse_regions": "n_sparse_regions",
    "inline_regions": "n_inline_regions",
    "read_errors": "n_reads_err",
    "write_bytes": "writes_bytes",
    "writes": "n_total_writes",
    "p2p_writes": "n_p2p_writes",
    "nvfs_writes": "n_nvfs_writes",
    "posix_writes": "n_posix_writes",
    "unaligned_writes": "n_unaligned_writes",
    "rerouted_writes": "n_dr_writes",
    "write_errors": "n_writes_err",
}
"""NVIDIA's names for the members of CufileGpuStatistics. They came with cuFile 1.15, so only CUDA 13's header has
them."""

ROOM = {"CufileProperties"}
"""Structures that the library fills in. The shim's structures are larger than NVIDIA's, because newer libraries write
more."""

PROLOGUE = """
#include <cufile.h>
#include "gds/cufile_shim.h"
#include "same_abi.h"
using namespace flexkv;
"""


def found_functions() -> dict[str, str]:
    """Returns for each entry of the shim's table the name of the symbol that is loaded into it."""
    loaded = [pair for text in TEXTS for pair in re.findall(r'"(cuFile\w+)",\s*table\.([\w.]+)\)', text)]
    return {field: name for name, field in loaded}


def already_open() -> int:
    """Returns the error code that csrc/gds/cufile_shim.cpp takes to mean that other code of the process has already
    opened the cuFile driver.
    """
    (number,) = re.findall(r"kDriverAlreadyOpen = (\d+);", "".join(TEXTS))
    return int(number)


def statistics_assertions() -> list[str]:
    """Returns static assertions that cuFile 1.20's statistics have the layout with which csrc/gds/cufile_statistics
    reads them."""
    ranges = re.findall(r"version >= (\d+) && version < (\d+)\) return (\d+);", "".join(TEXTS))
    (offset,) = (at for first, end, at in ranges if int(first) <= 1200 < int(end))
    mine, theirs = "CufileGpuStatistics", "CUfilePerGpuStats_t"
    return [
        f"static_assert(sizeof({mine}) == sizeof({theirs}));",
        *(
            f"static_assert(offsetof({mine}, {a}) == offsetof({theirs}, {b}) && "
            f"sizeof({mine}::{a}) == sizeof({theirs}::{b}));"
            for a, b in GPU_STATISTICS.items()
        ),
        f"static_assert(offsetof(CUfileStatsLevel3_t, per_gpu_stats) == {offset});",
        f"static_assert(sizeof(CUfileStatsLevel3_t::per_gpu_stats) == kCufileGpus * sizeof({theirs}));",
        "static_assert(sizeof(CUfileStatsLevel3_t) <= kCufileStatisticsBytes);",
    ]


def assertions(major: int) -> str:
    """Returns a program that compiles only if the shim agrees with the cufile.h of CUDA `major`. The program omits
    functions that this header does not have, because only newer libraries have them.
    """
    lines = [PROLOGUE]
    for ours, (theirs, members) in STRUCTS.items():
        relation = ">" if ours in ROOM else "=="
        lines.append(f"static_assert(sizeof({ours}) {relation} sizeof({theirs}));")
        lines += [f"CHECK_MEMBER({ours}, {mine}, {theirs}, {other});" for mine, other in members.items()]
        lines.append(f"template <> struct abi::SameStruct<{ours}, {theirs}> : std::true_type {{}};")
    lines.append("CHECK_VALUE(CufileDescription{}.type, CU_FILE_HANDLE_TYPE_OPAQUE_FD);")
    lines.append("CHECK_VALUE(CufileError{}.code, CU_FILE_SUCCESS);")
    lines.append(f"CHECK_VALUE({already_open()}, CU_FILE_DRIVER_ALREADY_OPEN);")
    header = (INCLUDES[major][-1] / "cufile.h").read_text()
    declared = set(re.findall(r"\b(cuFile\w+)\(", header)) | set(
        re.findall(r"^#define cuFile\w+ (cuFile\w+)", header, re.M)
    )
    lines += [
        f"CHECK_FUNCTION(CufileTable, {field}, {name});"
        for field, name in found_functions().items()
        if name in declared
    ]
    if major >= 13:
        lines += statistics_assertions()
    return "\n".join(lines)


@pytest.mark.parametrize("major", [12, 13])
def test_shim_agrees_with_cufile(major: int) -> None:
    require(INCLUDES[major][-1])
    program = assertions(major)
    assert program.count("CHECK_FUNCTION") >= 9
    done = compile_with_headers(program, major)
    assert done.returncode == 0, done.stderr[-5000:]


def test_every_function_of_the_table_is_compared() -> None:
    (table,) = re.findall(r"^struct CufileTable \{(.*?)^\};", "\n".join(TEXTS), re.S | re.M)
    fields = set(re.findall(r"\(\*(\w+)\)\(", table))
    assert {"driver_open", "driver_close", "read", "write"} <= fields
    assert fields <= set(found_functions())


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (
            "CHECK_MEMBER(CufileProperties, nvfs.status_flags, CUfileDrvProps_t, nvfs.dcontrolflags);",
            "elsewhere",
        ),
        ("CHECK_MEMBER(CufileError, code, CUfileDescr_t, fs_ops);", "elsewhere"),
        (
            "static_assert(offsetof(CUfileStatsLevel3_t, per_gpu_stats) == 1032);",
            "static assertion failed",
        ),
        ("CHECK_VALUE(2, CU_FILE_HANDLE_TYPE_OPAQUE_FD);", "is not CU_FILE_HANDLE_TYPE_OPAQUE_FD"),
        ("CHECK_FUNCTION(CufileTable, read, cuFileBufRegister);", "read is not cuFileBufRegister"),
    ],
)
def test_control_a_wrong_declaration_does_not_compile(wrong: str, words: str) -> None:
    require(INCLUDES[13][-1])
    done = compile_with_headers(f"{assertions(13)}\n{wrong}\n", 13)
    assert done.returncode != 0
    assert words in done.stderr
