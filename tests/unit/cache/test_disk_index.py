"""Pages on disk are evicted, expire, are lost with a disk, or are found again by the next process."""

from __future__ import annotations

from tests.unit.cache.disk_world import DiskWorld, chain, traffic, written


def test_the_disk_evicts_what_was_used_least() -> None:
    world = DiskWorld(slots=8, places=8)
    old, new = chain(6, seed=1), chain(5, seed=2)
    world.store(old)
    world.run()
    world.drop_host()
    assert world.hits(old[:3]) == 3
    world.store(new)
    world.run()
    assert world.tier.counts.evicted == 3
    world.drop_host()
    assert world.hits(old) == 3
    world.drop_host()
    assert world.hits(new) == 5


def test_a_new_manager_finds_what_the_last_one_wrote() -> None:
    keys = chain(6)
    disk = written(keys, slots=8).disk
    world = DiskWorld(disk=disk)
    assert len(world.tier) == 6
    assert world.hits(keys) == 6
    world.store(chain(4, seed=3))
    world.run()
    world.drop_host()
    assert world.hits(chain(4, seed=3)) == 4
    world.drop_host()
    assert world.hits(keys) == 6, "the new writes took other places"


def test_a_stale_row_is_a_miss() -> None:
    keys = chain(4)
    disk = written(keys).disk
    place = next(iter(disk.journal[0]))
    disk.content[0][place] = ((b"x" * 16, 99, 0, 4), [(0, b"x" * 16)])
    world = DiskWorld(disk=disk)
    assert world.hits(keys) < 4


def test_a_lost_disk_is_a_miss_and_the_other_goes_on() -> None:
    keys = chain(8)
    world = written(keys)
    world.disk.lose(0)
    for lost in world.disk.poll().lost:
        world.tier.lose(lost.disk)
    world.manager.check_integrity()
    assert world.tier.counts.gone == 4
    world.store(keys)
    world.run()
    assert all(place % 2 == 1 for place in world.disk.journal[0])
    assert len(world.tier) == 8
    world.drop_host()
    assert world.hits(keys) == 8


def test_a_disk_that_was_lost_before_the_start_gets_no_page() -> None:
    disk = written(chain(8)).disk
    disk.lose(1)
    world = DiskWorld(disk=disk)
    world.store(chain(6, seed=2))
    world.run()
    assert all(place % 2 == 0 for place in disk.journal[0])


def test_pages_expire() -> None:
    keys = chain(4)
    world = written(keys, limits=traffic(ttl_s=60))
    world.now_s += 59
    assert world.hits(keys[:2]) == 2
    world.drop_host()
    world.now_s += 2
    assert world.match(keys).reads == 0
    assert world.tier.counts.expired == 4
    assert world.disk.journal == [{}]


def test_pages_behind_one_whose_time_is_over_do_not_lead() -> None:
    keys = chain(4)
    world = written(keys[2:3], limits=traffic(ttl_s=60))
    world.now_s += 30
    world.store(keys)
    world.run()
    assert len(world.tier.leading(0, keys)) == 4
    world.now_s += 31
    leading = world.tier.leading(0, keys)
    assert world.tier.presence.keys_of(leading).tolist() == keys[:2].tolist()
    assert world.tier.counts.expired == 1


def test_expiry_survives_the_process() -> None:
    keys = chain(4)
    disk = written(keys, limits=traffic(ttl_s=60)).disk
    world = DiskWorld(disk=disk)
    world.now_s += 61
    assert world.hits(keys) == 0
