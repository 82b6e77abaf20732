"""Runs Python in SGLang's environment without an engine. Its output is lines of JSON."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

from build_support.sglang_environment import FOLDER
from demo.sglang_process import ENVIRONMENT, ROOT

DEADLINE_S = 900.0
"""Importing torch and SGLang takes 15 s on two idle cores, minutes if other processes use them."""


def run_child(*arguments: str) -> list[dict[str, Any]]:
    """Runs `python ARGUMENTS` at the root of the repository. Returns the objects it printed, one per line.

    Raises:
        AssertionError: the program failed; the error has the end of its output.
    """
    environ = {**os.environ, **ENVIRONMENT}
    environ.pop("PYTHONPATH", None)
    done = subprocess.run(
        [str(FOLDER / "bin" / "python"), "-W", "ignore", *arguments],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
