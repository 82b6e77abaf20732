"""A slab's header says whose pages follow; a damaged one costs its slab, another's is left alone."""

from __future__ import annotations

import os
import shutil
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flexkv import c_ext
from flexkv.errors import DiskError
from flexkv.storage.folder import unit_folders
from flexkv.storage.fsck import check_folder
from flexkv.storage.header import FIXED, parse_header, read_group, read_header
from flexkv.transfer.graph import OpStatus
from tests.unit.storage.damage import filled, flip
from tests.unit.storage.disk_world import IDENTITY, MakeDisks, make_group


def test_a_flipped_bit_in_any_field_of_the_header(make_disks: MakeDisks) -> None:
    slab, _ = filled(make_disks)
    raw = bytearray(slab.read_bytes()[: read_header(str(slab)).header_bytes])
    parse_header(bytes(raw), "it")
    for at in [*range(FIXED.size), FIXED.size + 3, FIXED.size + 60, FIXED.size + 200, len(raw) - 1]:
        raw[at] ^= 1
        with pytest.raises(DiskError, match=r"it: (damaged slab header|no slab of ours)"):
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
    assert len(world.unit.rows(0)) == 0


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
