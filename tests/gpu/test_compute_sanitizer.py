"""Runs the kernels with NVIDIA's compute-sanitizer, which finds memory errors and reads of memory that was never
written. The control programs contain such errors on purpose, and the tool must find them.

The tests ignore driver calls of libcufile that return an error: when libcufile is opened, it frees memory that it has
not allocated. They never ignore memory errors.

The tests do not run the tool racecheck, because it checks only shared memory, which no kernel of flexkv uses.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu_page import outcomes
from benchmarks.gpu_plan import LENIENT
from build_support.cuda_toolkit import find_nvcc
from tests.gpu.needs import CUDA_BUILD
from tests.gpu.sanitizer_report import findings

pytestmark = CUDA_BUILD

ROOT = Path(__file__).resolve().parents[2]
FOUND = 86
"""Exit status of compute-sanitizer if it has found errors."""
PRINTED = 10_000
"""The maximum number of errors that compute-sanitizer prints, large enough that it prints every error."""
RUN_S = 220
"""Time limit of one run in seconds. It is below the limit of a step of `benchmarks.gpu_results sanitize`."""

CHOSEN = [
    ("memcheck", "tests/gpu/test_gds_gpu.py", "every_byte and (42 or 77 or 107)"),
    ("memcheck", "tests/gpu/test_gds_lane_gpu.py", "every_byte or damage"),
    (
        "memcheck",
        "tests/gpu/test_transfer_gpu.py",
        "(every_byte and (1000 or 9001) and not 80) or (each_layer and fenced)",
    ),
    ("memcheck", "tests/gpu/test_rotation_gpu.py", "every_geometry or (turned_as and (0 or 7))"),
    ("initcheck", "tests/gpu/test_transfer_gpu.py", "every_byte and 1000 and not 80 and not 5"),
]
"""The tool, the test file and the selected tests of each run. The selected tests cover each kernel in each mode with
odd sizes. They are few, because the tools make kernels many times slower.
"""

CONTROLS = {
    "memcheck": "__global__ void bad(int* p) { p[1 << 24] = 1; }",
    "initcheck": "__global__ void bad(int* p) { p[threadIdx.x] = p[threadIdx.x + 512]; }",
}


def sanitizer() -> str:
    """Returns the path of compute-sanitizer: beside nvcc, otherwise on PATH. Skips the test if there is none."""
    nvcc = find_nvcc()
    beside = Path(nvcc).with_name("compute-sanitizer") if nvcc else None
    tool = str(beside) if beside and beside.exists() else shutil.which("compute-sanitizer")
    if not tool:
        pytest.skip("compute-sanitizer is not installed: it comes with the CUDA toolkit")
    return tool


@pytest.mark.timeout(RUN_S + 60)
@pytest.mark.parametrize(
    ("tool", "file", "chosen"), CHOSEN, ids=[f"{tool} {file}" for tool, file, _ in CHOSEN]
)
def test_kernels_are_clean(tool: str, file: str, chosen: str, tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    command = [sanitizer(), "--tool", tool, "--error-exitcode", str(FOUND), "--target-processes", "all"]
    command += ["--print-limit", str(PRINTED)]
    # torch's caching allocator would hide accesses past an allocation.
    environ = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command += [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-m",
        "gpu",
        "-p",
        "no:cacheprovider",
        *LENIENT,
        f"--junitxml={report}",
        file,
    ]
    command += ["-k", chosen]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=RUN_S)
    output = done.stdout + done.stderr
    ours = [finding.text for finding in findings(output) if not finding.is_cufiles_own]
    assert not ours, "\n\n".join(ours)[-20_000:]
    # compute-sanitizer returns FOUND also for errors that this test ignores, so FOUND does not mean a failed test.
    assert done.returncode in (0, FOUND), output[-20_000:]
    counts = outcomes(report)
    assert counts["passed"] > 0, output[-20_000:]
    assert counts["failed"] == 0, output[-20_000:]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("tool", list(CONTROLS))
def test_the_tool_would_have_spoken(tool: str, tmp_path: Path) -> None:
    program = sanitizer()
    nvcc = find_nvcc()
    if nvcc is None:
        pytest.skip("nvcc is not installed: the control is compiled with it")
    source = tmp_path / "control.cu"
    source.write_text(
        CONTROLS[tool] + "\nint main() { int* p; cudaMalloc(&p, 4096); bad<<<1, 64>>>(p);"
        " return cudaDeviceSynchronize() == cudaSuccess ? 0 : 1; }\n"
    )
    subprocess.run([nvcc, "-lineinfo", "-o", str(tmp_path / "control"), str(source)], check=True)
    command = [program, "--tool", tool, "--error-exitcode", str(FOUND), str(tmp_path / "control")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == FOUND, done.stdout + done.stderr
    found = findings(done.stdout + done.stderr)
    assert found
    assert not any(finding.is_cufiles_own for finding in found)
