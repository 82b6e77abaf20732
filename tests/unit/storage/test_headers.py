"""A slab's header identifies the model and the format of its pages. flexkv makes a slab with a damaged header anew, and
leaves a slab of another model alone.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flexkv import c_ext
from flexkv.errors import DiskError
from flexkv.storage.base import DiskGroup, DiskOptions
from flexkv.storage.folder import unit_folder, unit_folders
from flexkv.storage.fsck import check_folder
from flexkv.storage.group_tables import codec_of
from flexkv.storage.header import (
    DIGEST_AT,
    FIXED,
    DamagedHeaderError,
    format_digests,
    pack_header,
    parse_header,
    read_group,
    read_header,
)
from flexkv.storage.slot_rows import ROW, pack_chunk
from flexkv.storage.striped_slabs import StripedSlabs
from flexkv.storage.tags import make_tags
from flexkv.transfer.graph import OpStatus
from tests.soak import soak_factor
from tests.unit.storage.damage import filled, flip
from tests.unit.storage.disk_world import IDENTITY, MakeDisks, make_group, sharing_groups
from tests.unit.storage.flips import Copies, drawn_bits, make_folder


def test_a_flipped_bit_in_any_field_of_the_header(make_disks: MakeDisks) -> None:
    slab, _ = filled(make_disks)
    raw = bytearray(slab.read_bytes()[: read_header(str(slab)).header_bytes])
    parse_header(bytes(raw), "it")
    for at in [*range(FIXED.size), FIXED.size + 3, FIXED.size + 60, FIXED.size + 200, len(raw) - 1]:
        raw[at] ^= 1
        with pytest.raises(DiskError, match=r"it: (damaged slab header|no slab of ours)"):
            parse_header(bytes(raw), "it")
        raw[at] ^= 1


def test_a_flipped_bit_in_any_byte_of_a_header_is_found(make_disks: MakeDisks) -> None:
    slab, _ = filled(make_disks)
    raw = bytearray(slab.read_bytes()[: read_header(str(slab)).header_bytes])
    for at, bit in drawn_bits(range(len(raw)), seed=3):
        raw[at] ^= 1 << bit
        with pytest.raises(DamagedHeaderError):
            parse_header(bytes(raw), "it")
        raw[at] ^= 1 << bit


@pytest.mark.soak
@pytest.mark.parametrize("name", ["group0.slab", "group0.header"])
def test_a_flipped_bit_in_either_copy_of_the_header_costs_no_page(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    world = make_folder(tmp_path / "original")
    slab = world.folder / "group0.slab"
    assert world.close()
    copies = Copies(tmp_path / "original", tmp_path / "work", world)
    header_bytes = read_header(str(slab)).header_bytes
    whole = slab.read_bytes()[:header_bytes]
    stride = 1 if soak_factor() > 1 else 64

    def offsets(size: int) -> Iterator[int]:
        return (at for at in range(header_bytes) if at < FIXED.size or at % stride == 0)

    for what in copies.flips(name, offsets, seed=4):
        copies.check_twice(what)
        assert (copies.folder / name).read_bytes()[:header_bytes] == whole, f"{what} was not written back"


@pytest.mark.parametrize("name", ["group0.slab", "group0.header"])
def test_fsck_names_a_damaged_header_and_repairs_it(make_disks: MakeDisks, name: str) -> None:
    slab, _ = filled(make_disks)
    flip(slab.parent / name, 50)
    (problem,) = check_folder(slab.parent).problems
    assert f"{name}: damaged slab header; " in problem
    assert "--repair, writes it anew" in problem
    assert check_folder(slab.parent, repair=True).slabs[0].good == 6
    assert check_folder(slab.parent).clean


def test_without_a_whole_header_the_slab_is_made_anew_and_nothing_else_is(make_disks: MakeDisks) -> None:
    slab, _ = filled(make_disks)
    flip(slab, 50)
    flip(slab.with_suffix(".header"), 60)
    assert any("damaged slab header" in problem for problem in check_folder(slab.parent).problems)
    world = make_disks()
    assert len(world.unit.rows(0)) == 0
    _, generations = world.write([1], [0])
    assert world.read([1], [0], generations).status is OpStatus.OK
    assert world.close()
    assert slab.with_suffix(".header").read_bytes() == slab.read_bytes()[:4096]


def test_a_slab_without_a_copy_of_its_header_gets_one(make_disks: MakeDisks) -> None:
    slab, _ = filled(make_disks)
    slab.with_suffix(".header").unlink()
    assert check_folder(slab.parent).clean
    assert len(make_disks().unit.rows(0)) == 6
    assert slab.with_suffix(".header").read_bytes() == slab.read_bytes()[:4096]


def test_the_copy_of_another_slabs_header_gives_no_page_away(make_disks: MakeDisks) -> None:
    """The file beside a slab that copies its header may belong to another slab. If that slab has another model, flexkv
    leaves the slab alone. If it has the same model, no trailer matches, so no page is served.
    """
    slab, _ = filled(make_disks)
    other, _ = filled(make_disks, identity=replace(IDENTITY, fingerprint=bytes(32)))
    shutil.copy(other.with_suffix(".header"), slab.with_suffix(".header"))
    (problem,) = check_folder(slab.parent).problems
    assert "the copy of another slab's header" in problem
    flip(slab, 50)
    with pytest.raises(DiskError, match="another model's pages"):
        make_disks()
    same, _ = filled(make_disks, identity=replace(IDENTITY, unit="unit1"))
    shutil.copy(same.with_suffix(".header"), slab.with_suffix(".header"))
    world = make_disks()
    assert len(world.unit.rows(0)) == 0


def test_the_slab_of_another_group_is_left_alone(tmp_path: Path) -> None:
    groups = [make_group(), make_group()]
    options = DiskOptions(1 << 20, preallocate=False)
    assert StripedSlabs.open([tmp_path], IDENTITY, groups, options).close(10.0)
    folder = unit_folder(tmp_path, IDENTITY, groups)
    shutil.copy(folder / "group0.slab", folder / "group1.slab")
    with pytest.raises(DiskError, match="is a copy of the slab of group 0, expected that of group 1"):
        StripedSlabs.open([tmp_path], IDENTITY, groups, options)


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


def resigned(raw: bytes | bytearray, header_bytes: int) -> bytes:
    """Returns the header with a digest that matches its content, as if the header had been written with this
    content."""
    made = bytearray(raw)
    struct.pack_into("<Q", made, DIGEST_AT, 0)
    struct.pack_into("<Q", made, DIGEST_AT, c_ext.run_digest(bytes(made[:header_bytes])))
    return bytes(made)


def header_of(*groups: DiskGroup, slab: int = 0) -> bytes:
    return pack_header(
        groups, slab, 0x1234567890ABCDEF, 1_700_000_000, 2, IDENTITY.fingerprint, "a/model", "unit0"
    )


def test_what_one_full_group_leaves_on_disk_is_byte_for_byte_that_of_version_1() -> None:
    """The files of a unit with one full group have the bytes of format version 1, in which a slab has only one KV
    group. The expected digests are those of files of version 1."""
    group = replace(make_group(layers=3, run_bytes=2304, ranks=2), format_id="a format")
    raw = header_of(group)
    assert len(raw) == 4096
    assert (
        hashlib.sha256(raw).hexdigest() == "64a3dba35e47d586704fa31c6975bbed08e25a6eaf1eea391ebb591a027ee968"
    )
    assert parse_header(raw, "it")[0].version == 1
    codec = codec_of(group)
    image = bytearray(np.arange(codec.image_bytes, dtype=np.uint64).astype(np.uint8).tobytes())
    tag = make_tags(np.arange(16, dtype=np.uint8).reshape(1, 16), 2, np.array([77], np.uint64), 16)
    codec.seal(image, 5, 6, tag.tobytes(), 1_700_000_000)
    assert (
        hashlib.sha256(image).hexdigest()
        == "9d622710ee704555f447851031dd23ade51b5cc54692ce5bf7464e6a4a9cb9ee"
    )
    rows = np.zeros(80, ROW)
    rows["key"][:] = 3
    rows["generation"], rows["tokens"], rows["used"] = 9, 16, 5
    chunk = hashlib.sha256(pack_chunk(rows, 0, 1)).hexdigest()
    assert chunk == "6a35e7c88d17916453f3c71476cbb37782c413390d3da10f252dba4932320390"
    folder = unit_folder(Path("/d"), IDENTITY, [group])
    assert folder == Path("/d/a-model-0001020304050607-408801a23ff607df/unit0")


@pytest.mark.parametrize("change", [{"rule": "state"}, {"signature": b"s"}, {"rule": "window", "reach": 4}])
def test_another_rule_or_signature_is_another_folder_and_header(change: dict[str, object]) -> None:
    group = make_group()
    other = replace(group, **change)  # type: ignore[arg-type]
    header, found = parse_header(header_of(other), "it")
    assert (header.version, parse_header(header_of(group), "it")[0].version) == (2, 1)
    assert (found[0].rule, found[0].reach, found[0].signature) == (other.rule, other.reach, other.signature)
    assert unit_folder(Path("/d"), IDENTITY, [other]) != unit_folder(Path("/d"), IDENTITY, [group])
    assert format_digests([other]) != format_digests([group])


def test_a_header_says_all_of_the_groups_that_share_its_slab() -> None:
    own = replace(make_group(layers=1), rule="chunk", reach=64)
    groups = [*sharing_groups(), own]
    header, found = parse_header(header_of(*groups), "it")
    assert (header.version, header.group, header.slot_bytes) == (2, 0, codec_of(groups[0]).image_bytes)
    assert list(found) == [0, 1, 2]
    for number, there in found.items():
        here = groups[number]
        for name in (
            "format_id",
            "stripe_bytes",
            "block_tokens",
            "dtype",
            "rule",
            "reach",
            "signature",
            "shares",
        ):
            assert getattr(there, name) == getattr(here, name)
        for tables in zip(there.runs, here.runs, strict=True):
            np.testing.assert_array_equal(*tables)
    header, found = parse_header(header_of(*groups, slab=3), "it")
    assert (header.group, list(found), found[3].rule, found[3].reach) == (3, [3], "chunk", 64)


def test_a_flipped_bit_in_a_header_of_several_groups_is_found() -> None:
    raw = bytearray(header_of(*sharing_groups()))
    for at, bit in drawn_bits(range(len(raw)), seed=8):
        raw[at] ^= 1 << bit
        with pytest.raises(DamagedHeaderError):
            parse_header(bytes(raw), "it")
        raw[at] ^= 1 << bit
    parse_header(bytes(raw), "it")


RECORD_AT = FIXED.size


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (24, 4096),  # sets the field slot_bytes
        (112, 1),  # sets the field group
        (140, 0),  # sets the field groups
        (140, 4),
        (140, 1 << 31),
        (164, 0xFFFF),  # sets the length of the field unit
        (RECORD_AT, 1),  # sets the number of the first group
        (RECORD_AT + 4, 0),  # sets the field ranks of the group's record
        (RECORD_AT + 4, 1 << 31),
        (RECORD_AT + 8, 1 << 30),  # sets the field layers of the group's record
        (RECORD_AT + 12, 2),  # sets the field runs of the group's record
        (RECORD_AT + 16, 0),  # sets the field block_tokens of the group's record
        (RECORD_AT + 20, 3),  # sets the field reach of the group's record
        (RECORD_AT + 28, 0x21212121),  # sets the field rule of the group's record
        (RECORD_AT + 28, 0xFFFFFFFF),
        (RECORD_AT + 60, 0xFFFF),  # sets the length of the field format_id
    ],
)
def test_a_header_that_says_what_cannot_be_is_left_alone(make_disks: MakeDisks, at: int, value: int) -> None:
    """flexkv leaves a slab alone if its header has impossible values but a matching digest. So the disk did not damage
    the header, and the pages must not be dropped."""
    first, *more = sharing_groups()
    world = make_disks(group=first, more=more)
    slab = world.folder / "group0.slab"
    assert world.close()
    size = read_header(str(slab)).header_bytes
    raw = bytearray(slab.read_bytes())
    width = "<H" if at in (164, RECORD_AT + 60) else "<I"
    struct.pack_into(width, raw, at, value)
    slab.write_bytes(resigned(raw, size))
    before = slab.read_bytes()
    with pytest.raises(DiskError, match="a slab header that says what cannot be") as caught:
        read_header(str(slab))
    assert not isinstance(caught.value, DamagedHeaderError)
    with pytest.raises(DiskError, match=r"no disk can be used: .*a slab header that says what cannot be"):
        make_disks(group=first, more=more)
    assert slab.read_bytes() == before


def test_a_folder_of_other_groups_stays_beside_a_new_one_and_the_log_names_it(
    make_disks: MakeDisks, caplog: pytest.LogCaptureFixture
) -> None:
    """If the configuration needs a new folder, the existing folder stays, and the log names it. The cases: several
    groups after a single group, the reverse, and a folder of a version that does not exist yet."""
    caplog.set_level(logging.INFO, "flexkv.storage")
    first, *more = sharing_groups()
    plain, _ = filled(make_disks)
    assert not [record for record in caplog.records if record.name.startswith("flexkv.storage")]
    several, _ = filled(make_disks, group=first, more=more)
    assert f"the pages in {plain.parent} are of another format or of other KV groups" in caplog.text
    assert "(version 1, test, rules of its KV groups: full)" in caplog.text
    later = bytearray(several.read_bytes())
    size = read_header(str(several)).header_bytes
    struct.pack_into("<I", later, 8, 9)
    several.write_bytes(resigned(later, size))
    caplog.clear()
    third, _ = filled(make_disks, group=replace(first, rule="window", reach=9), more=more)
    assert "slab format 9.1; this version reads 1.1 and 2.1" in caplog.text
    assert len({plain, several, third}) == 3
    assert len(make_disks().unit.rows(0)) == 6
    assert several.read_bytes() == resigned(later, size)


def test_models_lie_side_by_side(make_disks: MakeDisks, tmp_path: Path) -> None:
    """Two models have separate folders if their fingerprints differ, even if their names are the same."""
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
    slab, _ = filled(make_disks)
    size = read_header(str(slab)).header_bytes
    raw = bytearray(slab.read_bytes())
    struct.pack_into("<I", raw, 8, 3)
    raw[:] = resigned(raw, size)
    slab.write_bytes(raw)
    with pytest.raises(DiskError, match=r"slab format 3\.1; this version reads 1\.1 and 2\.1"):
        make_disks()
    assert slab.read_bytes() == raw


@pytest.mark.parametrize("header_bytes", [0, 47, 4095, 8192, 1 << 26, (1 << 32) - 1])
def test_a_header_that_lies_about_its_size_is_a_damaged_one(make_disks: MakeDisks, header_bytes: int) -> None:
    slab, _ = filled(make_disks)
    with open(slab, "r+b") as file:
        file.seek(12)
        file.write(header_bytes.to_bytes(4, "little"))
    assert any("slab header" in problem for problem in check_folder(slab.parent).problems)
    world = make_disks()
    assert world.read_rows(world.unit.rows(0)) == {}


def test_a_pipe_in_a_slabs_place_is_no_slab_and_keeps_nobody_waiting(make_disks: MakeDisks) -> None:
    slab, _ = filled(make_disks)
    slab.unlink()
    os.mkfifo(slab)
    with pytest.raises(DiskError, match=r"no whole slab header \(0 bytes\)"):
        read_header(str(slab))
    assert any("no whole slab header" in problem for problem in check_folder(slab.parent).problems)
    writer = os.open(slab, os.O_RDWR)
    with pytest.raises(DiskError, match=r"no whole slab header \(0 bytes\)"):
        read_header(str(slab))
    os.close(writer)
