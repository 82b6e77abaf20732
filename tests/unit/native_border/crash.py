"""Runs code that once crashed the process in a child, so that a crash is one failed test and not the end of all
tests.
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
    """The output of `code`, which must end by itself, without a signal and without an exception."""
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(code)], capture_output=True, text=True, timeout=RUN_S
    )
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr[-2000:]}"
    return done.stdout
