"""Whatever is wrong with slab, index or disk is a miss or a lost disk with a name: never wrong bytes, never a crash."""

from __future__ import annotations

import os
import shutil
import sqlite3
import struct
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flexkv import c_ext
from flexkv.errors import CapacityError, DiskError
from flexkv.storage.folder import FolderLockedError, folder_at_rest, unit_folders
from flexkv.storage.fsck import check_folder
from flexkv.storage.header import FIXED, parse_header, read_group, read_header
from flexkv.storage.index import DamagedIndexError, SlotIndex
from flexkv.transfer.graph import OpStatus
from tests.unit.storage.disk_world import FAIL, GENEROUS_S, IDENTITY, DiskWorld, key_of, keys_of, make_group

MakeDisks = Callable[..., DiskWorld]

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


def flip(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def filled(make_disks: MakeDisks, count: int = 6, **kwargs: object) -> tuple[Path, np.ndarray]:
    """A closed unit with blocks 0..count-1 at places 0..count-1: its slab, and their generations."""
    world = make_disks(**kwargs)
    _, generations = world.write(range(count), range(count))
    world.wait_durable(range(count), generations)
    folder = world.folder
    assert world.close()
    return folder / "group0.slab", generations


@pytest.fixture
def one_page(make_disks: MakeDisks) -> tuple[DiskWorld, bytearray, bytes]:
    """A world with a page in slot 0, the page's image, and its tag."""
    from flexkv.storage.tags import make_tags

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
    world.write([2], [2])  # the slot is as good as ever
    assert world.unit.stats().misses["data"] == 1


def test_a_flipped_bit_in_any_field_of_the_header(make_disks: MakeDisks) -> None:
    slab, _ = filled(make_disks)
    raw = bytearray(slab.read_bytes()[: read_header(str(slab)).header_bytes])
    parse_header(bytes(raw), "it")
    for at in [*range(FIXED.size), FIXED.size + 3, FIXED.size + 60, FIXED.size + 200, len(raw) - 1]:
        raw[at] ^= 1
        with pytest.raises(DiskError):
            parse_header(bytes(raw), "it")
        raw[at] ^= 1


def test_a_damaged_header_costs_the_slab_and_nothing_else(make_disks: MakeDisks) -> None:
    slab, _ = filled(make_disks)
    flip(slab, 50)
    assert any("damaged slab header" in problem for problem in check_folder(slab.parent).problems)
    world = make_disks()
    assert len(world.unit.rows(0)) == 0
    _, generations = world.write([1], [0])
    assert world.read([1], [0], generations).status is OpStatus.OK


def test_the_header_says_what_the_unit_was_made_with(make_disks: MakeDisks) -> None:
    group = make_group(layers=3, run_bytes=2304, kv=1, ranks=2)
    slab, _ = filled(make_disks, group=group)
    header, read = read_group(str(slab))
    assert (header.model, header.unit, header.fingerprint) == (IDENTITY.model, "unit0", IDENTITY.fingerprint)
    assert (header.layers, header.ranks, header.block_tokens, header.dtype) == (3, 2, 16, "uint8")
    assert read.stripe_bytes == group.stripe_bytes
    for there, here in zip(read.runs, group.runs, strict=True):
        np.testing.assert_array_equal(there, here)
    raw = slab.read_bytes()
    layers = struct.unpack_from("<3Q", raw, FIXED.size + 16 * 2)
    assert layers == (0, 2304, 4608)


def test_models_lie_side_by_side(make_disks: MakeDisks, tmp_path: Path) -> None:
    """Also two whose names make the same folder name."""
    other = replace(IDENTITY, model="a model", fingerprint=bytes(32))
    slab, _ = filled(make_disks)
    other_slab, _ = filled(make_disks, identity=other)
    assert slab != other_slab
    assert unit_folders(tmp_path / "disk0") == sorted([slab.parent, other_slab.parent])


def test_another_models_slab_is_left_alone(make_disks: MakeDisks) -> None:
    other = replace(IDENTITY, fingerprint=bytes(32))
    slab, _ = filled(make_disks)
    other_slab, _ = filled(make_disks, identity=other)
    shutil.copy(other_slab, slab)
    before = slab.read_bytes()
    with pytest.raises(DiskError, match="another model's pages"):
        make_disks()
    assert slab.read_bytes() == before


def test_another_version_is_left_alone(make_disks: MakeDisks) -> None:
    from flexkv import c_ext

    slab, _ = filled(make_disks)
    size = read_header(str(slab)).header_bytes
    raw = bytearray(slab.read_bytes())
    struct.pack_into("<I", raw, 8, 2)
    struct.pack_into("<Q", raw, 40, 0)
    struct.pack_into("<Q", raw, 40, c_ext.run_digest(bytes(raw[:size])))
    slab.write_bytes(raw)
    with pytest.raises(DiskError, match=r"slab format 2\.1; this version reads 1\.1"):
        make_disks()
    assert slab.read_bytes() == raw


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


def test_a_deleted_slab_is_found_and_nothing_more_is_called_durable(make_disks: MakeDisks) -> None:
    world = make_disks(2)
    _, generations = world.write(range(4), range(4))
    world.wait_durable(range(4), generations)
    (world.folder / "group0.slab").unlink()
    result, _ = world.write([10], [10])
    assert result.status is OpStatus.OK
    world.until(lambda: not world.unit.alive[0], "the deletion was not noticed")
    lost = [lost for events in world.events for lost in events.lost]
    assert [(disk.disk, "deleted" in disk.reason) for disk in lost] == [(0, True)]
    result = world.read(range(4), range(4), generations)
    assert result.failed.tolist() == [0, 2]
    assert "was taken out" in result.reason
    _, more = world.write([20], [21])  # the other disk goes on
    world.wait_durable([21], more)


def test_a_folder_has_one_user(make_disks: MakeDisks) -> None:
    world = make_disks()
    with pytest.raises(FolderLockedError, match=f"in use by process {os.getpid()}"):
        make_disks()
    with pytest.raises(FolderLockedError):
        check_folder(world.folder)
    assert world.close()
    assert make_disks().close()


def test_a_unit_starts_while_another_reads_its_index(
    make_disks: MakeDisks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Units of one node start together; each has the others' folders for a moment."""
    world = make_disks()
    folder = world.folder
    assert world.close()
    held, let_go = threading.Event(), threading.Event()

    def read() -> None:
        with folder_at_rest(folder), folder_at_rest(folder):
            held.set()
            let_go.wait(GENEROUS_S)

    reader = threading.Thread(target=read)
    reader.start()
    assert held.wait(GENEROUS_S)
    monkeypatch.setattr("flexkv.storage.folder.LOCK_WAIT_S", 0.05)
    with pytest.raises(FolderLockedError, match="is in use by process"):
        make_disks()
    monkeypatch.setattr("flexkv.storage.folder.LOCK_WAIT_S", GENEROUS_S)
    threading.Timer(0.1, let_go.set).start()
    world = make_disks()
    reader.join(GENEROUS_S)
    with pytest.raises(FolderLockedError, match=f"in use by process {os.getpid()}"), folder_at_rest(folder):
        raise AssertionError("read while its unit writes it")
    assert world.close()


def test_a_damaged_index_is_made_anew_from_the_slabs(make_disks: MakeDisks) -> None:
    slab, generations = filled(make_disks)
    index = slab.parent / "index.sqlite"
    index.write_bytes(b"no database at all" * 300)
    with pytest.raises(DamagedIndexError):
        SlotIndex(index, [32])
    world = make_disks()
    rows = world.unit.rows(0)
    assert sorted(rows.places.tolist()) == list(range(6))
    assert world.read_rows(rows) == {}
    assert world.unit.next_generations(1)[0] > generations.max()
    assert (slab.parent / "index.damaged").exists()


def test_a_lost_index_does_not_bring_old_weights_back(make_disks: MakeDisks) -> None:
    slab, _ = filled(make_disks)
    world = make_disks()
    world.unit.reset(5)
    assert world.close()
    (slab.parent / "index.sqlite").unlink()
    world = make_disks()
    assert world.unit.epoch == 5
    assert len(world.unit.rows(0)) == 0


def test_a_locked_index_is_not_a_damaged_one(make_disks: MakeDisks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexkv.storage.index.BUSY_S", 0.1)
    slab, _ = filled(make_disks)
    path = slab.parent / "index.sqlite"
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("PRAGMA locking_mode=EXCLUSIVE")
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(DiskError, match="locked"):
        make_disks()
    other.execute("ROLLBACK")
    other.close()
    assert not (slab.parent / "index.damaged").exists()
    world = make_disks()
    assert len(world.unit.rows(0)) == 6


def test_a_reset_survives(make_disks: MakeDisks) -> None:
    filled(make_disks)
    world = make_disks(2)
    world.unit.reset(1)
    _, generations = world.write([1], [3])
    world.wait_durable([3], generations)
    assert world.close()
    world = make_disks(2)
    assert world.unit.epoch == 1
    rows = world.unit.rows(0)
    assert rows.places.tolist() == [3]
    np.testing.assert_array_equal(rows.keys[0], key_of(1))


def test_nothing_that_a_reset_forgot_is_called_durable(make_disks: MakeDisks) -> None:
    world = make_disks()
    world.write([1], [0])
    world.unit.reset(1)
    assert world.unit.poll().durable == ()


def test_pages_of_another_epoch_are_not_served(make_disks: MakeDisks) -> None:
    world = make_disks()
    _, generations = world.write([1], [0])
    world.unit.reset(1)
    assert "disk miss (epoch)" in world.read([1], [0], generations).reason


def test_writes_recorded_at_the_last_moment_are_durable(make_disks: MakeDisks) -> None:
    world = make_disks()
    world.write(range(8), range(8))
    assert world.close()
    assert len(make_disks().unit.rows(0)) == 8


def test_repair_leaves_evicted_what_a_whole_index_evicted(make_disks: MakeDisks) -> None:
    """The pages lie there, whole. Only when nothing says any more that they were evicted do they come back."""
    world = make_disks()
    _, generations = world.write(range(6), range(6))
    world.wait_durable(range(6), generations)
    world.unit.record_evict(0, np.array([1, 4], np.int32), generations[[1, 4]])
    folder = world.folder
    assert world.close()
    report = check_folder(folder, repair=True)
    assert report.clean
    assert report.slabs[0].orphans == [1, 4]
    world = make_disks()
    assert sorted(world.unit.rows(0).places.tolist()) == [0, 2, 3, 5]
    assert world.close()
    (folder / "index.sqlite").unlink()
    assert check_folder(folder, repair=True).repaired
    world = make_disks()
    rows = world.unit.rows(0)
    assert sorted(rows.places.tolist()) == list(range(6))
    assert world.read_rows(rows) == {}


def test_repair_takes_out_what_is_not_there(make_disks: MakeDisks) -> None:
    slab, _ = filled(make_disks)
    header = read_header(str(slab))
    flip(slab, header.header_bytes + 2 * header.slot_bytes + 5000)
    assert check_folder(slab.parent, repair=True).slabs[0].missing == [2]
    assert check_folder(slab.parent).slabs[0].missing == []
    world = make_disks()
    rows = world.unit.rows(0)
    assert sorted(rows.places.tolist()) == [0, 1, 3, 4, 5]
    assert world.read_rows(rows) == {}


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
    """Nothing stays charged or locked, for the page, the place or the host slot."""
    faults = c_ext.IoFaults([c_ext.IoFaultRule(FAIL, write=True, nth=0)])
    world = make_disks(faults=faults)
    result, _ = world.write([1], [0])
    assert result.failed.tolist() == [0]
    result, generations = world.write([1], [0])
    assert result.status is OpStatus.OK
    world.wait_durable([0], generations)
    assert world.read([1], [0], generations).status is OpStatus.OK


@pytest.mark.parametrize("run_bytes", [4096, 2304, 18432])
def test_pages_go_past_the_page_cache_whatever_their_geometry(
    make_disks: MakeDisks, tmp_path: Path, run_bytes: int
) -> None:
    """18,432 bytes is a layer of an MLA model: 4.5 sectors."""
    try:
        os.close(os.open(tmp_path / "probe", os.O_RDWR | os.O_CREAT | os.O_DIRECT))
        possible = True
    except OSError:
        possible = False
    world = make_disks(group=make_group(layers=3, run_bytes=run_bytes, kv=1))
    member = world.unit._members[0]
    assert member is not None
    assert member.slabs[0].direct == possible


def test_slots_follow_the_budget(make_disks: MakeDisks) -> None:
    filled(make_disks)
    assert make_disks(slots=4).close()
    world = make_disks(slots=50)
    rows = world.unit.rows(0)
    assert sorted(rows.places.tolist()) == [0, 1, 2, 3]
    assert world.read_rows(rows) == {}
    assert world.unit.slots(0) == 50


def test_a_budget_without_a_slot_is_refused(make_disks: MakeDisks) -> None:
    with pytest.raises(CapacityError, match="hold no slot of 36864 bytes"):
        make_disks(slots=0)


def test_fsck_brings_orphans_back(make_disks: MakeDisks) -> None:
    slab, generations = filled(make_disks)
    (slab.parent / "index.sqlite").unlink()
    report = check_folder(slab.parent)
    assert not report.clean
    assert report.slabs[0].orphans == list(range(6))
    assert check_folder(slab.parent, repair=True).repaired
    assert check_folder(slab.parent).clean
    world = make_disks()
    rows = world.unit.rows(0)
    assert len(rows) == 6
    assert world.read_rows(rows) == {}
    assert world.unit.next_generations(1)[0] > generations.max()
