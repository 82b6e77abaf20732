"""What a child's marks promise, and whether a disk tier that opens what it left keeps it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from flexkv.storage.base import DiskGroup
from tests.faults.disk_child import disks_of
from tests.unit.storage.disk_world import DiskWorld


class Promises:
    """Takes marks in order.

    Attributes:
        written: place -> (generation, number) of the last write that began.
        durable: place -> (generation, number) reported durable and not evicted since.
        epoch: that the last finished reset started.
    """

    def __init__(self, marks: Iterable[str] = ()) -> None:
        self.written: dict[int, tuple[int, int]] = {}
        self.pages: dict[int, int] = {}
        self.durable: dict[int, tuple[int, int]] = {}
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
                place, generation, number, _ = values
                self.written[place] = (generation, number)
                self.pages[generation] = number
                self.newest = max(self.newest, generation)
            elif word == "durable":
                place, generation = values
                # The news may come after the page was given up.
                if generation > self._reset_at and generation not in self._evicted:
                    self.durable[place] = (generation, self.pages[generation])
            elif word == "evict":
                self.durable.pop(values[0], None)
                self._evicted.add(values[1])
            elif word == "resetting":
                self.durable.clear()
                self._reset_at = self.newest
            elif word == "reset":
                self.epoch = values[0]


def broken_promises(promises: Promises, folder: Path, group: DiskGroup, slots: int) -> list[str]:
    """Opens `folder` as the product does and reads every page; what is not as promised. Wrong bytes raise."""
    world = DiskWorld(disks_of(folder), group, slots, host_slots=16, io="threads", depth=4, preallocate=False)
    try:
        broken = []
        unit = world.unit
        rows = unit.rows(0)
        if unit.epoch < promises.epoch:
            broken.append(f"epoch {unit.epoch} after a reset to {promises.epoch}")
        if int(unit.next_generations(1)[0]) <= promises.newest:
            broken.append("a generation would be given twice")
        failed = world.read_rows(rows)
        at = {
            int(place): (int(generation), int.from_bytes(key.tobytes(), "big"))
            for place, generation, key in zip(rows.places, rows.generations, rows.keys, strict=True)
        }
        for place, page in promises.durable.items():
            # What was evicted and written anew by nobody is there too: only an overwritten slot may be gone.
            if at.get(place) != page:
                broken.append(f"durable page {page} at place {place} is not in the index: {at.get(place)}")
            elif page[1] in failed:
                broken.append(f"durable page {page} at place {place}: {failed[page[1]]}")
        for place, (generation, number) in at.items():
            overwritten = promises.written.get(place, (0, 0))[0] > generation
            if number in failed and not overwritten:
                broken.append(f"the index names {number} at place {place}: {failed[number]}")
        stale = {p for p, (generation, _) in at.items() if generation > promises.newest and promises.newest}
        broken += [f"place {place} has a page that was never written" for place in stale]
        return broken
    finally:
        world.close()
