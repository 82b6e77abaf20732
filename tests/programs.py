"""Runs `python -m MODULE` of this tree, and returns its exit code and output."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

from build_support.ninja_file import ROOT


def run_module(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs `python -m` with these arguments from the root; `stdout` has all that it printed. The test's own time limit
    applies, and also ends the processes that the program has started.

    Under `make test` compilers use one core, because another worker has the other.
    """
    # The user's pytest options apply to the session that runs this test, not to a session inside it.
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
