"""The manager chooses between reading pages and computing them. The clock is scripted, so no real time passes."""

from __future__ import annotations

import numpy as np
import pytest

from flexkv.cache.base import GroupSpec
from flexkv.cache.ledger.cost import MIN_SAMPLES, RELIABLE_S, LinearFit
from flexkv.facts.keys import Rule
from flexkv.simulation.world import DISK
from tests.unit.cache.disk_world import BLOCK_TOKENS, DiskWorld, chain


def line_of(samples: list[tuple[float, float]]) -> tuple[float, float]:
    line = LinearFit()
    for units, seconds in samples:
        line.see(units, seconds, 0.0)
    return line.line()


def test_a_line_finds_latency_and_rate() -> None:
    latency, rate = line_of([(n, 0.5 + 0.01 * n) for n in (1, 50, 7, 300, 20)])
    assert latency == pytest.approx(0.5)
    assert rate == pytest.approx(0.01)


def test_samples_of_one_size_are_all_rate() -> None:
    assert line_of([(100, 2.0)] * 9) == pytest.approx((0.0, 0.02))


def test_neither_latency_nor_rate_is_negative() -> None:
    assert line_of([(10, 3.0), (100, 1.0)]) == pytest.approx((2.0, 0.0), abs=0.1)
    latency, rate = line_of([(10, 0.0), (100, 9.0)])
    assert latency == 0.0
    assert rate > 0
    assert line_of([]) == (0.0, 0.0)


def test_a_line_follows_what_is_seen_lately() -> None:
    line = LinearFit()
    for n in range(40):
        line.see(10 + n % 3, (10 + n % 3) * 1.0, float(n))
    for n in range(200):
        line.see(10 + n % 3, (10 + n % 3) * 0.1, 40.0 + n)
    assert line.line()[1] == pytest.approx(0.1, rel=0.05)


def test_a_line_is_believed_with_enough_and_recent_samples() -> None:
    line = LinearFit()
    for n in range(MIN_SAMPLES):
        assert not line.reliable(0.0)
        line.see(n + 1, 1.0, 0.0)
    assert line.reliable(RELIABLE_S)
    assert not line.reliable(RELIABLE_S + 1)


def world_with(
    read_page_s: float, token_s: float, latency_s: float = 0.0, load_page_s: float = 0.0, **kwargs: object
) -> DiskWorld:
    """Returns a world whose manager has measured these times, in seconds: of reading a page, computing a token,
    beginning a read, and loading a page.
    """
    world = DiskWorld(slots=16, places=64, **kwargs)  # type: ignore[arg-type]
    rates, now_s = world.manager.cost, world.now_s
    for n in (8, 16, 32, 64, 128):
        rates.fetch(DISK).see(n, latency_s + read_page_s * n, now_s)
        rates.load.see(n, load_page_s * n, now_s)
        rates.compute.see(n, token_s * n, now_s)
    return world


def on_disk(world: DiskWorld, count: int, in_host: slice = slice(0)) -> np.ndarray:
    """Puts a chain of `count` blocks on disk, and the blocks `in_host` also in host memory. Returns the keys."""
    keys = chain(count)
    world.store(keys)
    world.run()
    world.drop_host()
    if len(keys[in_host]):
        world.store(keys[in_host])
        world.run()
    return keys


def test_a_fast_disk_is_read() -> None:
    world = world_with(read_page_s=1.0, token_s=1.0)
    keys = on_disk(world, 6)
    assert world.hits(keys) == 6
    assert world.tier.counts.left == 0


def test_a_slow_disk_is_left_alone() -> None:
    world = world_with(read_page_s=1.1 * BLOCK_TOKENS, token_s=1.0)
    keys = on_disk(world, 6)
    result = world.match(keys)
    assert (result.blocks, result.reads) == (0, 0)
    assert world.take() == []
    assert not world.manager.waits("r")
    counts = world.tier.counts
    assert (counts.left, counts.left_pages) == (1, 6)
    left = world.manager.choice.last_left
    assert left is not None
    assert left.fetch_s > left.compute_s == pytest.approx(24.0)
    # While the request is not released, the manager keeps its choice and counts it only once.
    assert world.match(keys).reads == 0
    assert counts.left == 1


def test_the_setting_reads_whatever_it_takes() -> None:
    world = world_with(read_page_s=1.1 * BLOCK_TOKENS, token_s=1.0, compute_if_faster=False)
    assert world.hits(on_disk(world, 6)) == 6


def test_the_load_that_follows_counts() -> None:
    world = world_with(read_page_s=3.0, token_s=1.0, load_page_s=2.0)
    assert world.hits(on_disk(world, 6)) == 0


def test_a_short_hit_is_not_worth_the_wait() -> None:
    world = world_with(read_page_s=1.0, token_s=1.0, latency_s=10.0)
    keys = on_disk(world, 6)
    assert world.hits(keys[:3]) == 0, "13 s to read 3 pages, 12 s to compute them"
    assert world.hits(keys) == 6, "16 s to read 6 pages, 24 s to compute them"


def test_a_busy_disk_is_not_waited_for() -> None:
    world = world_with(read_page_s=2.0, token_s=1.0)
    keys, others = chain(5), chain(6, seed=1)
    for stored in (keys, others):
        world.store(stored, name=f"w{len(stored)}")
        world.run()
        world.drop_host()
    assert world.match(others, "other").reads == 1
    # Six pages are ahead in the disk's queue. So reading five pages would take 22 s, and computing them takes 20 s.
    assert world.match(keys).reads == 0
    world.run()
    world.manager.release("r")
    assert world.hits(keys) == 5


def test_what_host_memory_has_behind_a_gap_makes_the_gap_worth_reading() -> None:
    world = world_with(read_page_s=1.5 * BLOCK_TOKENS, token_s=1.0)
    keys = on_disk(world, 12, in_host=slice(2, 8))
    result = world.match(keys)
    (read,) = world.take()
    # Reading the two missing pages saves the computation of eight blocks. The engine computes the four blocks after
    # these eight.
    assert (result.reads, read.pages) == (1, 2)
    assert world.tier.counts.left_pages == 4
    world.end(read)
    after = world.match(keys)
    assert (after.blocks, after.reads) == (8, 0)


def test_pages_on_their_way_already_cost_only_the_wait() -> None:
    world = world_with(read_page_s=0.9 * BLOCK_TOKENS, token_s=1.0)
    keys = on_disk(world, 8)
    assert world.match(keys, "a").reads == 1
    assert world.match(keys, "b").reads == 1, "not counted as eight more behind the eight"
    world.run()
    assert (world.match(keys, "a").blocks, world.match(keys, "b").blocks) == (8, 8)


def test_nothing_known_reads() -> None:
    world = DiskWorld(slots=16, places=64)
    for _ in range(MIN_SAMPLES + 2):
        world.manager.cost.compute.see(100, 1e-9, world.now_s)
    assert world.hits(on_disk(world, 6)) == 6, "no read was seen yet"


def test_an_old_measurement_makes_it_look_again() -> None:
    world = world_with(read_page_s=1.1 * BLOCK_TOKENS, token_s=1.0)
    keys = on_disk(world, 6)
    assert world.hits(keys) == 0
    world.now_s += RELIABLE_S + 1
    assert world.hits(keys) == 6


def test_reads_and_loads_are_measured() -> None:
    world = DiskWorld(slots=16, places=64)
    keys = on_disk(world, 8)
    world.match(keys)
    (read,) = world.take()
    world.now_s += 4.0
    world.end(read)
    world.match(keys)
    graph = world.manager.begin_load("r", [np.arange(8, dtype=np.int32)])
    assert graph is not None
    world.now_s += 2.0
    world.load_ended(graph)
    rates = world.manager.cost
    assert rates.fetch(DISK).line() == pytest.approx((0.0, 0.5))
    assert rates.load.line() == pytest.approx((0.0, 0.25))


def test_failed_reads_measure_nothing() -> None:
    world = DiskWorld(slots=16, places=64)
    keys = on_disk(world, 4)
    world.match(keys)
    (read,) = world.take()
    world.end(read, fails=lambda page: page == 1)
    assert world.manager.cost.fetch(DISK).samples == 0


def test_groups_with_a_window_are_all_or_nothing() -> None:
    groups = (GroupSpec(4, 8), GroupSpec(4, 8, Rule.WINDOW, 2))
    full, window = chain(6), chain(6, seed=1)
    for page_s, reads in ((2.9, 2), (3.1, 0)):
        world = world_with(read_page_s=page_s, token_s=1.0, groups=groups)
        world.store(full, group=0)
        world.store(window, group=1)
        world.run()
        world.drop_host()
        # The manager compares reading eight pages with computing 24 tokens.
        assert world.manager.match("r", [full, window], 0).reads == reads
