"""Builds the C++ tests and runs them: `python -m tests.native.run [SANITIZER] [--case PATTERN]`.

Without SANITIZER, this program builds the variant that FLEXKV_CUDA and FLEXKV_SANITIZE select. PATTERN has doctest's
syntax: `*` matches any text, and commas separate patterns.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from argparse import ArgumentParser
from pathlib import Path

from build_support.console import fail
from build_support.native_tests import build
from build_support.ninja_file import SANITIZERS, Variant

OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "exitcode=66 halt_on_error=1",
}


def count_cases(program: Path, pattern: str) -> int:
    """Counts the test cases whose names match `pattern`."""
    command = [str(program), "--count", f"--test-case={pattern}"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"passing the current filters: (\d+)", said)
    assert found is not None, said
    return int(found[1])


def main() -> None:
    parser = ArgumentParser(description="Builds the C++ tests and runs them.")
    parser.add_argument("sanitizer", nargs="?", choices=[name for name in SANITIZERS if name])
    parser.add_argument("--case", metavar="PATTERN", help="only test cases with such a name, as '*staging*'")
    asked = parser.parse_args()
    program = build(Variant(None, asked.sanitizer) if asked.sanitizer else Variant.from_environment())
    command = [str(program)]
    if asked.case is not None:
        # If no case matches, doctest runs nothing and reports success.
        if count_cases(program, asked.case) == 0:
            fail(
                f"--case {asked.case}: no test case has such a name ({program} --list-test-cases lists them)"
            )
        command.append(f"--test-case={asked.case}")
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, cwd=folder, env={**os.environ, **OPTIONS})
    raise SystemExit(done.returncode)


if __name__ == "__main__":
    main()
