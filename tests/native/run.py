"""Builds the C++ tests and runs them: `python -m tests.native.run [SANITIZER]`; without one, of the usual variant."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

from build_support.native_tests import build
from build_support.ninja_file import Variant

OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "exitcode=66 halt_on_error=1",
}


def main() -> None:
    variant = Variant(None, sys.argv[1]) if sys.argv[1:] else Variant.from_environment()
    program = build(variant)
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([program], cwd=folder, env={**os.environ, **OPTIONS})
    raise SystemExit(done.returncode)


if __name__ == "__main__":
    main()
