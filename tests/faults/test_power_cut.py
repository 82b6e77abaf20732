"""After power cuts at random moments, all pages that were reported durable are there, and no page is wrong."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flexkv import c_ext
from tests.faults.disk_child import SLOTS, WAYS
from tests.faults.preload import build_preload
from tests.faults.promises import Promises, broken_promises
from tests.faults.write_log import Disks, WriteLog, read_log
from tests.soak import soak_rounds

ROOT = Path(__file__).resolve().parents[2]
IMAGES = 65
"""Number of disk images per run. All runs of all variants together make 650 images, and 13,000 with `make soak`."""
RUNS = 2
STEPS = 100
CONTROL_IMAGES = 150
CONTROL_RUNS = 8
CHILD_S = 240

VARIANTS = [("threads", 1), ("io_uring", 1), ("io_uring", 3), ("sealed", 3)]
"""For each variant, its `way`, which is a name in `WAYS`, and the number of disks over which the slots are striped."""
variants = pytest.mark.parametrize(("way", "disks"), VARIANTS, ids=lambda value: str(value))


@pytest.fixture(autouse=True)
def uring_is_there(way: str) -> None:
    if "io_uring" in way and (refusal := c_ext.uring_refusal()):
        pytest.skip(f"io_uring is refused here: {refusal}")


@pytest.fixture(scope="module")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_preload("recorder.cpp", tmp_path_factory.mktemp("recorder"))


@pytest.fixture
def memory_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder, in memory if possible. It need not be on a disk, because the tests compute the disks' state after a
    power cut from the log."""
    shm = Path("/dev/shm")
    if not os.access(shm, os.W_OK):
        yield tmp_path
        return
    folder = shm / f"power-cut-{os.getpid()}"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


def make_folders(folder: Path, disks: int) -> None:
    """Creates a folder for a tier that is striped over `disks` disks."""
    folder.mkdir(exist_ok=True)
    for number in range(disks if disks > 1 else 0):
        (folder / f"disk{number}").mkdir(exist_ok=True)


def record(recorder: Path, folder: Path, seed: int, way: str, disks: int, how: str) -> WriteLog:
    """Runs a process of `disk_child` with the recorder preloaded, and returns the log."""
    disk, log = folder / f"used{seed}", folder / f"log{seed}"
    make_folders(disk, disks)
    environ = {**os.environ, "LD_PRELOAD": str(recorder), "RECORD_DIR": str(disk), "RECORD_LOG": str(log)}
    command = [sys.executable, "-m", "tests.faults.disk_child", str(disk), str(disk / "marks")]
    done = subprocess.run(
        [*command, str(seed), str(STEPS), way, how],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=CHILD_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    read = read_log(log, disk)
    shutil.rmtree(disk)
    log.unlink()
    return read


def cut(log: WriteLog, folder: Path, images: int, seed: int, way: str, striped: int) -> tuple[int, list[str]]:
    """Makes images of the disks for power cuts at random positions of the log, and opens each image. Returns how many
    pages were promised in all images together, and the broken promises.
    """
    rng = random.Random(seed)
    disks, promises = Disks(log, rng), Promises()
    marks = iter([*log.marks, (1 << 62, "end")])
    position, mark = next(marks)
    promised, broken = 0, []
    for number, at in enumerate(sorted(rng.randint(1, log.length) for _ in range(images))):
        while position <= at:
            promises.take([mark])
            position, mark = next(marks)
        disk = folder / f"image{number}"
        for name, content in disks.image(at).items():
            (disk / name).parent.mkdir(parents=True, exist_ok=True)
            (disk / name).write_bytes(content)
        make_folders(disk, striped)
        promised += len(promises.durable)
        broken += [
            f"cut at {at} of {log.length}: {what}"
            for what in broken_promises(promises, disk, WAYS[way].groups, SLOTS)
        ]
        shutil.rmtree(disk)
    return promised, broken


@soak_rounds(RUNS)
@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("way", "disks"), [*VARIANTS, ("groups", 1)], ids=lambda value: str(value))
def test_what_was_durable_survives_and_nothing_is_wrong(
    recorder: Path, memory_folder: Path, way: str, disks: int, soak_round: int
) -> None:
    log = record(recorder, memory_folder, soak_round, way, disks, "normal")
    assert log.marks[-1][1] == "end"
    promised, broken = cut(log, memory_folder, IMAGES, soak_round, way, disks)
    assert broken == []
    assert promised > IMAGES / 2, "too little was durable at the cuts to show anything"


@variants
@pytest.mark.parametrize("how", ["no-sync", "index-first"])
def test_the_cut_finds_a_wrong_order(
    recorder: Path, memory_folder: Path, way: str, disks: int, how: str
) -> None:
    broken: list[str] = []
    signs = ("durable page", "the index names")
    # Only a cut between two particular syncs shows the fault. A single run may have no such moment.
    for seed in range(CONTROL_RUNS):
        log = record(recorder, memory_folder, seed, way, disks, how)
        broken += cut(log, memory_folder, CONTROL_IMAGES, seed, way, disks)[1]
        if all(any(sign in what for what in broken) for sign in signs):
            return
    pytest.fail(f"{CONTROL_RUNS * CONTROL_IMAGES} cuts did not show both {signs}: {broken}")
