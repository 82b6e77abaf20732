"""Runs a module of this tree as a program, and returns its exit code and output."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

from build_support.ninja_file import ROOT


def run_module(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs `python -m` with these arguments in the tree's root. `stdout` of the result contains all output, including
    stderr. The program has no time limit except that of the test. When the program or the test ends, the processes that
    the program started are killed.

    Under `make test` compilers use one core, because other tests run at the same time.
    """
    # The user's pytest options are for this test session, not for a pytest that the program runs.
    environ = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    if "PYTEST_XDIST_WORKER" in environ:
        environ.setdefault("MAX_JOBS", "1")
    command = [sys.executable, "-m", *arguments]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    with process:
        try:
            output, _ = process.communicate()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, process.returncode, output)
