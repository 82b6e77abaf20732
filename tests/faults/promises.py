"""Derives the promises of a `disk_child` process from its marks, and checks that a disk tier which opens the same
folder keeps them. For example, a page that was reported durable must be served.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from flexkv.storage.base import DiskGroup
from flexkv.storage.tags import make_tags
from flexkv.transfer.graph import OpKind
from tests.faults.disk_child import disks_of, pages_of
from tests.unit.storage.disk_world import BLOCK_TOKENS, DiskWorld, keys_of


class Promises:
    """The promises that the marks contain so far. A place is a disk slot.

    Attributes:
        written: place -> (generation, number, group) of the last write to the place that began.
        pages: generation -> (number, group) of every page that was written.
        durable: place -> (generation, number, group) of each page that was reported durable and not evicted since.
        epoch: the epoch that the last finished reset began.
        newest: the highest generation that was written.
    """

    def __init__(self, marks: Iterable[str] = ()) -> None:
        self.written: dict[int, tuple[int, int, int]] = {}
        self.pages: dict[int, tuple[int, int]] = {}
        self.durable: dict[int, tuple[int, int, int]] = {}
        self.epoch = 0
        self.newest = 0
        self._evicted: set[int] = set()
        self._reset_at = 0
        self.take(marks)

    def take(self, marks: Iterable[str]) -> None:
        for mark in marks:
            word, *numbers = mark.split()
            values = [int(number) for number in numbers]
            if word == "write":
                place, generation, number, of = values
                self.written[place] = (generation, number, of)
                self.pages[generation] = (number, of)
                self.newest = max(self.newest, generation)
            elif word == "durable":
                place, generation = values
                # The journal may report a page as durable after the page was evicted, or after a reset. Such a report
                # promises nothing.
                if generation > self._reset_at and generation not in self._evicted:
                    self.durable[place] = (generation, *self.pages[generation])
            elif word == "evict":
                self.durable.pop(values[0], None)
                self._evicted.add(values[1])
            elif word == "resetting":
                self.durable.clear()
                self._reset_at = self.newest
            elif word == "reset":
                self.epoch = values[0]


def is_served(world: DiskWorld, place: int, page: tuple[int, int, int], of: int) -> bool:
    """Whether the tier would serve the page as a page of group `of`. Does not check the page's bytes."""
    generation, number, _ = page
    tags = make_tags(keys_of([number]), world.unit.epoch, np.array([generation], np.uint64), BLOCK_TOKENS)
    return not len(world.run(OpKind.DISK_READ, [0], [place], tags, of=of).failed)


def broken_promises(promises: Promises, folder: Path, groups: Sequence[DiskGroup], slots: int) -> list[str]:
    """Opens `folder` as the product does, and reads every page as a page of its own group. Returns a description of
    each broken promise. Raises an error if the bytes of a page are wrong.
    """
    world = DiskWorld(
        disks_of(folder),
        groups[0],
        slots,
        host_slots=16,
        io="threads",
        depth=4,
        preallocate=False,
        more=groups[1:],
    )
    try:
        broken = []
        unit = world.unit
        rows = unit.rows(0)
        if unit.epoch < promises.epoch:
            broken.append(f"epoch {unit.epoch} after a reset to {promises.epoch}")
        if int(unit.next_generations(1)[0]) <= promises.newest:
            broken.append("a generation would be given twice")
        failed = world.read_rows(rows)
        at = pages_of(rows)
        broken += [
            f"page {page} at place {place} is another group's too"
            for place, page in at.items()
            for other in range(len(groups))
            if other != page[2] and is_served(world, place, page, other)
        ]
        for place, page in promises.durable.items():
            # Every page in `durable` must be in the index and readable, because it was neither evicted nor overwritten.
            if at.get(place) != page:
                broken.append(f"durable page {page} at place {place} is not in the index: {at.get(place)}")
            elif page[1] in failed:
                broken.append(f"durable page {page} at place {place}: {failed[page[1]]}")
        for place, (generation, number, _) in at.items():
            overwritten = promises.written.get(place, (0,))[0] > generation
            if number in failed and not overwritten:
                broken.append(f"the index names {number} at place {place}: {failed[number]}")
        stale = {
            p for p, (generation, _, _) in at.items() if generation > promises.newest and promises.newest
        }
        broken += [f"place {place} has a page that was never written" for place in stale]
        return broken
    finally:
        world.close()
