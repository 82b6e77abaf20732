"""Helpers that fill a disk tier, close it, and flip bits in its files."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.unit.storage.disk_world import MakeDisks


def flip(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def filled(make_disks: MakeDisks, count: int = 6, **kwargs: object) -> tuple[Path, np.ndarray]:
    """Makes a unit with blocks 0 to `count` - 1, block n in disk slot n, and closes it. Returns the path of its slab,
    and the blocks' generations."""
    world = make_disks(**kwargs)
    _, generations = world.write(range(count), range(count))
    world.wait_durable(range(count), generations)
    folder = world.folder
    assert world.close()
    return folder / "group0.slab", generations
