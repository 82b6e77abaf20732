"""Runs a Python program of this tree, which says how it ended."""

from __future__ import annotations

import os
import subprocess
import sys

from build_support.ninja_file import ROOT


def run_module(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs `python -m` with these arguments from the root; `stdout` has all that it said. The test's limit bounds it.

    What it compiles takes one core: with `make test` another worker has the other.
    """
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env={"MAX_JOBS": "1" if "PYTEST_XDIST_WORKER" in os.environ else "", **os.environ},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
