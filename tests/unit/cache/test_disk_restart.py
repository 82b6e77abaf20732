"""The next process finds on disk in which order blocks were used, and which chains they form. The folders are real, but
no page moves.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from flexkv.cache.base import GroupSpec
from flexkv.cache.manager import LocalCacheManager
from flexkv.cache.tiers.disk.tier import DiskTier
from flexkv.cache.tiers.factory import unit_tiers
from flexkv.facts.keys import Keys
from flexkv.storage.base import DiskGroup, DiskIdentity, DiskOptions
from flexkv.storage.striped_slabs import StripedSlabs
from tests.unit.cache.disk_world import chain, disk_tier

PLACES = 24
IMAGE_BYTES = 8192
DEADLINE_S = 60.0


class Restarts:
    """Opens a disk tier on the same two folders several times, like consecutive processes. The wall clock is
    scripted.
    """

    def __init__(self, folder: Path) -> None:
        self.now_s = 1_000_000.0
        self._folders = [folder / "a", folder / "b"]
        self.tier: StripedSlabs | None = None

    def open(self) -> DiskTier:
        self.close()
        group = DiskGroup("test", (4096,), (np.array([[0, 4096, 0]]),), 4)
        options = DiskOptions(PLACES // 2 * IMAGE_BYTES + (64 << 10), preallocate=False)
        self.tier = StripedSlabs.open(self._folders, DiskIdentity("test", bytes(32)), [group], options)
        tiers = unit_tiers(self.tier)
        manager = LocalCacheManager([GroupSpec(4, PLACES)], tiers=tiers, unix_s=lambda: self.now_s)
        return disk_tier(manager)

    def close(self) -> None:
        if self.tier is not None:
            assert self.tier.close(DEADLINE_S)
            self.tier = None

    def write(self, index: DiskTier, keys: Keys) -> None:
        """Puts a chain into the index as written. Waits until its records, which contain the time of its use, are
        durable.
        """
        assert self.tier is not None
        entries = index.begin_write(0, keys, np.full(len(keys), 4, np.int32), len(keys))[1]
        assert index.end_write(0, entries, np.ones(len(entries), np.bool_)).all()
        durable, ends_s = 0, time.monotonic() + DEADLINE_S
        while durable < len(entries):
            durable += sum(len(pages.places) for pages in self.tier.poll().durable)
            assert time.monotonic() < ends_s
            time.sleep(0.001)


@pytest.fixture
def restarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Restarts]:
    world = Restarts(tmp_path)
    monkeypatch.setattr(time, "time", lambda: world.now_s)
    yield world
    world.close()


def kept(index: DiskTier, keys: Keys) -> list[bool]:
    return index.present(0, keys).tolist()


def test_what_was_used_last_stays_over_a_restart(restarts: Restarts) -> None:
    index = restarts.open()
    places = index.presence.up_slots(0)
    chains = [chain(places // 3, seed) for seed in range(3)]
    for keys in chains:
        restarts.write(index, keys)
        restarts.now_s += 10
    index.used(0, chains[0])
    index = restarts.open()
    assert len(index) == places // 3 * 3
    restarts.write(index, chain(places // 3 + places % 3, seed=9))
    assert all(kept(index, chains[0])), "used last"
    assert not any(kept(index, chains[1])), "used longest ago"
    assert all(kept(index, chains[2]))


def test_a_chain_loses_its_end_first_over_a_restart(restarts: Restarts) -> None:
    index = restarts.open()
    places = index.presence.up_slots(0)
    keys = chain(places)
    restarts.write(index, keys)
    index = restarts.open()
    restarts.write(index, chain(5, seed=1))
    assert kept(index, keys) == [True] * (places - 5) + [False] * 5


def test_a_chain_is_one_walk_after_a_restart(restarts: Restarts) -> None:
    index = restarts.open()
    keys = chain(index.presence.up_slots(0))
    restarts.write(index, keys)
    index = restarts.open()
    entries = index.presence.match_prefix(0, keys)
    assert np.array_equal(np.diff(entries.astype(np.int64)), np.ones(len(keys) - 1))
