"""While a disk is idle, its lane fills the free slots that will be written next with zeros. It never fills slots with
pages."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from flexkv.storage.header import read_header
from flexkv.transfer.graph import OpStatus
from tests.unit.storage.disk_world import (
    GENEROUS_S,
    NO_HOLES,
    DiskWorld,
    MakeDisks,
    holes,
    sharing_groups,
)

SLOTS = 32


def zeroed(world: DiskWorld) -> int:
    lane = world.unit._lane
    assert lane is not None
    return lane.counts(0)["zeroed_bytes"]


def wait_cleared(world: DiskWorld, slab: Path) -> None:
    deadline = time.monotonic() + GENEROUS_S
    while holes(slab):
        assert time.monotonic() < deadline, f"{holes(slab)} bytes were not cleared"
        time.sleep(0.01)


def test_free_slots_are_cleared_and_pages_stay(make_disks: MakeDisks) -> None:
    world = make_disks(slots=SLOTS)
    slab = world.folder / "group0.slab"
    if not holes(slab):
        pytest.skip(NO_HOLES)
    numbers, places = list(range(6)), [0, 3, 4, 17, 30, 31]
    _, generations = world.write(numbers, places)
    wait_cleared(world, slab)
    header = read_header(str(slab))
    assert 0 < zeroed(world) <= (SLOTS - len(places)) * header.slot_bytes
    assert world.read(numbers, places, generations).status is OpStatus.OK
    # A cleared slot has no page, and accepts a new page.
    assert "disk miss (trailer)" in world.read([99], [5], generations[:1]).reason
    result, more = world.write(range(100, 126), [p for p in range(SLOTS) if p not in places])
    assert result.status is OpStatus.OK
    world.wait_durable([5], more[2:3])
    before = zeroed(world)
    assert world.close()
    world = make_disks(slots=SLOTS)
    assert world.read_rows(world.unit.rows(0)) == {}
    assert before > 0


def test_slabs_that_groups_share_are_cleared_once(make_disks: MakeDisks) -> None:
    first, *more = sharing_groups()
    world = make_disks(slots=SLOTS, group=first, more=more)
    slab = world.folder / "group0.slab"
    if not holes(slab):
        pytest.skip(NO_HOLES)
    written = [world.write([of], [10 * of + 9], of=of)[1] for of in range(3)]
    wait_cleared(world, slab)
    images = sum(codec.image_bytes for codec in world.codecs)
    assert 0 < zeroed(world) <= SLOTS * read_header(str(slab)).slot_bytes - images
    for of, generations in enumerate(written):
        assert world.read([of], [10 * of + 9], generations, of=of).status is OpStatus.OK


def test_a_restart_goes_on_where_it_is_needed(make_disks: MakeDisks) -> None:
    """After a restart, the lane clears only slots that need it. No file records which slots were cleared, so the lane
    asks the file system for holes in the slab."""
    world = make_disks(slots=SLOTS)
    slab = world.folder / "group0.slab"
    if not holes(slab):
        pytest.skip(NO_HOLES)
    _, generations = world.write(range(8), range(0, 16, 2))
    world.wait_durable(range(0, 16, 2), generations)
    assert world.close()
    world = make_disks(slots=SLOTS)
    _, more = world.write([50], [1])
    wait_cleared(world, slab)
    assert world.read(range(8), range(0, 16, 2), generations).status is OpStatus.OK
    assert world.read([50], [1], more).status is OpStatus.OK


@pytest.mark.parametrize("preallocate", [True, False])
def test_idle_disks_clear_ahead_only_where_slabs_got_their_space(
    make_disks: MakeDisks, preallocate: bool
) -> None:
    lane = make_disks(slots=SLOTS, preallocate=preallocate).unit._lane
    assert lane is not None
    assert lane.zero_fill is preallocate
