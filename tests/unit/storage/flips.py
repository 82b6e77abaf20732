"""Makes copies of a disk tier's folder, each with one flipped bit in one file. Opens each copy as the product does."""

from __future__ import annotations

import functools
import random
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from flexkv.storage.base import DiskOptions
from flexkv.storage.folder import unit_folder
from flexkv.storage.generations import opens_of, read_opens
from flexkv.storage.group_tables import codec_of
from flexkv.storage.spare import SPARE_NAME
from flexkv.storage.striped_slabs import StripedSlabs
from flexkv.storage.tags import make_tags
from tests.unit.storage.disk_world import BLOCK_TOKENS, GENEROUS_S, IDENTITY, DiskWorld, make_group

RUN_BYTES = 4096
GROUP = make_group(layers=1, run_bytes=RUN_BYTES, kv=1)
IMAGE_BYTES = codec_of(GROUP).image_bytes
SLOTS = 200
PAGES = 90
"""Number of pages in the folder. The index keeps its rows in chunks: these pages fill one chunk and begin a second one.
"""
EVICTED = (7, 85)
"""Blocks that were evicted. Their pages may come back if flexkv rebuilds a damaged index."""
KEPT = set(range(PAGES)) - set(EVICTED)


def make_folder(root: Path, epoch: int = 0) -> DiskWorld:
    """Returns an open tier on `root`. Its pages were published in several commits, block n in disk slot n. The blocks
    EVICTED have been evicted."""
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


class Copies:
    """Makes copies of a disk tier's folder, one at a time. A test damages each copy in a different way.

    Args:
        original: a root that `make_folder` has filled.
        work: root of the copies.
        world: the world that `make_folder` returned for `original`.
    """

    def __init__(self, original: Path, work: Path, world: DiskWorld) -> None:
        self._original = unit_folder(original, IDENTITY, [GROUP])
        self._work = work
        self._opens = read_opens(self._original) or 0
        self._bytes = functools.cache(lambda number, epoch: world.payload(number, epoch)[:RUN_BYTES])

    @property
    def folder(self) -> Path:
        """The unit's folder in the current copy."""
        return unit_folder(self._work, IDENTITY, [GROUP])

    def fresh(self, slab: bool = False) -> Path:
        """Restores the unit's folder in the copy, and returns its path. Restores the slab only if it is missing or if
        `slab` is True, because the slab is large."""
        folder = self.folder
        folder.mkdir(parents=True, exist_ok=True)
        there = {path.name for path in folder.iterdir()}
        wanted = {path.name for path in self._original.iterdir()} - {SPARE_NAME}
        for name in there - wanted:
            (folder / name).unlink()
        for name in wanted:
            if slab or not (name.endswith(".slab") and name in there):
                shutil.copyfile(self._original / name, folder / name)
        return folder

    def served(self) -> set[int]:
        """Opens the copy as a unit does, and returns the blocks whose pages the unit would serve. If the unit has block
        0, publishes it again. Closing the unit makes this record durable.

        Raises:
            AssertionError: a page does not have its block's bytes, a generation was given twice, or the disk was taken
                out of service.
        """
        unit = StripedSlabs.open(
            [self._work], IDENTITY, [GROUP], DiskOptions(SLOTS * IMAGE_BYTES, preallocate=False)
        )
        try:
            assert opens_of(unit.next_generations(1)) > self._opens, "a generation is given twice"
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
                    right = (image[:RUN_BYTES] == self._bytes(number, unit.epoch)).all()
                    assert right, f"wrong bytes: {number}"
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

    def check_twice(self, what: str) -> None:
        """Checks that two units, started one after the other, serve every page that was not evicted."""
        for opened in ("first", "second"):
            try:
                found = self.served()
            except Exception as error:
                raise AssertionError(
                    f"{what}, opened the {opened} time: {type(error).__name__}: {error}"
                ) from error
            assert found >= KEPT, f"{what}, opened the {opened} time: {sorted(KEPT - found)} are not served"

    def flips(
        self, name: str, offsets: Callable[[int], Iterable[int]], seed: int, bits: int = 1
    ) -> Iterator[str]:
        """Flips bits of the file `name`, one at a time, each in a fresh copy. Yields a description of each flip.

        Args:
            offsets: a function that gets the file's size and returns the offsets of the bytes in which bits are
                flipped.
            seed: seed of the random choice of bits.
            bits: number of bits to flip per byte.
        """
        for offset, bit in drawn_bits(offsets((self._original / name).stat().st_size), seed, bits):
            flip_bit(self.fresh() / name, offset, bit)
            yield f"bit {bit} of byte {offset} of {name}"


def drawn_bits(offsets: Iterable[int], seed: int, bits: int = 1) -> Iterator[tuple[int, int]]:
    """Yields (offset, bit) pairs: `bits` random bits of each byte. The same seed always gives the same bits."""
    drawn = random.Random(seed)
    for offset in offsets:
        for bit in drawn.sample(range(8), bits):
            yield offset, bit


def flip_bit(path: Path, offset: int, bit: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ (1 << bit)]))
