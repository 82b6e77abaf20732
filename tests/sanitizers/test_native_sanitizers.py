"""Runs the C++ tests with AddressSanitizer and UndefinedBehaviorSanitizer, and with ThreadSanitizer."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from build_support.ninja_file import ROOT
from build_support.preflight import compiler
from tests.native.run import OPTIONS
from tests.programs import run_module
from tests.soak import soak_factor

RUN_S = 3600 * soak_factor()
KERNEL = Path(__file__).with_name("emulated_kernel.cpp")

CONTROLS = {
    "address": (
        "int main(int n, char**) { int* a = new int[4]; int x = a[n + 3]; delete[] a; return x & 0; }",
        "heap-",
    ),
    "undefined": (
        "int main(int n, char**) { int x = 2147483647; x += n; return x & 0; }",
        "signed integer overflow",
    ),
    "thread": (
        # The sanitizer may miss a race of two writes at the same instant. So the second write comes after the
        # first, but no synchronization orders the two.
        "#include <atomic>\n#include <thread>\nint x;\nstd::atomic<bool> written;\n"
        "int main() { std::thread t([] { x = 1; written.store(true, std::memory_order_relaxed); });\n"
        "while (!written.load(std::memory_order_relaxed)) std::this_thread::yield();\n"
        "x = 2; t.join(); return 0; }",
        "data race",
    ),
}
"""For each sanitizer, a program with an error that the sanitizer must find, and words that its report must contain."""


@pytest.mark.soak
@pytest.mark.timeout(RUN_S)
@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_native_tests_are_clean(sanitizer: str) -> None:
    done = run_module("tests.native.run", sanitizer)
    assert done.returncode == 0, done.stdout[-20_000:]
    assert "0 failed" in done.stdout


@pytest.mark.timeout(RUN_S)
def test_one_case_runs_alone() -> None:
    done = run_module("tests.native.run", "address", "--case", "runs that share bytes of the pool*")
    assert done.returncode == 0, done.stdout[-20_000:]
    assert re.search(r"test cases:\s+1 \|\s+1 passed", done.stdout), done.stdout[-20_000:]


@pytest.mark.timeout(RUN_S)
def test_a_pattern_that_fits_no_case_is_an_error() -> None:
    done = run_module("tests.native.run", "address", "--case", "no such case")
    assert done.returncode == 1
    assert "--case no such case: no test case has such a name" in done.stdout


@pytest.mark.parametrize("sanitizer", list(CONTROLS))
def test_the_sanitizer_would_have_spoken(sanitizer: str, tmp_path: Path) -> None:
    source, words = CONTROLS[sanitizer]
    (tmp_path / "control.cpp").write_text(source)
    flags = [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=undefined", "-g", "-O0", "-pthread"]
    command = [*(compiler() or "g++").split(), "-std=c++20", *flags, "-o", "control", "control.cpp"]
    subprocess.run(command, cwd=tmp_path, check=True)
    environ = {**os.environ, **OPTIONS}
    done = subprocess.run(
        ["./control"], capture_output=True, text=True, cwd=tmp_path, env=environ, timeout=60
    )
    assert done.returncode != 0
    assert words in done.stderr


@pytest.mark.parametrize(
    ("sanitizer", "define", "arguments", "words"),
    [
        ("thread", "", (), ""),
        ("thread", "-DFLEXKV_EMULATED_PLAIN_ADD", (), "data race"),
        ("address,undefined", "", (), ""),
        ("address,undefined", "", ("past the end",), "heap-buffer-overflow"),
    ],
)
def test_control_a_kernel_that_is_wrong_is_reported(
    sanitizer: str, define: str, arguments: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    """Runs an emulated kernel with a fault: two warps race because an addition is not atomic, or a read is past the end
    of the pool. Without a fault the sanitizer reports nothing.
    """
    program = tmp_path / "kernel"
    flags = [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=undefined", "-g", "-O1", "-pthread"]
    command = [*(compiler() or "g++").split(), "-std=c++20", *flags, f"-I{ROOT / 'csrc'}", *define.split()]
    subprocess.run([*command, "-o", str(program), str(KERNEL)], check=True)
    environ = {**os.environ, **OPTIONS}
    done = subprocess.run(
        [str(program), *arguments], capture_output=True, text=True, env=environ, timeout=120
    )
    assert (done.returncode != 0) == bool(words), done.stderr
    assert words in done.stderr
