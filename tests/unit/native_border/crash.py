"""Tests of code that once crashed the process. The code runs in a child process, so that a crash fails one test and
does not end the test run.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap

RUN_S = 60

PRELUDE = """
import numpy as np
from flexkv import c_ext
from flexkv.errors import *
from tests import testing_ext
def caught(function, *arguments, **named):
    try:
        function(*arguments, **named)
    except Exception as error:
        print(type(error).__name__, error)
    else:
        print("nothing was raised")
"""


def run(code: str) -> str:
    """Runs `code` in a child process. Returns its output. The code must end without a signal and without an
    exception.
    """
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(code)], capture_output=True, text=True, timeout=RUN_S
    )
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr[-2000:]}"
    return done.stdout
