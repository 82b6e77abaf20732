"""A record is pending if a full journal had no space for it. Its page is served meanwhile, and becomes durable when the
journal has space. If the page is evicted, the pending record is dropped.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from flexkv.storage.fsck import check_folder
from flexkv.storage.journal import Journal, Record
from flexkv.transfer.graph import OpStatus
from tests.unit.storage.disk_world import (
    BLOCK_TOKENS,
    GENEROUS_S,
    DiskWorld,
    ids,
    keys_of,
    sharing_groups,
)

MakeDisks = Callable[..., DiskWorld]
FULL = {"journal_rows": 3}
"""Options of a journal with space for 3 rows. If more pages are published together, the records of the others become
pending."""


def publish(world: DiskWorld, numbers: Sequence[int], generations: NDArray[np.uint64]) -> bool:
    """Publishes blocks `numbers`, block n in disk slot n. Returns False if the records became pending."""
    return world.unit.record_publish(
        0, keys_of(numbers), ids(numbers), generations, np.full(len(numbers), BLOCK_TOKENS, np.int32)
    )


def pending(world: DiskWorld) -> int:
    return world.unit.stats().pending_pages


def write_pending(world: DiskWorld, numbers: Sequence[int]) -> NDArray[np.uint64]:
    """Writes blocks and publishes them; the journal is full, so their records become pending."""
    result, generations = world.write(numbers, numbers, publish=False)
    assert result.status is OpStatus.OK
    assert not publish(world, numbers, generations)
    return generations


def blocks_after_restart(make_disks: MakeDisks) -> list[int]:
    again = make_disks()
    return sorted(int.from_bytes(key.tobytes(), "big") for key in again.unit.rows(0).keys)


@pytest.fixture
def held_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Returns an event. Until a test sets it, journals write nothing."""
    go_on, write = threading.Event(), Journal._write

    def wait_and_write(self: Journal, batch: Sequence[Record]) -> None:
        assert go_on.wait(GENEROUS_S)
        write(self, batch)

    monkeypatch.setattr(Journal, "_write", wait_and_write)
    yield go_on
    go_on.set()


def test_pages_that_find_the_journal_full_serve_and_become_durable(make_disks: MakeDisks) -> None:
    world = make_disks(**FULL)
    generations = write_pending(world, range(8))
    assert pending(world) == 8
    assert world.unit.unflushed, "or nobody would ask for more"
    assert world.read(range(8), range(8), generations).status is OpStatus.OK
    world.wait_durable(range(8), generations)
    assert pending(world) == 0
    assert not world.unit.unflushed
    assert world.close()
    assert blocks_after_restart(make_disks) == list(range(8))


def test_pages_that_find_the_journal_full_keep_their_groups(make_disks: MakeDisks) -> None:
    first, *more = sharing_groups()
    world = make_disks(group=first, more=more, **FULL)
    wanted: dict[int, int] = {}
    for of, numbers in enumerate(([0, 3, 4, 9], [1, 5, 6, 10], [2, 7, 8, 11])):
        _, generations = world.write(numbers, numbers, publish=False, of=of)
        tokens = np.full(len(numbers), BLOCK_TOKENS, np.int32)
        assert not world.unit.record_publish(of, keys_of(numbers), ids(numbers), generations, tokens)
        wanted |= dict.fromkeys(numbers, of)
        if of == 2:  # any group may report the eviction: the pending record of the disk slot is dropped
            world.unit.record_evict(0, ids([11]), generations[3:])
            del wanted[11]
    world.until(lambda: pending(world) == 0, "the journal had no room")
    assert world.close()
    world = make_disks(group=first, more=more)
    rows = world.unit.rows(0)
    assert rows.groups is not None
    assert dict(zip(rows.places.tolist(), rows.groups.tolist(), strict=True)) == wanted
    assert world.read_rows(rows) == {}


def test_a_close_waits_for_room(make_disks: MakeDisks) -> None:
    world = make_disks(**FULL)
    write_pending(world, range(8))
    assert world.close()
    assert blocks_after_restart(make_disks) == list(range(8))


def test_a_close_that_finds_no_room_says_so(make_disks: MakeDisks, held_up: threading.Event) -> None:
    world = make_disks(**FULL)
    result, generations = world.write(range(8), range(8), publish=False)
    assert result.status is OpStatus.OK
    assert publish(world, range(3), generations[:3])
    assert not publish(world, range(3, 8), generations[3:])
    assert world.engine.close(GENEROUS_S)
    assert not world.unit.close(0.05)
    assert pending(world) == 5
    held_up.set()
    assert not world.unit.close(GENEROUS_S), "the journal takes nothing more"


def test_a_disk_that_hangs_takes_no_time_of_the_others(
    make_disks: MakeDisks, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_disks(disks=2, **FULL)
    hanging, other = world.unit._journals
    assert hanging is not None
    assert other is not None
    go_on, write = threading.Event(), Journal._write

    def hang(self: Journal, batch: Sequence[Record]) -> None:
        assert self is not hanging or go_on.wait(GENEROUS_S)
        write(self, batch)

    monkeypatch.setattr(Journal, "_write", hang)
    result, generations = world.write(range(8), range(8), publish=False)
    assert result.status is OpStatus.OK
    tokens = np.full(8, BLOCK_TOKENS, np.int32)
    assert not world.unit.record_publish(0, keys_of(range(8)), ids(range(8)), generations, tokens)
    assert world.engine.close(GENEROUS_S)
    closing = threading.Thread(target=world.unit.close, args=(GENEROUS_S,))
    closing.start()
    other._thread.join(GENEROUS_S / 2)  # the close keeps running for at least this long
    assert other.ended
    assert not hanging.ended
    go_on.set()
    closing.join(GENEROUS_S)
    assert hanging.ended


def test_what_left_the_disk_is_not_published(make_disks: MakeDisks) -> None:
    world = make_disks(**FULL)
    generations = write_pending(world, range(8))
    world.unit.record_evict(0, ids([1, 2]), generations[1:3])
    world.unit.record_evict(0, ids([3]), generations[4:5])
    assert pending(world) == 6, "another generation than the one that is pending"
    world.wait_durable([0, 3, 4, 5, 6, 7], generations[[0, 3, 4, 5, 6, 7]])
    assert world.close()
    assert blocks_after_restart(make_disks) == [0, 3, 4, 5, 6, 7]


def test_a_place_that_was_written_again_owes_its_new_page_alone(make_disks: MakeDisks) -> None:
    world = make_disks(**FULL)
    first = write_pending(world, range(8))
    second = world.unit.next_generations(8)
    assert (second > first).all()
    assert not publish(world, range(8), second)
    assert pending(world) == 8
    assert publish(world, [0], second[:1])
    assert pending(world) == 7
    world.wait_durable(range(8), second)
    assert not {(place, generation) for place, generation in enumerate(first.tolist())} & world.durable


def test_a_lost_disk_owes_nothing(make_disks: MakeDisks, held_up: threading.Event) -> None:
    world = make_disks(disks=2, **FULL)
    result, generations = world.write(range(8), range(8), publish=False)
    assert result.status is OpStatus.OK
    assert not publish(world, range(8), generations)
    assert pending(world) == 8
    world.unit._lose(1, "for the test")
    assert pending(world) == 4
    assert not publish(world, range(8), generations)
    assert pending(world) == 4
    held_up.set()
    world.wait_durable(range(0, 8, 2), generations[::2])
    assert pending(world) == 0


def test_a_journal_that_has_failed_is_owed_nothing(make_disks: MakeDisks) -> None:
    """A journal that has failed accepts no pending records, even before the unit has noticed that the disk is lost."""
    world = make_disks(**FULL)
    result, generations = world.write(range(8), range(8), publish=False)
    assert result.status is OpStatus.OK
    for journal in world.unit._journals:
        assert journal is not None
        journal.fail("for the test")
    assert not publish(world, range(8), generations)
    assert pending(world) == 0


def test_a_reset_forgets_pending_records(make_disks: MakeDisks) -> None:
    world = make_disks(**FULL)
    write_pending(world, range(8))
    world.unit.reset(world.unit.epoch + 1)
    assert pending(world) == 0
    assert world.close()
    assert blocks_after_restart(make_disks) == []


def test_evictions_that_find_the_journal_full_are_carried_out_later(make_disks: MakeDisks) -> None:
    world = make_disks(**FULL)
    generations = write_pending(world, range(8))
    world.wait_durable(range(8), generations)
    world.unit.record_evict(0, ids(range(6)), generations[:6])
    assert world.unit.unflushed
    result, _ = world.write([20], [0], publish=False)  # overwrites a page, so its row in the index must go
    assert result.status is OpStatus.OK
    world.until(lambda: not world.unit.unflushed, "the evictions stay pending")
    folder = world.folder
    assert world.close()
    assert check_folder(folder).slabs[0].missing == []
    assert blocks_after_restart(make_disks) == [6, 7]


def test_an_eviction_that_is_owed_outlives_a_page_that_never_entered_the_journal(
    make_disks: MakeDisks, held_up: threading.Event
) -> None:
    held_up.set()
    world = make_disks(**FULL)
    generations = write_pending(world, range(8))
    world.wait_durable(range(8), generations)
    held_up.clear()
    world.unit.record_evict(0, ids(range(8)), generations)
    later = write_pending(world, range(8))
    world.unit.record_evict(0, ids(range(8)), later)
    assert pending(world) == 0
    assert world.unit.unflushed
    held_up.set()
    world.until(lambda: not world.unit.unflushed, "the evictions stay pending")
    assert world.close()
    assert blocks_after_restart(make_disks) == []


def test_a_reset_forgets_pending_evictions(make_disks: MakeDisks) -> None:
    world = make_disks(**FULL)
    generations = write_pending(world, range(8))
    world.wait_durable(range(8), generations)
    world.unit.record_evict(0, ids(range(8)), generations)
    world.unit.reset(2)
    assert not world.unit.unflushed
