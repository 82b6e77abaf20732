"""A program that makes a unit, begins to read the pages of `prompt`, and prints the process id of the unit's helper. It
runs until it is killed.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from tests.unit.remote.faulty_helper import PLAN_VARIABLE
from tests.unit.remote.helper_faults import begin_fetch, use_faulty_helpers
from tests.unit.remote.remote_unit import RemoteUnit, chain


def main(url: str) -> None:
    use_faulty_helpers(Path(os.environ[PLAN_VARIABLE]).parent, pytest.MonkeyPatch())
    unit = RemoteUnit(url)
    begin_fetch(unit, chain("prompt", 20))
    print(unit.helper_pid, flush=True)
    while True:
        unit.unit.poll()
        time.sleep(0.001)


if __name__ == "__main__":
    main(sys.argv[1])
