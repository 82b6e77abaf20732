"""The metrics page shows the counts of the remote tier."""

from __future__ import annotations

import numpy as np

from flexkv.cache.tiers.contract import TierCounts
from flexkv.cache.tiers.remote.series import remote_series
from flexkv.observe import METRICS, Counters
from flexkv.remote.plane import RemoteTotals
from tests.servers.redis import RedisServer
from tests.unit.remote.remote_unit import RemoteUnit, chain


def test_every_series_is_in_the_table() -> None:
    totals, counts = RemoteTotals(), TierCounts(dropped_writes=1, waits=1, late=1, left=1)
    totals.gets.update(["ok", "absent", "other_size", "failed", "expired", "trailer", "data", "key"])
    totals.puts.update(["ok", "known", "full", "failed", "absent"])
    totals.lookups.update(["hit", "miss", "unknown"])
    totals.bytes_got = totals.bytes_put = totals.restarts = 1
    series = remote_series(counts, totals)
    named = {name for name, _ in series}
    table = {name for name in METRICS if name.startswith("flexkv_remote_") and name.endswith("_total")}
    assert named == table
    for name, labels in series:
        METRICS[name].series(dict(labels))
    assert series["flexkv_remote_missed_pages_total", (("reason", "content"),)] == 3


def test_a_hit_from_the_store_is_counted_where_it_came_from(redis: RedisServer) -> None:
    keys = chain("prompt", 6)
    first, second = RemoteUnit(redis.url), RemoteUnit(redis.url)
    first.store(keys)
    first.settle()
    assert second.load(keys) == 24
    counters = Counters()
    second.unit.count(counters)
    second.unit.count(counters)
    values = counters.data
    assert values["flexkv_hit_blocks_total"]["remote"] == 6
    assert values["flexkv_remote_pages_total"]["read"] == 6
    assert values["flexkv_remote_lookups_total"]["hit"] == 1
    assert values["flexkv_remote_up"][""] == 1
    size = 2 * first.shape.stripe_bytes
    assert np.isclose(values["flexkv_remote_bytes_total"]["read"] / 6, size, rtol=0.1)
    for unit in (first, second):
        unit.check_no_leaks()
        assert unit.close()


def test_a_store_that_comes_back_is_seen_without_traffic(redis: RedisServer) -> None:
    unit = RemoteUnit(redis.url)
    counters = Counters()
    for up in (True, False, True):
        if not up:
            unit.plane.link.lost("as if it were gone")
            unit.poll_until(lambda: unit.tier.down, "the loss is seen")
        else:
            unit.up()
        # If a poll returns True, an adapter updates its metrics. So a unit without requests updates them, too.
        if counters.data:
            unit.poll_until(unit.unit.poll, "a unit without traffic has news")
        unit.unit.count(counters)
        assert counters.data["flexkv_remote_up"][""] == up
        assert not unit.unit.poll(), "told once"
    assert unit.close()


def test_pages_that_an_outage_kept_from_the_store_are_counted(redis: RedisServer) -> None:
    unit = RemoteUnit(redis.url)
    unit.plane.link.lost("as if it were gone")
    unit.poll_until(lambda: unit.tier.down, "the loss is seen")
    # Moves the next attempt to reach the store far into the future, so that the store stays lost.
    unit.plane.link.breaker.lost("still", unit.plane.link.breaker._until_s + 1e6)
    unit.store(chain("meanwhile", 6))
    unit.settle()
    counters = Counters()
    unit.unit.count(counters)
    assert counters.data["flexkv_remote_dropped_pages_total"]["busy"] == 6
    assert unit.close()
