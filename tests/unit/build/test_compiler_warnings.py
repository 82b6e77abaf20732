"""On request, compiler warnings are errors. Turning this option on or off recompiles no file that compiled without
warnings.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from build_support.compiler_warnings import flags_for_warnings, noting_warnings
from build_support.cuda_toolkit import CudaToolkit
from build_support.ninja_file import KERNEL_FLAGS, NinjaFile, Variant
from build_support.ninja_progress import run_ninja
from build_support.preflight import compiler

NINJA = [sys.executable, "-m", "ninja"]
CLEAN = "int twice(int x) { return 2 * x; }\n"
WARNS = "int none(int x) { int unused; return 0; }\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Makes a build of two source files. The compiler warns about the second one."""
    compile_one = noting_warnings(f"{compiler() or 'g++'} -Wall -Wextra -c $in -o $out")
    (tmp_path / "build.ninja").write_text(
        f"rule cxx\n  command = {compile_one}\nbuild clean.o: cxx clean.cpp\nbuild sub/warns.o: cxx warns.cpp\n"
    )
    (tmp_path / "clean.cpp").write_text(CLEAN)
    (tmp_path / "warns.cpp").write_text(WARNS)
    return tmp_path


def build(folder: Path, werror: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXKV_WERROR", werror)
    run_ninja([*NINJA, "-C", str(folder)], "compiling", flags_for_warnings(folder))


def test_a_warning_that_passed_is_an_error_once_that_is_asked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    build(folder, "0", monkeypatch)
    assert "unused" in capfd.readouterr().out
    clean = (folder / "clean.o").stat()
    for _ in range(2):
        with pytest.raises(subprocess.CalledProcessError):
            build(folder, "1", monkeypatch)
        assert "-Werror=unused" in capfd.readouterr().out
        assert not (folder / "sub/warns.o").exists()
    assert (folder / "clean.o").stat().st_mtime_ns == clean.st_mtime_ns
    build(folder, "0", monkeypatch)
    assert (folder / "sub/warns.o").exists()


def test_what_compiled_cleanly_is_never_compiled_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    build(folder, "0", monkeypatch)
    (folder / "warns.cpp").write_text(CLEAN)
    build(folder, "1", monkeypatch)
    assert not list(folder.rglob("*.warned"))
    capfd.readouterr()
    for werror in ("0", "1", "0"):
        build(folder, werror, monkeypatch)
    assert capfd.readouterr().out == "", "nothing was to be done"


def test_no_command_of_the_native_core_depends_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = []
    for werror in ("0", "1"):
        monkeypatch.setenv("FLEXKV_WERROR", werror)
        ninja = NinjaFile(Variant(None, ""))
        ninja.add_extension("c_ext.so")
        lines.append(ninja.lines)
    assert lines[0] == lines[1]
    compiles = [line for line in lines[0] if " -c " in line or "c++-header" in line]
    assert len(compiles) == 2
    assert all("$$FATAL_CXX" in line for line in compiles)


def test_a_kernel_that_spills_is_a_warning() -> None:
    """If a CUDA kernel spills registers, the build warns. The tests in tests/unit/cuda/ show that nvcc warns about such
    a kernel with these flags.
    """
    ninja = NinjaFile(Variant(CudaToolkit("nvcc", "/nowhere", (13, 0)), ""))
    (flags,) = (line for line in ninja.lines if line.startswith("nvccflags = "))
    assert KERNEL_FLAGS in flags
    assert "-Xptxas -warn-spills" in KERNEL_FLAGS
    assert any("$nvccflags" in line and "$$FATAL_NVCC" in line for line in ninja.lines)


def test_a_third_word_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXKV_WERROR", "yes")
    with pytest.raises(ValueError, match="FLEXKV_WERROR='yes'"):
        flags_for_warnings(tmp_path)
