"""If a slab's bytes are damaged in any way, the affected pages are misses. flexkv never returns wrong bytes, and never
crashes."""

from __future__ import annotations

import os

import numpy as np
import pytest

from flexkv.storage.fsck import check_folder
from flexkv.storage.header import read_header
from flexkv.storage.tags import make_tags
from flexkv.transfer.graph import OpStatus
from tests import testing_ext
from tests.unit.storage.damage import filled, flip
from tests.unit.storage.disk_world import FAIL, DiskWorld, MakeDisks, keys_of

TRAILER_FIELDS = {
    "magic": 0,
    "version": 8,
    "runs": 12,
    "slab_id": 16,
    "slot": 24,
    "key": 32,
    "generation": 48,
    "expiry": 56,
    "epoch": 64,
    "tokens": 68,
    "written": 72,
    "reserved": 80,
    "digest": 88,
    "first run digest": 96,
    "last run digest": 96 + 7 * 8,
}


@pytest.fixture
def one_page(make_disks: MakeDisks) -> tuple[DiskWorld, bytearray, bytes]:
    """Returns a world of a disk tier, and, in memory, the sealed slot image of a page for disk slot 0 and the page's
    tag."""
    world = make_disks()
    image = bytearray(world.codec.image_bytes)
    image[: world.codec.trailer_offset] = world.payload(1).tobytes()
    tag = make_tags(keys_of([1]), 3, np.array([9], np.uint64), 16).tobytes()
    world.codec.seal(image, 77, 0, tag, 1234)
    assert world.codec.check(image, 77, 0, tag, 0) == ("none", "")
    return world, image, tag


@pytest.mark.parametrize("field", list(TRAILER_FIELDS))
def test_a_flipped_bit_in_any_field_of_the_trailer(
    one_page: tuple[DiskWorld, bytearray, bytes], field: str
) -> None:
    world, image, tag = one_page
    for bit in range(8):
        at = world.codec.trailer_offset + TRAILER_FIELDS[field]
        image[at] ^= 1 << bit
        miss, reason = world.codec.check(image, 77, 0, tag, 0)
        assert miss == ("version" if field == "version" else "trailer"), reason
        image[at] ^= 1 << bit
    assert world.codec.check(image, 77, 0, tag, 0) == ("none", "")


def test_a_flipped_bit_in_any_leaf(one_page: tuple[DiskWorld, bytearray, bytes]) -> None:
    world, image, tag = one_page
    for at in range(0, world.codec.trailer_offset, 509):
        image[at] ^= 0x10
        miss, reason = world.codec.check(image, 77, 0, tag, 0)
        assert miss == "data", (at, reason)
        assert f"damaged run {at // 4096} " in reason
        image[at] ^= 0x10


def test_a_page_of_another_slot_or_slab(one_page: tuple[DiskWorld, bytearray, bytes]) -> None:
    world, image, tag = one_page
    assert world.codec.check(image, 77, 1, tag, 0)[0] == "elsewhere"
    assert world.codec.check(image, 78, 0, tag, 0)[0] == "elsewhere"


def test_a_flipped_bit_on_the_disk_is_a_miss_and_fsck_names_it(make_disks: MakeDisks) -> None:
    slab, _ = filled(make_disks)
    header = read_header(str(slab))
    flip(slab, header.header_bytes + 2 * header.slot_bytes + 5000)
    report = check_folder(slab.parent)
    assert not report.clean
    assert [slot for slot, _ in report.slabs[0].damaged] == [2]
    assert report.slabs[0].missing == [2]
    world = make_disks()
    failed = world.read_rows(world.unit.rows(0))
    assert list(failed) == [2]
    assert "disk miss (data)" in failed[2]
    world.write([2], [2])  # the slot can still be used
    assert world.unit.stats().misses["data"] == 1


def test_a_file_cut_in_half(make_disks: MakeDisks) -> None:
    slab, _ = filled(make_disks)
    header = read_header(str(slab))
    os.truncate(slab, header.header_bytes + 2 * header.slot_bytes + 100)
    world = make_disks()
    failed = world.read_rows(world.unit.rows(0))
    assert sorted(failed) == [2, 3, 4, 5]
    assert all("disk miss (trailer)" in reason for reason in failed.values())


def test_a_file_that_grows_shorter_while_it_is_used(make_disks: MakeDisks) -> None:
    world = make_disks()
    _, generations = world.write([1, 2], [0, 1])
    header = read_header(str(world.folder / "group0.slab"))
    os.truncate(world.folder / "group0.slab", header.header_bytes + header.slot_bytes)
    result = world.read([1, 2], [0, 1], generations)
    assert result.failed.tolist() == [1]
    assert "disk miss (short)" in result.reason


def test_sixty_four_bytes_of_something_else_are_a_miss(make_disks: MakeDisks) -> None:
    slab, _ = filled(make_disks)
    header = read_header(str(slab))
    with open(slab, "r+b") as file:
        file.seek(header.header_bytes + header.slot_bytes + 3 * 4096 + 128)
        file.write(b"x" * 64)
    world = make_disks()
    failed = world.read_rows(world.unit.rows(0))
    assert list(failed) == [1]
    assert "disk miss (data)" in failed[1]


def test_a_place_whose_write_failed_can_be_written_again(make_disks: MakeDisks) -> None:
    """After a failed write, a page can be written to the same disk slot. The failed write leaves no lock or count
    behind for its page, its disk slot or its host slot."""
    faults = testing_ext.IoFaults([testing_ext.IoFaultRule(FAIL, write=True, nth=0)])
    world = make_disks(faults=faults)
    result, _ = world.write([1], [0])
    assert result.failed.tolist() == [0]
    result, generations = world.write([1], [0])
    assert result.status is OpStatus.OK
    world.wait_durable([0], generations)
    assert world.read([1], [0], generations).status is OpStatus.OK
