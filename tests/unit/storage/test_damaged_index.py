"""An index that is damaged, lost or locked costs no page that is whole."""

from __future__ import annotations

import sqlite3

import pytest

from flexkv.errors import DiskError
from flexkv.storage.index import DamagedIndexError, SlotIndex
from tests.unit.storage.damage import filled
from tests.unit.storage.disk_world import MakeDisks


def test_a_damaged_index_is_made_anew_from_the_slabs(make_disks: MakeDisks) -> None:
    slab, generations = filled(make_disks)
    index = slab.parent / "index.sqlite"
    index.write_bytes(b"no database at all" * 300)
    with pytest.raises(DamagedIndexError, match=r"index\.sqlite: file is not a database"):
        SlotIndex(index, [32])
    world = make_disks()
    rows = world.unit.rows(0)
    assert sorted(rows.places.tolist()) == list(range(6))
    assert world.read_rows(rows) == {}
    assert world.unit.next_generations(1)[0] > generations.max()
    assert (slab.parent / "index.damaged").exists()


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


def test_writes_recorded_at_the_last_moment_are_durable(make_disks: MakeDisks) -> None:
    world = make_disks()
    world.write(range(8), range(8))
    assert world.close()
    assert len(make_disks().unit.rows(0)) == 8
