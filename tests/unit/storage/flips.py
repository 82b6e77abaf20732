"""Folders of a disk tier with one bit of one file flipped, opened again and again as the product opens them."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flexkv.storage.base import DiskOptions
from flexkv.storage.folder import unit_folder
from flexkv.storage.header import codec_of
from flexkv.storage.tags import make_tags
from flexkv.storage.unit import DiskUnit
from tests.unit.storage.disk_world import BLOCK_TOKENS, GENEROUS_S, IDENTITY, DiskWorld, make_group

GROUP = make_group(layers=1, run_bytes=4096, kv=1)
IMAGE_BYTES = codec_of(GROUP).image_bytes
SLOTS = 200
PAGES = 90
"""Their rows fill a chunk of the index and begin another."""
EVICTED = (7, 85)
"""Blocks that the index has let go of; their pages may come back where a damaged index is made anew."""
KEPT = set(range(PAGES)) - set(EVICTED)


def make_folder(root: Path, epoch: int = 0) -> DiskWorld:
    """A tier on `root`, open, with block n at place n, in several commits, and some of them evicted."""
    world = DiskWorld([root], GROUP, SLOTS, host_slots=2 * PAGES, preallocate=False)
    if epoch:
        world.unit.reset(epoch)
    for first in range(0, PAGES, 30):
        numbers = range(first, first + 30)
        _, generations = world.write(numbers, numbers)
        world.wait_durable(numbers, generations)
        gone = [number for number in EVICTED if number in numbers]
        world.unit.record_evict(0, np.array(gone, np.int32), generations[np.array(gone, np.int64) - first])
    world.write([0], [0], generations=world.unit.next_generations(1))  # a commit after the last eviction
    world.until(lambda: not world.unit.stats().journal_lag_s, "the last page did not become durable")
    return world


@dataclass
class Copies:
    """Copies of a folder, each damaged in its own way, one at a time."""

    original: Path
    work: Path

    def fresh(self, slab: bool = False) -> Path:
        """The unit's folder of a copy as good as the original. `slab`: also its slab, which is large."""
        original, folder = (unit_folder(root, IDENTITY, [GROUP]) for root in (self.original, self.work))
        folder.mkdir(parents=True, exist_ok=True)
        there = {path.name for path in folder.iterdir()}
        wanted = {path.name for path in original.iterdir()}
        for name in there - wanted:
            (folder / name).unlink()
        for name in wanted:
            if slab or not (name.endswith(".slab") and name in there):
                shutil.copyfile(original / name, folder / name)
        return folder


def flip_bit(path: Path, offset: int, bit: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ (1 << bit)]))


def one_bit_each(offsets: Iterator[int], seed: int) -> Iterator[tuple[int, int]]:
    """Each offset with one bit of its byte, always the same of one seed."""
    drawn = random.Random(seed)
    return ((offset, drawn.randrange(8)) for offset in offsets)


def served(root: Path, payload: Callable[[int, int], np.ndarray]) -> set[int]:
    """The blocks that an engine is served that opens `root`; it then makes a page durable, and closes.

    Raises:
        AssertionError: a page has other bytes than its block, or the disk is of no use.
    """
    unit = DiskUnit.open([root], IDENTITY, [GROUP], DiskOptions(SLOTS * IMAGE_BYTES, preallocate=False))
    try:
        rows = unit.rows(0)
        tags = make_tags(rows.keys, unit.epoch, rows.generations, rows.tokens)
        slab = unit.slab_map().disks[0][0]
        content = np.asarray(np.memmap(slab.path, np.uint8, "r"))
        codec, found = codec_of(GROUP), set()
        for key, place, tag in zip(rows.keys, rows.places.tolist(), tags, strict=True):
            number = int.from_bytes(key.tobytes(), "big")
            image = content[slab.header_bytes + place * slab.slot_bytes :][: slab.slot_bytes]
            miss, reason = codec.check(image.data, slab.slab_id, place, tag.tobytes(), 0)
            if miss == "none":
                assert (image[:4096] == payload(number, unit.epoch)[:4096]).all(), f"wrong bytes: {number}"
                found.add(number)
            else:
                assert reason, f"block {number} is a miss without a reason"
        again = rows.places == 0
        count = int(np.count_nonzero(again))
        tokens = np.full(count, BLOCK_TOKENS, np.int32)
        unit.record_publish(0, rows.keys[again], rows.places[again], rows.generations[again], tokens)
        assert unit.alive == (True,)
    finally:
        closed = unit.close(GENEROUS_S)
    assert closed, "what was recorded is not durable"
    return found
