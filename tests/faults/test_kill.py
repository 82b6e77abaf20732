"""Processes that use a disk tier are killed one after the other. Each new process serves all durable pages, and no
wrong page.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path

import pytest

from flexkv.storage.folder import unit_folders
from flexkv.storage.fsck import check_folder
from tests.faults.disk_child import SLOTS, WAYS, disks_of
from tests.faults.promises import Promises, broken_promises
from tests.soak import soak_rounds

ROOT = Path(__file__).resolve().parents[2]
KILLS = 100
USES = ((1, "any"), (3, "any"), (1, "any groups"))
"""For each folder, the number of its disks, and its `way`: a name in `WAYS`. The test uses the folders at the same
time. KILLS is the number of kills in all of them together.
"""
FOLDERS = len(USES)
CHECK_EVERY = 4
"""Number of processes between two full checks by the test. Between these checks, each process only opens the folder
that the previous, killed process has left.
"""
LIFE_S = 120.0


class Lives:
    """Runs processes that use one folder, one after the other, and kills each with SIGKILL."""

    def __init__(self, folder: Path, disks: int, way: str) -> None:
        self.way = way
        self.said = folder / "said"
        self.disk = folder / "disk"
        self.disk.mkdir()
        for number in range(disks if disks > 1 else 0):
            (self.disk / f"disk{number}").mkdir()
        self.errors = folder / "errors"
        self.said.touch()
        with open(self.errors, "wb") as errors:
            self.server = subprocess.Popen(
                [sys.executable, "-m", "tests.faults.disk_child", "serve"],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def lines(self) -> list[str]:
        """Returns the complete marks so far. Leaves out a last line that a kill cut off."""
        text = self.said.read_text()
        return text[: text.rfind("\n") + 1].splitlines()

    def live(self, seed: int, marks: int, then_s: float) -> list[str]:
        """Starts a process, and kills it `then_s` seconds after it has made `marks` marks. Returns all its marks."""
        before = self.lines()
        self.said.write_text("".join(f"{line}\n" for line in before))
        server = self.server
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(f"{self.disk} {self.said} {seed} {self.way}\n")
        server.stdin.flush()
        # a pidfd, because the process id could be reused
        process = os.pidfd_open(int(server.stdout.readline()))
        deadline = time.monotonic() + LIFE_S
        ended: list[int] = []
        while len(self.lines()) < len(before) + marks and not ended and time.monotonic() < deadline:
            ended, _, _ = select.select([process], [], [], 0.002)
        time.sleep(0 if ended else then_s)
        # in this case, the process has ended by itself, which the assertion below reports
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, signal.SIGKILL)
        os.close(process)
        assert int(server.stdout.readline()) == -signal.SIGKILL, self.errors.read_text()
        lines = self.lines()
        assert len(lines) >= len(before) + marks, "the process says nothing"
        return lines[len(before) :]

    def close(self) -> None:
        assert self.server.stdin is not None
        self.server.stdin.close()
        self.server.wait(LIFE_S)


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[list[Lives]]:
    with contextlib.ExitStack() as stack:
        made = []
        for number, (disks, way) in enumerate(USES):
            folder = tmp_path / str(number)
            folder.mkdir()
            made.append(Lives(folder, disks, way))
            stack.callback(made[-1].close)
        yield made


def kill_over_and_over(lives: Lives, kills: int, first_seed: int) -> int:
    """Kills processes one after the other, and checks at intervals that all promises are kept. Returns how many pages
    had been reported durable, summed over the checks.
    """
    rng = random.Random(first_seed)
    served = 0
    promises = Promises()
    for life in range(kills):
        promises.take(lives.live(first_seed + life, 1 + rng.randrange(60), rng.random() * 0.03))
        if life % CHECK_EVERY == 0:
            served += len(promises.durable)
            broken = broken_promises(promises, lives.disk, WAYS[lives.way].groups, SLOTS)
            assert broken == [], f"seed {first_seed + life}"
    assert broken_promises(promises, lives.disk, WAYS[lives.way].groups, SLOTS) == []
    return served


@soak_rounds()
@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_what_was_durable_is_served_after_every_kill(folders: list[Lives], soak_round: int) -> None:
    kills = KILLS // FOLDERS
    first = soak_round * KILLS
    # The folders are used at the same time, because the processes mostly wait for the disk.
    with ThreadPoolExecutor(FOLDERS) as pool:
        served = list(
            pool.map(kill_over_and_over, folders, repeat(kills), (first + n * kills for n in range(FOLDERS)))
        )
    assert sum(served) > KILLS // CHECK_EVERY
    for lives in folders:
        # The folder uses no more disk space than configured: it has one slab of the configured size, and no unknown
        # file.
        for disk in disks_of(lives.disk):
            (unit,) = unit_folders(disk)
            files = {"lock", "group0.slab", "group0.header", "index.sqlite", "epoch", "opens", "spare"}
            assert {path.name for path in unit.iterdir()} <= files
            assert check_folder(unit).slabs[0].slots == SLOTS
