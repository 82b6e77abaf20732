"""A process for tests that kill it. It makes random calls of a disk tier. It records each step in a file of marks: a
line before the step, and a line after it.

Its arguments are either `serve`, or the following:
    folder: the tier's folder, or a folder with folders `disk*`, over which the tier is striped.
    marks: the file for the marks.
    seed, steps: seed of the random choices, and number of steps.
    way: how pages reach the disks, a name in WAYS.
    how: `normal`, or a fault that the tests must find. With `no-sync` the data is not synced. With `index-first` the
        index becomes durable, and is reported as such, before the data.
"""

from __future__ import annotations

import os
import random
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flexkv.storage.base import DiskGroup, IndexRows
from flexkv.storage.journal import Journal, Record
from tests.unit.storage.disk_world import DiskWorld, ids, make_group, sharing_groups
from tests.unit.storage.sealed_world import SealedWorld

SLOTS = 24
NUMBERS = 40
SETTLE_S = 30.0
GROUP = make_group(layers=2, run_bytes=4096, kv=1)
SHARING = sharing_groups()
"""KV groups that share a slab: two whose slot images have the same form, and one with smaller slot images."""


@dataclass(frozen=True)
class Way:
    """The ways in which pages reach the disks. Each time the tier is opened, one value of `ios` and one of `sealed` are
    chosen.

    Attributes:
        ios: kinds of I/O for the disks.
        sealed: whether ranks write their own stripes, so that the trailer is written afterwards.
        groups: the KV groups that the pages belong to.
    """

    ios: tuple[str, ...] = ("threads",)
    sealed: tuple[bool, ...] = (False,)
    groups: tuple[DiskGroup, ...] = (GROUP,)


WAYS = {
    "threads": Way(),
    "io_uring": Way(ios=("uring",)),
    "sealed": Way(ios=("threads",), sealed=(True,)),
    "sealed io_uring": Way(ios=("uring",), sealed=(True,)),
    "groups": Way(sealed=(False, True), groups=tuple(SHARING)),
    "any": Way(ios=("auto", "threads"), sealed=(False, True)),
    "any groups": Way(ios=("auto", "threads"), sealed=(False, True), groups=tuple(SHARING)),
}


def break_order(how: str) -> None:
    """Makes this process misbehave as the fault `how` describes; see the module's docstring."""
    if how == "no-sync":
        Journal._sync_data = lambda self, slabs: None  # type: ignore[method-assign]
    elif how == "index-first":
        write, sync = Journal._write, Journal._sync_data

        late: set[int] = set()

        def index_first(self: Journal, batch: Sequence[Record]) -> None:
            due = set(late)
            late.clear()
            self._sync_data = late.update  # type: ignore[assignment,method-assign]
            write(self, batch)
            # syncs the data of the previous batch, so late that a power cut can come before it
            sync(self, due)

        Journal._write = index_first  # type: ignore[method-assign]
    else:
        assert how == "normal", how


def pages_of(rows: IndexRows) -> dict[int, tuple[int, int, int]]:
    """Returns a dict: for each disk slot, the generation, number and group of its page."""
    groups = np.zeros(len(rows), np.int32) if rows.groups is None else rows.groups
    numbers = [int.from_bytes(key.tobytes(), "big") for key in rows.keys]
    pages = zip(rows.generations.tolist(), numbers, groups.tolist(), strict=True)
    return dict(zip(rows.places.tolist(), pages, strict=True))


def disks_of(folder: Path) -> list[Path]:
    """Returns the folders over which a tier is striped: the folders `disk*` in `folder`, or `folder` itself if there
    are none."""
    return sorted(folder.glob("disk*")) or [folder]


class Child:
    """Uses a disk tier, and keeps the state that a control plane would keep.

    Attributes:
        held: disk slot -> (number, generation, group) of the page in it.
        inherited: generations of the pages that were on disk when the tier was opened.
    """

    def __init__(self, folder: Path, marks: Path, seed: int, way: Way) -> None:
        self.folder, self.rng, self.way = folder, random.Random(seed), way
        self._marks = os.open(marks, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self.held: dict[int, tuple[int, int, int]] = {}
        self.open()

    def mark(self, *lines: str) -> None:
        os.write(self._marks, "".join(f"{line}\n" for line in lines).encode())

    def open(self) -> None:
        world = SealedWorld if self.rng.choice(self.way.sealed) else DiskWorld
        self.world = world(
            disks_of(self.folder),
            self.way.groups[0],
            SLOTS,
            more=self.way.groups[1:],
            host_slots=16,
            io=self.rng.choice(self.way.ios),
            depth=self.rng.choice([1, 4, 16]),
            preallocate=self.rng.random() < 0.5,
            register_buffers=self.rng.random() < 0.5,
        )
        rows = self.world.unit.rows(0)
        self.inherited = set(rows.generations.tolist())
        self.held = {
            place: (number, generation, of) for place, (generation, number, of) in pages_of(rows).items()
        }
        self.mark(f"open {self.world.unit.epoch}")

    def poll(self) -> None:
        for pages in self.world.poll().durable:
            pairs = zip(pages.places.tolist(), pages.generations.tolist(), strict=True)
            self.mark(*(f"durable {place} {generation}" for place, generation in pairs))

    def write(self) -> None:
        count = self.rng.randint(1, 4)
        places = self.rng.sample(range(SLOTS), count)
        known = {number for number, _, _ in self.held.values()}
        of = self.rng.randrange(len(self.way.groups))
        numbers = self.rng.sample([n for n in range(NUMBERS) if n not in known], count)
        self.evict([place for place in places if place in self.held])
        generations = self.world.unit.next_generations(count)
        lines = zip(places, generations.tolist(), numbers, strict=True)
        self.mark(*(f"write {p} {g} {n} {of}" for p, g, n in lines))
        result, _ = self.world.write(numbers, places, generations=generations, of=of)
        assert not len(result.failed), result.reason
        self.held.update(
            {p: (n, g, of) for p, n, g in zip(places, numbers, generations.tolist(), strict=True)}
        )

    def evict(self, places: Sequence[int]) -> None:
        if not places:
            return
        generations = np.array([self.held.pop(place)[1] for place in places], np.uint64)
        pairs = zip(places, generations.tolist(), strict=True)
        self.mark(*(f"evict {place} {generation}" for place, generation in pairs))
        self.world.unit.record_evict(0, ids(list(places)), generations)

    def read(self) -> None:
        of = self.rng.randrange(len(self.way.groups))
        held = sorted(place for place, page in self.held.items() if page[2] == of)
        if not held:
            return
        places = self.rng.sample(held, min(3, len(held)))
        pages = [self.held[place] for place in places]
        generations = np.array([generation for _, generation, _ in pages], np.uint64)
        layerwise = self.rng.random() < 0.5
        result = self.world.read([number for number, _, _ in pages], places, generations, layerwise, of=of)
        # A page from an earlier process may be a miss, because that process may have died while it overwrote the page.
        # A page that this process wrote must not be a miss.
        missed = {int(generations[i]): places[i] for i in result.failed.tolist()}
        assert self.inherited >= missed.keys(), result.reason
        self.evict(list(missed.values()))
        self.world.unit.record_use(0, ids([place for place in places if place in self.held]))

    def reset(self) -> None:
        epoch = self.world.unit.epoch + 1
        self.mark("resetting")
        self.held.clear()
        self.world.unit.reset(epoch)
        assert self.world.unit.epoch == epoch
        self.mark(f"reset {epoch}")

    def restart(self) -> None:
        assert self.world.close()
        self.open()

    def pause(self) -> None:
        """Sleeps for a short random time, or waits until the journal has written everything."""
        if self.rng.random() < 0.5:
            return time.sleep(self.rng.random() * 0.05)
        ends_s = time.monotonic() + SETTLE_S
        while self.world.unit.stats().journal_lag_s:
            assert time.monotonic() < ends_s, "the journal has not written what waits"
            time.sleep(0.001)

    def step(self) -> None:
        chosen = self.rng.random()
        if chosen < 0.6:
            self.write()
        elif chosen < 0.8:
            self.read()
        elif chosen < 0.9:
            self.evict(self.rng.sample(sorted(self.held), min(2, len(self.held))))
        elif chosen < 0.97:
            self.pause()
        elif chosen < 0.985:
            self.reset()
        else:
            self.restart()
        self.poll()


def serve() -> None:
    """Forks a process for each line `folder marks seed way` on its input. It forks because starting an interpreter
    takes long. For each process, prints the process id, and at its end the exit code.
    """
    for line in sys.stdin:
        folder, marks, seed, way = line.rstrip("\n").split(" ", 3)
        pid = os.fork()
        if pid == 0:
            try:
                live([folder, marks, seed, str(10**9), way, "normal"])
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def live(arguments: Sequence[str]) -> None:
    """Runs all steps of one process. `arguments` are those of the program."""
    folder, marks, seed, steps, way, how = arguments
    break_order(how)
    child = Child(Path(folder), Path(marks), int(seed), WAYS[way])
    for _ in range(int(steps)):
        child.step()
    assert child.world.close()
    child.poll()
    child.mark("end")


if __name__ == "__main__":
    serve() if sys.argv[1:] == ["serve"] else live(sys.argv[1:])
