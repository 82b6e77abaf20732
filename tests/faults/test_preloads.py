"""Conditions that only a preloaded library can create: a disk that needs unusual alignment, and allocations that
fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.preload import build_preload

ROOT = Path(__file__).resolve().parents[2]
CHILD_S = 120

ALIGNMENT = """
import logging, pathlib, sys
logging.basicConfig(stream=sys.stdout, format="%(message)s")
from flexkv.errors import FlexKVError
from tests.unit.storage.disk_world import DiskWorld
try:
    world = DiskWorld([pathlib.Path(folder) for folder in sys.argv[1:]])
except FlexKVError as error:
    print(f"{type(error).__name__}: {error}")
    sys.exit()
for lost in world.poll().lost:
    print("lost", lost.disk, lost.reason)
places = [place for place in range(8) if world.unit.alive[place % world.unit.disks]]
result, generations = world.write(places, places)
assert result.reason == ""
assert world.read(places, places, generations).reason == ""
print("served", world.close())
"""

NO_MEMORY = """
import ctypes, pathlib, sys
from tests.unit.storage.disk_world import DiskWorld, make_group
from tests.unit.storage.sealed_world import SealedWorld
preloaded = ctypes.CDLL(None)
group = make_group(layers=4, run_bytes=2304)  # layers share sectors, so that a range is read elsewhere first
folder = pathlib.Path(sys.argv[1])

world = DiskWorld([folder / "layers"], group)
result, generations = world.write(range(8), range(8))
assert result.reason == ""
preloaded.fail_allocations(3)
result = world.read(range(8), range(8), generations, layerwise=True)
print(preloaded.failed_allocations(), len(result.failed), result.reason)
assert world.read(range(8), range(8), generations, layerwise=True).reason == ""
assert world.unit.alive == (True,)
assert world.close()

world = SealedWorld([folder / "sealed"], group, 32)
preloaded.fail_allocations(2)
result, _ = world.write(range(8), range(8))
print(preloaded.failed_allocations(), len(result.failed), result.reason)
result, generations = world.write(range(8), range(8))
assert result.reason == ""
assert world.read(range(8), range(8), generations).reason == ""
assert world.unit.alive == (True,)
assert world.close()
"""


def run(source: str, library: Path, folders: list[Path], **environ: str) -> list[str]:
    """Runs the Python program `source` with the library preloaded. Returns the lines that it printed."""
    done = subprocess.run(
        [sys.executable, "-c", source, *map(str, folders)],
        cwd=ROOT,
        env={**os.environ, "LD_PRELOAD": str(library), **environ},
        capture_output=True,
        text=True,
        timeout=CHILD_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def alignment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_preload("alignment.cpp", tmp_path_factory.mktemp("alignment"))


@pytest.mark.parametrize(("offset", "memory"), [(512, 4), (4096, 4096), (0, 0)])
def test_a_disk_with_usual_boundaries_is_used(
    alignment: Path, tmp_path: Path, offset: int, memory: int
) -> None:
    """A disk with usual alignment is used with direct I/O. An alignment of 0 means that the file system refuses direct
    I/O, or does not report which alignment it needs."""
    said = run(
        ALIGNMENT, alignment, [tmp_path], DIO_PATH=".slab", DIO_OFFSET=str(offset), DIO_MEMORY=str(memory)
    )
    assert said == ["served True"]


@pytest.mark.parametrize(("offset", "memory"), [(8192, 512), (512, 8192), (3072, 512), (65536, 65536)])
@pytest.mark.parametrize("others", [True, False])
def test_a_disk_with_other_boundaries_is_used_through_the_page_cache(
    alignment: Path, tmp_path: Path, offset: int, memory: int, others: bool
) -> None:
    """A disk with unusual alignment is used through the page cache. This makes it slower, so a warning is logged. Other
    disks are used with direct I/O."""
    folders = [tmp_path / "odd", *([tmp_path / "usual"] if others else [])]
    said = run(
        ALIGNMENT, alignment, folders, DIO_PATH="/odd/", DIO_OFFSET=str(offset), DIO_MEMORY=str(memory)
    )
    warned, served = said
    assert "/odd/" in warned
    assert f"direct I/O needs offsets on {offset} and memory on {memory} bytes" in warned
    assert warned.endswith("pages go through the page cache")
    assert served == "served True"


def test_pages_that_find_no_memory_fail_alone(tmp_path: Path) -> None:
    library = build_preload("no_memory.cpp", tmp_path)
    layers, sealed = run(NO_MEMORY, library, [tmp_path], NO_MEMORY_THREAD="flexkv-disk")
    assert layers == "3 3 no memory to read layers"
    assert sealed == "5 2 no memory to seal a page"
