"""The power goes at any moment: what was reported durable is there, and nothing is wrong."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.disk_child import GROUP, SLOTS
from tests.faults.preload import build_preload
from tests.faults.promises import Promises, broken_promises
from tests.faults.write_log import Disks, WriteLog, read_log
from tests.soak import soak_factor

ROOT = Path(__file__).resolve().parents[2]
IMAGES = 520
RUNS = 4
STEPS = 100
CONTROL_IMAGES = 150
CHILD_S = 240


@pytest.fixture(scope="module")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_preload("recorder.cpp", tmp_path_factory.mktemp("recorder"))


@pytest.fixture
def memory_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: what a cut leaves is made from the log, not from this disk."""
    shm = Path("/dev/shm")
    if not os.access(shm, os.W_OK):
        yield tmp_path
        return
    folder = shm / f"flexkv-test-{os.getpid()}"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


def record(recorder: Path, folder: Path, seed: int, how: str) -> WriteLog:
    """Runs a child under the recorder."""
    disk, log = folder / f"disk{seed}", folder / f"log{seed}"
    disk.mkdir()
    environ = {**os.environ, "LD_PRELOAD": str(recorder), "RECORD_DIR": str(disk), "RECORD_LOG": str(log)}
    command = [sys.executable, "-m", "tests.faults.disk_child", str(disk), str(disk / "marks")]
    done = subprocess.run(
        [*command, str(seed), str(STEPS), how],
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


def cut(log: WriteLog, folder: Path, images: int, seed: int) -> tuple[int, list[str]]:
    """Makes images and opens each; how many pages were promised in all, and what was not kept."""
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
        disk.mkdir(exist_ok=True)
        promised += len(promises.durable)
        broken += [
            f"cut at {at} of {log.length}: {what}" for what in broken_promises(promises, disk, GROUP, SLOTS)
        ]
        shutil.rmtree(disk)
    return promised, broken


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_what_was_durable_survives_and_nothing_is_wrong(recorder: Path, memory_folder: Path) -> None:
    runs = RUNS * soak_factor()
    for seed in range(runs):
        log = record(recorder, memory_folder, seed, "normal")
        assert log.marks[-1][1] == "end"
        promised, broken = cut(log, memory_folder, IMAGES // RUNS, seed)
        assert broken == [], f"seed {seed}"
        assert promised > IMAGES // RUNS


@pytest.mark.parametrize("how", ["no-sync", "index-first"])
def test_the_cut_finds_a_wrong_order(recorder: Path, memory_folder: Path, how: str) -> None:
    log = record(recorder, memory_folder, 7, how)
    _, broken = cut(log, memory_folder, CONTROL_IMAGES, 7)
    assert any("durable page" in what for what in broken)
    assert any("the index names" in what for what in broken)
