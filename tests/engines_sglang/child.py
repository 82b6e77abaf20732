"""Python of SGLang's environment, run without an engine. What it says are lines of JSON."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

from build_support.sglang_environment import FOLDER
from demo.sglang_process import ENVIRONMENT, ROOT

DEADLINE_S = 900.0
"""Torch and SGLang are imported: a quarter of a minute on two idle cores, minutes where others use them."""


def run_child(*arguments: str) -> list[dict[str, Any]]:
    """Runs `python ARGUMENTS` at the root of the repository; the objects it printed, each on a line.

    Raises:
        AssertionError: it failed; with the end of what it said.
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
