"""The kernels that nvcc compiles spill no registers to memory and access memory 16 bytes at a time. The intended number
of their thread blocks fits on a multiprocessor.
"""

from __future__ import annotations

import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from build_support.compiler_warnings import FATAL
from build_support.ninja_file import DEFAULT_CUDA_ARCHS, KERNEL_FLAGS, ROOT
from tests.unit.cuda.toolkit import NVCC, require

MOVES_NOTHING = "wait_kernel"
SOURCES = ("cuda/copy_kernel.cu", "gds/transform/launcher.cu", "rope/rotate_kernel.cu")
ARCHS = tuple(arch.removesuffix("+PTX") for arch in DEFAULT_CUDA_ARCHS.split(";"))
READ_ARCH = "90"
"""The architecture whose PTX the tests examine."""

REGISTERS = 65_536
"""Number of registers of a multiprocessor. It has not changed since compute capability 3.5."""

VECTOR_LOAD = r"\bld(?:\.global)?(?:\.nc)?\.v(?:2\.[bu]64|4\.[bfu]32)\b"
VECTOR_STORE = VECTOR_LOAD.replace("ld", "st", 1)

SPILLS = """
__global__ void __launch_bounds__(1024) spilling(float* at) {
  float held[100];
#pragma unroll
  for (int i = 0; i < 100; ++i) held[i] = at[i * 1024 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 100; ++i) at[i * 1024 + threadIdx.x] = held[i] * held[(i * 7 + 3) % 100];
}
"""
NARROW = """
__global__ void narrow(unsigned* to, const unsigned* from) { to[threadIdx.x] = from[threadIdx.x]; }
"""


@dataclass(frozen=True)
class Entry:
    """One compiled kernel.

    Attributes:
        spilled_bytes: bytes of spill loads and stores in the kernel's code.
        stack_bytes: bytes of stack per thread, for arrays and for registers that do not fit.
        registers: registers per thread.
        block_threads: the largest number of threads per block with which the kernel may be launched.
        blocks: number of blocks that must fit on a multiprocessor at the same time.
        code: the kernel's PTX.
    """

    spilled_bytes: int
    stack_bytes: int
    registers: int
    block_threads: int
    blocks: int
    code: str


def nvcc(source: Path, kind: str, arch: str, output: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """Compiles one file with the build's flags to `output`. `kind` is "ptx" or "cubin"."""
    require(NVCC)
    command = [str(NVCC), *KERNEL_FLAGS.split(), f"-I{ROOT / 'csrc'}", f"-arch=sm_{arch}", *more]
    return subprocess.run(
        [*command, f"-{kind}", "-o", str(output), str(source)], capture_output=True, text=True, timeout=240
    )


def compiled(source: Path, arch: str, folder: Path) -> dict[str, Entry]:
    """Compiles one file in nvcc's two steps, in order to keep the PTX between them. Returns its kernels by name."""
    ptx = folder / f"{source.stem}-{arch}.ptx"
    translated = nvcc(source, "ptx", arch, ptx)
    assert translated.returncode == 0, translated.stderr
    command = [str(NVCC.with_name("ptxas")), "-v", f"-arch=sm_{arch}", "-o", str(ptx.with_suffix(".cubin"))]
    assembled = subprocess.run([*command, str(ptx)], capture_output=True, text=True, timeout=240)
    assert assembled.returncode == 0, assembled.stderr
    parts = re.split(r"^(?:\.(?:weak|visible) )?\.entry ", ptx.read_text(), flags=re.M)[1:]
    codes = {re.split(r"\W", part)[0]: part for part in parts}
    entries = {}
    for part in assembled.stderr.split("Compiling entry function '")[1:]:
        kernel = part.partition("'")[0]
        entries[kernel] = Entry(
            spilled_bytes=sum(map(int, re.findall(r"(\d+) bytes spill", part))),
            stack_bytes=int(re.findall(r"(\d+) bytes stack frame", part)[0]),
            registers=int(re.findall(r"Used (\d+) registers", part)[0]),
            block_threads=_directive("maxntid", codes[kernel]),
            blocks=_directive("minnctapersm", codes[kernel]),
            code=codes[kernel],
        )
    assert set(entries) == set(codes)
    return entries


def _directive(name: str, code: str) -> int:
    """Returns the number of a PTX directive that nvcc derives from the kernel's launch bounds, or 0 if the code has
    none.
    """
    found = re.search(rf"\.{name} (\d+)", code)
    return int(found[1]) if found else 0


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, Entry]]:
    """Compiles the kernels. Returns them by name, for each pair of a file and an architecture."""
    folder = tmp_path_factory.mktemp("kernels")
    wanted = [(name, arch) for name in SOURCES for arch in ARCHS]
    with ThreadPoolExecutor(2) as pool:
        made = pool.map(lambda which: compiled(ROOT / "csrc" / which[0], which[1], folder), wanted)
        return dict(zip(wanted, made, strict=True))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", SOURCES)
def test_no_kernel_spills_and_its_blocks_fit(
    kernels: dict[tuple[str, str], dict[str, Entry]], name: str, arch: str
) -> None:
    for kernel, entry in kernels[name, arch].items():
        assert entry.spilled_bytes == 0, kernel
        assert entry.stack_bytes == 0, kernel
        assert entry.block_threads > 0, kernel
        assert entry.blocks > 0, kernel
        assert entry.registers * entry.block_threads * entry.blocks <= REGISTERS, kernel


@pytest.mark.parametrize("name", SOURCES)
def test_every_kernel_moves_sixteen_bytes_at_a_time(
    kernels: dict[tuple[str, str], dict[str, Entry]], name: str
) -> None:
    for kernel, entry in kernels[name, READ_ARCH].items():
        if MOVES_NOTHING in kernel:
            continue
        assert re.search(VECTOR_LOAD, entry.code), kernel
        only_reads = "transform_kernelILb1ELb0E" in kernel  # this kernel only digests bytes of the pool
        assert bool(re.search(VECTOR_STORE, entry.code)) != only_reads, kernel


def test_all_kernels_are_looked_at(kernels: dict[tuple[str, str], dict[str, Entry]]) -> None:
    counts = {name: len(kernels[name, READ_ARCH]) for name in SOURCES}
    assert counts == {"cuda/copy_kernel.cu": 3, "gds/transform/launcher.cu": 3, "rope/rotate_kernel.cu": 6}
    launching = {
        path.relative_to(ROOT / "csrc").as_posix()
        for path in (ROOT / "csrc").rglob("*.cu")
        if "<<<" in path.read_text()
    }
    assert launching == set(SOURCES)


def test_as_many_loads_are_in_flight_as_the_code_says(
    kernels: dict[tuple[str, str], dict[str, Entry]],
) -> None:
    """In the copy kernel and in the transform, a thread issues eight loads before it stores any of their data."""
    for name, wanted in (("cuda/copy_kernel.cu", 8), ("gds/transform/launcher.cu", 8)):
        for kernel, entry in kernels[name, READ_ARCH].items():
            if MOVES_NOTHING in kernel:
                continue
            moves = re.findall(f"({VECTOR_LOAD})|({VECTOR_STORE})", entry.code)
            runs = "".join("l" if load else "s" for load, _ in moves).split("s")
            assert max(map(len, runs)) >= wanted, kernel


def test_control_a_kernel_that_spills_is_seen_and_fails_where_warnings_are_errors(tmp_path: Path) -> None:
    source = tmp_path / "spilling.cu"
    source.write_text(SPILLS)
    (entry,) = compiled(source, READ_ARCH, tmp_path).values()
    assert entry.spilled_bytes > 0
    done = nvcc(source, "cubin", READ_ARCH, tmp_path / "x.cubin", *FATAL["FATAL_NVCC"].split())
    assert done.returncode != 0
    assert "Registers are spilled to local memory" in done.stderr


def test_control_a_kernel_of_narrow_accesses_is_seen(tmp_path: Path) -> None:
    source = tmp_path / "narrow.cu"
    source.write_text(NARROW)
    (entry,) = compiled(source, READ_ARCH, tmp_path).values()
    assert not re.search(VECTOR_LOAD, entry.code)
    assert not re.search(VECTOR_STORE, entry.code)
    assert entry.block_threads == 0
