"""The sanitizer run fails if compute-sanitizer reports a memory error. It does not fail because of API errors of
libcufile."""

from __future__ import annotations

import pytest

from tests.gpu.sanitizer_report import findings

CUFILE = """\
========= COMPUTE-SANITIZER
1 passed in 3.2s
========= Program hit CUDA_ERROR_INVALID_VALUE (error 1) due to "invalid argument" on CUDA API call to cuMemFree_v2.
=========     Saved host backtrace up to driver entry point at error
=========         Host Frame: cuMemFree_v2 [0x4b2c1e] in libcuda.so.1
=========         Host Frame: [0x7b1e0] in libcufile.so.0
=========         Host Frame: cuFileDriverOpen [0x3de10] in libcufile.so.0
=========         Host Frame: flexkv::gds::open() [0x1234] in c_ext.cpython-312-x86_64-linux-gnu.so
=========
========= ERROR SUMMARY: 1 error
"""
OURS = CUFILE.replace("libcufile.so.0", "c_ext.cpython-312-x86_64-linux-gnu.so")
TWO_LINES = CUFILE.replace(" in lib", "\n=========                in /usr/local/cuda/lib64/lib")
MEMORY = """\
========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at bad(int *)+0x70
=========     by thread (0,0,0) in block (0,0,0)
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: [0x7b1e0] in libcufile.so.0
=========
========= ERROR SUMMARY: 1 error
"""


@pytest.mark.parametrize(
    ("output", "cufiles_own"), [(CUFILE, True), (TWO_LINES, True), (OURS, False), (MEMORY, False)]
)
def test_an_error_is_cufiles_own_by_the_frame_that_called_the_driver(output: str, cufiles_own: bool) -> None:
    (found,) = findings(output)
    assert found.is_cufiles_own is cufiles_own


def test_an_api_error_without_a_backtrace_is_ours() -> None:
    (found,) = findings("\n".join(line for line in CUFILE.splitlines() if "Host Frame" not in line))
    assert not found.is_cufiles_own


def test_a_clean_run_has_no_finding() -> None:
    assert findings("========= COMPUTE-SANITIZER\n1 passed\n========= ERROR SUMMARY: 0 errors\n") == []


def test_a_heading_of_pytests_is_no_finding() -> None:
    failed = f"{'=' * 35} FAILURES {'=' * 35}"
    printed = f"========= COMPUTE-SANITIZER\n{failed}\n========= Target application returned an error\n"
    assert findings(f"{printed}========= ERROR SUMMARY: 0 errors\n") == []


@pytest.mark.parametrize("output", ["1 passed", CUFILE.replace("1 error\n", "2 errors\n")])
def test_a_report_that_is_not_whole_is_no_clean_run(output: str) -> None:
    with pytest.raises(ValueError, match="compute-sanitizer"):
        findings(output)
