from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.unit.storage.disk_world import DiskWorld


@pytest.fixture
def make_disks(tmp_path: Path) -> Iterator[Callable[..., DiskWorld]]:
    """Returns a function that makes a `DiskWorld` on `disks` folders of this test. Each call opens the same folders."""
    worlds: list[DiskWorld] = []

    def make(disks: int = 1, **kwargs: object) -> DiskWorld:
        folders = [tmp_path / f"disk{i}" for i in range(disks)]
        worlds.append(DiskWorld(folders, **kwargs))  # type: ignore[arg-type]
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A separate file system of 1 MiB, so that a test can fill it."""
    mount = tmp_path / "small"
    mount.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"needs the right to mount a file system: {done.stderr.strip()}")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)
