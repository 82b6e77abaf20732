"""Several KV groups share a set of slabs, and no read of one group returns another group's page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flexkv import c_ext
from flexkv.errors import ConfigError, GeometryError
from flexkv.storage import scan, striped_slabs
from flexkv.storage.base import DiskGroup, IndexRows
from flexkv.storage.fsck import check_folder
from flexkv.storage.group_tables import codec_of
from flexkv.storage.peer_folders import open_peer_folders
from flexkv.storage.sharing import slab_numbers
from flexkv.transfer.graph import OpStatus
from tests.unit.storage.disk_world import IDENTITY, DiskWorld, MakeDisks, make_group, sharing_groups
from tests.unit.storage.sealed_world import SealedWorld

FULL, WINDOW, STATE = range(3)


def shared(make_disks: MakeDisks, disks: int = 1, **options: object) -> DiskWorld:
    first, *more = sharing_groups()
    return make_disks(disks, group=first, more=more, **options)


def pages(rows: IndexRows) -> dict[int, tuple[int, int]]:
    """Returns a dict from each disk slot in `rows` to the group and the block of its page."""
    assert rows.groups is not None
    numbers = [int.from_bytes(key.tobytes(), "big") for key in rows.keys]
    return dict(zip(rows.places.tolist(), zip(rows.groups.tolist(), numbers, strict=True), strict=True))


@pytest.mark.parametrize("disks", [1, 2])
@pytest.mark.parametrize("layerwise", [False, True])
def test_pages_of_all_groups_come_back_and_survive_a_restart(
    make_disks: MakeDisks, disks: int, layerwise: bool
) -> None:
    world = shared(make_disks, disks)
    assert world.unit.slots(FULL) == world.unit.slots(STATE) == 32 * disks
    wanted: dict[int, tuple[int, int]] = {}
    for of in (FULL, WINDOW, STATE):
        places = [of, of + 3, of + 6]
        numbers = [10 * of + 1, 10 * of + 2, 10 * of + 3]
        _, generations = world.write(numbers, places, of=of)
        world.wait_durable(places, generations)
        assert world.read(numbers, places, generations, layerwise, of=of).status is OpStatus.OK
        wanted |= {place: (of, number) for place, number in zip(places, numbers, strict=True)}
    assert {pages.group for event in world.events for pages in event.durable} == {FULL, WINDOW, STATE}
    assert sorted(path.name for path in world.folder.glob("*.slab")) == ["group0.slab"]
    assert world.close()
    world = shared(make_disks, disks)
    rows = world.unit.rows(FULL)
    assert pages(rows) == wanted
    assert world.read_rows(rows) == {}
    assert len(world.unit.rows(WINDOW)) == 0, "the rows were given away"


def test_slabs_of_one_group_have_rows_without_groups(make_disks: MakeDisks) -> None:
    world = make_disks(more=[make_group(layers=2)])
    _, generations = world.write([1], [0], of=1)
    world.wait_durable([0], generations)
    assert world.read([1], [0], generations, of=1).status is OpStatus.OK
    assert sorted(path.name for path in world.folder.glob("*.slab")) == ["group0.slab", "group1.slab"]
    assert world.close()
    world = make_disks(more=[make_group(layers=2)])
    assert len(world.unit.rows(0)) == 0
    rows = world.unit.rows(1)
    assert rows.groups is None
    assert rows.places.tolist() == [0]


def cross_reads(world: DiskWorld, of: int) -> dict[int, str]:
    """Writes a page of group `of`, then reads it as if it were a page of each other group. Returns the reason for the
    miss, by the group that was read."""
    _, generations = world.write([7], [5], of=of)
    assert world.read([7], [5], generations, of=of).status is OpStatus.OK
    reasons = {}
    for other in {FULL, WINDOW, STATE} - {of}:
        for layerwise in (False, True):
            result = world.read([7], [5], generations, layerwise, of=other)
            assert result.failed.tolist() == [0]
            reasons[other] = result.reason
    return reasons


def test_a_page_of_one_group_read_as_anothers_is_a_miss(make_disks: MakeDisks) -> None:
    world = shared(make_disks)
    assert (
        "disk miss (group) on disk 0, slot 5: page of KV group 1, wanted 0"
        in cross_reads(world, WINDOW)[FULL]
    )
    assert "disk miss (group)" in cross_reads(world, FULL)[WINDOW]
    assert "disk miss (trailer)" in cross_reads(world, FULL)[STATE], "stripes lie where its trailer would"
    cross_reads(world, STATE)
    assert world.unit.stats().misses["group"] > 0


def test_without_the_number_in_the_trailer_another_groups_page_would_be_served(
    make_disks: MakeDisks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A control: if trailers lack the number of their KV group, a read of one group returns another group's page.
    Nothing else distinguishes the slot images of the two groups."""
    monkeypatch.setattr(striped_slabs, "codec_of", lambda group, number: codec_of(group))
    world = shared(make_disks)
    with pytest.raises(AssertionError, match="block 7: wrong bytes"):
        cross_reads(world, WINDOW)


def overwritten(world: DiskWorld, first: int, then: int) -> tuple[np.ndarray, np.ndarray]:
    """Writes a page of group `first` to disk slot 4, then overwrites it with a page of group `then`. Returns the
    generations of both."""
    _, old = world.write([1], [4], of=first)
    world.wait_durable([4], old)
    world.unit.record_evict(then, np.array([4], np.int32), old)
    _, new = world.write([2], [4], of=then)
    world.wait_durable([4], new)
    return old, new


@pytest.mark.parametrize("lost_index", ["", "made anew by the start", "made anew by fsck"])
@pytest.mark.parametrize(("first", "then"), [(FULL, STATE), (STATE, FULL), (FULL, WINDOW)])
def test_a_slot_that_changed_its_group_holds_the_later_page_alone(
    make_disks: MakeDisks, first: int, then: int, lost_index: str
) -> None:
    """A slot serves only the page that was written last, even if the page before belongs to another group. The trailer
    of the earlier page may still be intact, because a smaller image does not overwrite it."""
    world = shared(make_disks)
    old, new = overwritten(world, first, then)
    assert world.read([1], [4], old, of=first).failed.tolist() == [0]
    assert world.read([2], [4], new, of=then).status is OpStatus.OK
    folder = world.folder
    assert world.close()
    if lost_index:
        (folder / "index.sqlite").unlink()
        report = check_folder(folder, repair=lost_index == "made anew by fsck")
        assert report.slabs[0].orphans == [4]
        assert report.repaired == (lost_index == "made anew by fsck")
    else:
        report = check_folder(folder)
        assert report.clean
        assert [(group.group, group.rule, group.good) for group in report.slabs[0].groups] == [
            (number, ("full", "window of 2 pages", "state")[number], int(number == then))
            for number in range(3)
        ]
    world = shared(make_disks)
    rows = world.unit.rows(FULL)
    assert pages(rows) == {4: (then, 2)}
    assert world.read_rows(rows) == {}


def test_by_the_first_whole_trailer_an_overwritten_page_would_come_back(
    make_disks: MakeDisks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A control: if a read accepted the first intact trailer, it would serve an overwritten page. Two trailers in the
    slot are intact, and only their ages show which page is the later one."""
    world = shared(make_disks)
    overwritten(world, FULL, STATE)
    folder = world.folder
    assert world.close()
    (folder / "index.sqlite").unlink()
    monkeypatch.setattr(scan, "_age", lambda report: report.tag is not None)
    world = shared(make_disks)
    assert pages(world.unit.rows(FULL)) == {4: (FULL, 1)}


def test_stripes_without_a_trailer_are_no_damage(make_disks: MakeDisks, tmp_path: Path) -> None:
    """`fsck` does not count stripes without a trailer as damage. A crash may leave stripes of a large image at the
    offset of a small image's trailer. After a repair the slab is clean."""
    world = shared(make_disks)
    _, generations = world.write([1, 2, 3], [0, 1, 2], of=FULL)
    world.wait_durable([0, 1, 2], generations)
    folder, codec = world.folder, world.codecs[FULL]
    assert world.close()
    with open(folder / "group0.slab", "r+b") as slab:
        header = len(slab.read()) - 32 * codec.image_bytes
        slab.seek(header + codec.trailer_offset)
        slab.write(bytes(codec.trailer_bytes))
        slab.seek(header + codec.image_bytes + codec.trailer_offset + 40)
        slab.write(b"!")
    report = check_folder(folder, repair=True)
    (found,) = report.slabs
    assert (found.good, found.empty, found.missing, [slot for slot, _ in found.damaged]) == (
        1,
        30,
        [0, 1],
        [1],
    )
    report = check_folder(folder)
    assert report.clean
    assert (report.slabs[0].good, report.slabs[0].empty) == (1, 31)
    world = shared(make_disks)
    rows = world.unit.rows(FULL)
    assert pages(rows) == {2: (FULL, 3)}
    assert world.read_rows(rows) == {}


def test_pages_that_ranks_write_by_themselves_share_slabs_too(tmp_path: Path) -> None:
    first, *more = sharing_groups()
    world = SealedWorld([tmp_path / "a", tmp_path / "b"], first, 16, more=more)
    try:
        for of in (FULL, WINDOW, STATE):
            result, generations = world.write([20 + of, 30 + of], [2 * of, 2 * of + 1], of=of)
            assert result.status is OpStatus.OK, result.reason
            assert (
                world.read([20 + of, 30 + of], [2 * of, 2 * of + 1], generations, of=of).status is OpStatus.OK
            )
            for other in {FULL, WINDOW, STATE} - {of}:
                assert len(world.read([20 + of], [2 * of], generations[:1], of=other).failed)
    finally:
        assert world.close()


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (
            {"shares": 1},
            GeometryError,
            r"group 1 shares the slabs of group 1; allowed are those before it, \[0, 1\)",
        ),
        ({"shares": -1}, GeometryError, "shares the slabs of group -1"),
        ({"rule": "some"}, ConfigError, "group 1: .*some"),
        ({"rule": "window", "reach": 0}, ConfigError, "group 1: a rule with blocks of 16 tokens and reach 0"),
        ({"rule": "full", "reach": 3}, ConfigError, "group 1: a rule with blocks of 16 tokens and reach 3"),
        ({"signature": bytes(5000)}, GeometryError, "a signature of 5000 bytes; allowed are 4096"),
    ],
)
def test_groups_that_cannot_be_are_refused(
    make_disks: MakeDisks, change: dict[str, object], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        make_disks(more=[replace(make_group(), **change)])  # type: ignore[arg-type]


def test_another_unit_reads_no_pages_of_several_groups(
    make_disks: MakeDisks, caplog: pytest.LogCaptureFixture
) -> None:
    other = replace(IDENTITY, unit="unit1")
    world = shared(make_disks, identity=other)
    _, generations = world.write([1], [0])
    world.wait_durable([0], generations)
    assert world.close()
    assert open_peer_folders(world.folders, IDENTITY, make_group(), 0) == []
    assert "its pages are not used here: its number of KV groups is 3, ours 1" in caplog.text


def test_a_group_may_share_with_one_that_shares() -> None:
    def numbers(*shares: int | None) -> list[int]:
        return slab_numbers([replace(make_group(), shares=number) for number in shares])

    assert numbers(None, 0, None, 1, 2) == [0, 0, 2, 0, 2]


@pytest.mark.parametrize("wrong", ["pool", "slab"])
def test_slots_of_another_size_than_the_largest_image_are_refused(make_disks: MakeDisks, wrong: str) -> None:
    world = shared(make_disks)
    groups: Sequence[DiskGroup] = world.groups
    codecs = [codec_of(group, number) for number, group in enumerate(groups)]
    volume = world.unit._volumes[0]
    assert volume is not None
    slabs, pools = list(volume.slabs), [pool.native for pool in world.pools]
    if wrong == "pool":
        small = DiskWorld([world.folders[0]], replace(groups[STATE], shares=None), slots=4)
        pools[STATE] = small.pool.native
        words = "group 2: host slots of 16384 bytes for slot images of 20480"
    else:
        codecs, slabs, pools = [codecs[STATE]], slabs[:1], pools[:1]
        words = "host slots of 20480 bytes for slot images of 16384"
    with pytest.raises(GeometryError, match=words):
        c_ext.DiskLane(codecs, pools, [slabs], "threads", 4, 30.0)
    if wrong == "pool":
        assert small.close()
