"""A slab's header says whose pages follow; a damaged one costs its slab, another's is left alone."""

from __future__ import annotations

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
from flexkv.storage.base import DiskOptions
from flexkv.storage.folder import unit_folder, unit_folders
from flexkv.storage.fsck import check_folder
from flexkv.storage.header import FIXED, DamagedHeaderError, parse_header, read_group, read_header
from flexkv.storage.striped_slabs import StripedSlabs
from flexkv.transfer.graph import OpStatus
from tests.soak import soak_factor
from tests.unit.storage.damage import filled, flip
from tests.unit.storage.disk_world import IDENTITY, MakeDisks, make_group
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
    """Another model's leaves the slab alone; one of the same model names another slab, so that no trailer matches."""
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
