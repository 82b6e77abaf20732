"""If several disks hang while a tier is closed, the close takes at most one deadline for all of them, not one deadline
per disk."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.preload import build_preload
from tests.unit.storage.disk_world import NO_HOLES

ROOT = Path(__file__).resolve().parents[2]
DISKS = 12
STUCK_S = 3.0
"""Deadline of a close, in seconds. It is longer than the delays of a busy machine. A close with a deadline per disk
would take twelve times as long, so the test notices it.
"""
CHILD_S = 120

CHILD = f"""
import os, pathlib, sys, time
from tests.unit.storage.disk_world import GENEROUS_S, NO_HOLES, DiskWorld, holes
folders = [pathlib.Path(sys.argv[1]) / f"disk{{i}}" for i in range({DISKS})]
world = DiskWorld(folders, slots=32, stuck_s={STUCK_S})
if not holes(world.folder / "group0.slab"):
    print(NO_HOLES, flush=True)
    os._exit(0)
world.write(range({DISKS}), range({DISKS}))  # a place of each disk: an idle one then clears what comes next
lane = world.unit._lane
world.until(lambda: all(lost for lost, *_ in lane.states()), "not every disk hangs")
began = time.monotonic()
world.engine.close(GENEROUS_S)
print(time.monotonic() - began, lane.files_closed, flush=True)
os._exit(0)  # its threads hang for good
"""


def test_disks_that_hang_end_together(tmp_path: Path) -> None:
    hang = build_preload("hang.cpp", tmp_path)
    environ = {**os.environ, "LD_PRELOAD": str(hang), "HANG_THREAD": "flexkv-disk"}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path)],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=CHILD_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if done.stdout.strip() == NO_HOLES:
        pytest.skip(NO_HOLES)
    closing_s, files_closed = done.stdout.split()
    assert files_closed == "False", "a file that a thread may still write to stays open"
    assert float(closing_s) < DISKS * STUCK_S / 2, "each disk had a deadline of its own"
