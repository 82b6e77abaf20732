"""Units that share a store: each unit loads pages that another unit has written, and never loads a wrong byte."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from flexkv.cache.tiers.remote.tier import RemoteTier
from flexkv.facts.request_settings import RequestSettings
from flexkv.remote.base import Store
from flexkv.remote.breaker import WATCHED
from flexkv.remote.values import ValueFormat
from tests.servers.redis import RedisServer
from tests.unit.remote.helper_faults import leased
from tests.unit.remote.remote_unit import BLOCK_TOKENS, TWO_GROUPS, RemoteUnit, Shape, chain

Build = Callable[..., RemoteUnit]


@pytest.fixture
def build(redis: RedisServer) -> Iterator[Build]:
    units: list[RemoteUnit] = []

    def make(*arguments: object, **settings: object) -> RemoteUnit:
        unit = RemoteUnit(redis.url, *arguments, **settings)  # type: ignore[arg-type]
        units.append(unit)
        return unit

    yield make
    for unit in units:
        unit.check_no_leaks()
        assert unit.close()


def written(unit: RemoteUnit, *keys: object) -> None:
    for group, of_group in enumerate(keys):
        unit.store(of_group, group)  # type: ignore[arg-type]
    unit.settle()


@pytest.mark.parametrize("verify", [False, True], ids=["plain", "host.verify"])
def test_what_one_unit_has_written_serves_another(build: Build, verify: bool) -> None:
    keys = chain("prompt", 40)
    first = build(host__verify=verify)
    written(first, keys)
    assert first.plane.totals.puts["ok"] == 40
    second = build(host__verify=verify)
    assert second.load(keys) == 40 * 4
    assert second.plane.totals.gets["ok"] == 40
    assert second.load(chain("other", 8)) == 0
    assert second.tier.counts.hits == 40


def test_a_prompt_is_served_as_far_as_the_store_has_it(build: Build) -> None:
    keys = chain("prompt", 300)
    written(build(host_bytes=16 << 20), keys[:270])
    second = build(host_bytes=16 << 20)
    assert second.load(keys) == 270 * 4
    assert second.load(keys) == 270 * 4
    assert second.plane.totals.gets["ok"] == 270


@pytest.mark.parametrize(("key", "setting"), [("namespace", b"m" * 32), ("remote__tenant", "another")])
def test_others_pages_are_never_found(build: Build, key: str, setting: object) -> None:
    keys = chain("prompt", 4)
    written(build(), keys)
    assert build(**{key: setting}).load(keys) == 0
    assert build().load(keys) == 16


def test_groups_of_several_rules_are_restored_together(build: Build) -> None:
    shape = Shape(TWO_GROUPS)
    keys = [chain("prompt", 20, group) for group in range(2)]
    written(build(shape), keys[0], keys[1][:18])
    second = build(shape)
    assert second.load(*keys) == 18 * 4
    assert second.plane.totals.gets["ok"] == 18 + 2


def test_control_without_a_groups_pages_nothing_is_restored(build: Build) -> None:
    shape = Shape(TWO_GROUPS)
    keys = [chain("prompt", 20, group) for group in range(2)]
    written(build(shape), keys[0])
    assert build(shape).load(*keys) == 0


def test_pages_are_written_on_their_second_use(build: Build) -> None:
    keys = chain("prompt", 6)
    unit = build(remote__write="reuse")
    written(unit, keys)
    assert not unit.plane.totals.puts
    assert unit.load(keys[:4]) == 16
    unit.settle()
    assert unit.plane.totals.puts["ok"] == 4


def test_nothing_is_written_where_writing_is_off(build: Build) -> None:
    unit = build(remote__write="off")
    written(unit, chain("prompt", 6))
    assert unit.load(chain("prompt", 6)) == 24
    unit.settle()
    assert not unit.plane.totals.puts


def test_what_the_store_has_is_not_written_again(build: Build) -> None:
    keys = chain("prompt", 6)
    written(build(), keys)
    second = build()
    written(second, keys)
    assert second.plane.totals.puts == {"known": 6}


@pytest.mark.parametrize(("write", "tokens"), [("through", 80), ("reuse", 0)])
def test_at_the_end_what_waits_is_written_and_nothing_else(
    redis: RedisServer, build: Build, write: str, tokens: int
) -> None:
    keys = chain("prompt", 20)
    unit = RemoteUnit(redis.url, remote__write=write)
    unit.store(keys)
    assert unit.close()
    assert build().load(keys) == tokens


def test_what_the_store_lacks_is_written_from_between_what_it_has(build: Build) -> None:
    """A unit writes exactly the pages that the store lacks, even if they are not adjacent. It needs more than one
    question to find out which of the 700 pages the store lacks."""
    keys = chain("prompt", 700)
    there = np.arange(700) % 3 == 1
    first = build(host_bytes=16 << 20)
    written(first, keys[there])
    second = build(host_bytes=16 << 20)
    written(second, keys)
    assert second.plane.totals.puts == {"known": there.sum(), "ok": (~there).sum()}
    assert build(host_bytes=16 << 20).load(keys) == 4 * 700


def test_a_request_asks_once_and_absence_is_remembered(build: Build) -> None:
    unit = build()
    assert unit.load(chain("prompt", 6)) == 0
    assert sum(unit.plane.totals.lookups.values()) == 1
    assert unit.load(chain("prompt", 6)) == 0
    assert sum(unit.plane.totals.lookups.values()) == 1


def test_after_new_weights_nothing_is_read_or_written(build: Build) -> None:
    keys = chain("prompt", 6)
    written(build(), keys)
    unit = build()
    unit.manager.reset()
    assert unit.tier.down
    assert unit.load(keys) == 0
    written(unit, chain("new weights", 4))
    assert not unit.plane.totals.puts
    assert not unit.plane.totals.gets


def test_values_expire(build: Build) -> None:
    keys = chain("prompt", 3)
    unit = build(remote__ttl_s=1)
    written(unit, keys)

    def are_gone() -> bool:
        unit.lose_host()
        return unit.load(keys) == 0

    unit.poll_until(are_gone, "the values expire")


def test_a_prefetch_goes_on_when_the_store_has_answered(build: Build) -> None:
    keys = chain("prompt", 12)
    written(build(), keys)
    unit = build()
    assert unit.manager.prefetch("queued", [keys]) > 0
    unit.settle()
    assert unit.plane.totals.gets["ok"] == 12
    _, result = unit.match([keys], "queued")
    assert result.tokens == 48
    unit.manager.end_request("queued")


@pytest.mark.parametrize(
    ("settings", "pages"),
    [
        (RequestSettings(tiers=frozenset(("host", "disk"))), 0),
        (RequestSettings(skip_load=True), 0),
        (RequestSettings(max_load_tokens=5 * BLOCK_TOKENS), 5),
        (RequestSettings(tiers=frozenset(("remote",))), 12),
    ],
)
def test_a_prefetch_asks_the_store_and_reads_it_as_its_request_allows(
    build: Build, settings: RequestSettings, pages: int
) -> None:
    """A prefetch asks the store and reads from it only as the request's settings allow. The lookup that follows the
    prefetch obeys these settings, too."""
    keys = chain("prompt", 12)
    written(build(), keys)
    unit = build()
    assert bool(unit.manager.prefetch("queued", [keys], 0, settings)) is bool(pages)
    unit.settle()
    assert unit.plane.totals.gets.get("ok", 0) == pages
    assert unit.manager.match("queued", [keys], 0, None, settings).blocks == pages
    unit.manager.end_request("queued")


def test_a_budget_slows_what_is_written_and_loses_nothing(build: Build) -> None:
    keys = chain("prompt", 64)
    rate = 200_000
    unit = build(remote__put_bytes_per_s=rate)
    begun_s = time.monotonic()
    written(unit, keys)
    assert unit.plane.totals.puts["ok"] == 64
    # The budget allows a burst of one second's bytes, and sends the last of the 8 batches before it is due. So these
    # two are subtracted.
    batch = unit.plane.totals.bytes_put // 8
    assert time.monotonic() - begun_s > (unit.plane.totals.bytes_put - batch) / rate - 1


def test_what_waits_for_its_share_is_not_sent_after_the_store_was_lost(
    build: Build, redis: RedisServer
) -> None:
    unit = build(remote__put_bytes_per_s=20_000)
    unit.store(chain("prompt", 64))
    unit.poll_until(lambda: redis.ask("DBSIZE") != b":0\r\n", "a batch is written")
    unit.plane.link.lost("as the test says")
    stored = redis.ask("DBSIZE")
    unit.poll_until(lambda: not unit.plane._moving, "the write ends")
    assert redis.ask("DBSIZE") == stored
    assert unit.plane.totals.puts["ok"] == int(stored[1:]) < 64
    unit.up()
    unit.check_no_leaks()


def test_what_is_forgotten_leaves_the_store_though_this_unit_did_not_know_of_it(
    build: Build, redis: RedisServer
) -> None:
    keys = chain("prompt", 6)
    written(build(), keys)
    unit = build()
    unit.manager.forget(0, keys[2:])
    unit.poll_until(lambda: redis.ask("DBSIZE") == b":2\r\n", "the store has lost them")
    assert unit.load(keys) == 8


def test_a_store_that_is_slow_leaves_host_memory_to_the_engine(build: Build) -> None:
    """Pages that wait to be written to a slow store hold at most a quarter of the host slots, so an engine can always
    store other pages."""
    unit = build(remote__put_bytes_per_s=1)
    slots = unit.manager.hub.index.up_slots(0)
    for number in range(4 * slots):
        unit.store(chain(f"prompt {number}", 1))
        unit.unit.poll()
    last = chain(f"prompt {4 * slots - 1}", 1)
    assert unit.load(last) == 4, "the last one is there"
    assert 0 < leased(unit) <= slots // 4
    unit.plane.link.lost("what waits is given up")
    unit.poll_until(lambda: unit.tier.down, "the loss is seen")


class Spoiler:
    """Damages values in the store, as a store that corrupts bytes does, or another program that overwrites values."""

    def __init__(self, store: Store, unit: RemoteUnit) -> None:
        self._store = store
        from flexkv.cache.tiers.disk.plan import disk_groups
        from flexkv.cache.tiers.plan import UnitFacts
        from flexkv.config import load_config
        from flexkv.facts.ranks import UnitOwner
        from flexkv.remote.values import ValueOwner
        from tests.unit.remote.remote_unit import NAMESPACE

        facts = UnitFacts(
            load_config({}, {}),
            unit.shape.groups,
            tuple(unit.shape.facts().values()),
            UnitOwner("a model", NAMESPACE, "unit0"),
            True,
        )
        groups = disk_groups(facts)
        self.formats = [ValueFormat(ValueOwner(NAMESPACE), group, n) for n, group in enumerate(groups)]

    def name(self, key: np.ndarray, group: int = 0) -> str:
        return self.formats[group].name(key.tobytes())

    def read(self, key: np.ndarray, group: int = 0) -> np.ndarray:
        value = np.empty(self.formats[group].value_bytes, np.uint8)
        assert self._store.get([self.name(key, group)], [[value]], 5.0)[0].name == "OK"
        return value

    def write(self, key: np.ndarray, value: np.ndarray, group: int = 0) -> None:
        assert self._store.put([self.name(key, group)], [[np.ascontiguousarray(value)]], 5.0)[0].name == "OK"


TRAILER_FIELDS = {
    "magic": 0,
    "version": 8,
    "runs": 12,
    "owner": 16,
    "place": 24,
    "key": 32,
    "generation": 48,
    "expiry": 56,
    "epoch": 64,
    "tokens": 68,
    "written": 72,
    "group": 80,
    "tenant key": 84,
    "digest": 88,
    "first leaf": 96,
}


@pytest.mark.parametrize("field", [*TRAILER_FIELDS, "stripe 0", "stripe 1"])
def test_a_flipped_bit_is_a_miss_and_the_value_is_removed(
    build: Build, redis_store: Store, field: str
) -> None:
    keys = chain("prompt", 5)
    first = build()
    written(first, keys)
    spoiler = Spoiler(redis_store, first)
    value = spoiler.read(keys[2])
    at = {"stripe 0": 17, "stripe 1": first.shape.stripe_bytes + 4000}.get(field)
    if at is None:
        at = 2 * first.shape.stripe_bytes + TRAILER_FIELDS[field]
    value[at] ^= 1
    spoiler.write(keys[2], value)
    second = build()
    assert second.load(keys) == 8
    assert second.plane.totals.gets["ok"] == 4
    assert redis_store.exists([spoiler.name(keys[2])], 5.0)[0].name == "NO"
    # After the page has been recomputed, the unit writes it to the store again, and other units load it.
    written(second, keys)
    assert build().load(keys) == 20


def test_short_long_and_exchanged_values_are_misses(build: Build, redis_store: Store) -> None:
    keys = chain("prompt", 6)
    first = build()
    written(first, keys)
    spoiler = Spoiler(redis_store, first)
    value = spoiler.read(keys[1])
    spoiler.write(keys[1], value[:-1])
    spoiler.write(keys[2], np.append(value, np.zeros(1, np.uint8)))
    spoiler.write(keys[4], spoiler.read(keys[5]))
    second = build()
    assert second.load(keys) == 4
    totals = second.plane.totals.gets
    assert (totals["ok"], totals["other_size"], totals["key"]) == (3, 2, 1)


@pytest.mark.parametrize("kind", ["another type", "another size", "damaged"])
def test_many_foreign_values_are_misses_and_leave_the_store_in_use(
    build: Build, redis: RedisServer, redis_store: Store, kind: str
) -> None:
    """If a store has many values that are damaged or have another type, their pages are misses, and the unit does not
    treat the store as lost. There are more such values than the breaker watches. The unit removes them, and writes the
    recomputed pages again."""
    keys = chain("prompt", WATCHED + 10)
    first = build()
    written(first, keys)
    spoiler = Spoiler(redis_store, first)
    for key in keys:
        if kind == "another type":
            redis.ask("DEL", spoiler.name(key))
            redis.ask("LPUSH", spoiler.name(key), "somebody else's")
        else:
            value = spoiler.read(key)
            value[5] ^= 1
            spoiler.write(key, value[:-1] if kind == "another size" else value)
    second = build()
    assert second.load(keys) == 0
    assert second.plane.totals.gets["failed"] == 0
    assert second.plane.link.usable
    assert redis_store.exists([spoiler.name(keys[0])], 5.0)[0].name == "NO"
    written(second, keys)
    assert build().load(keys) == 4 * len(keys)


def test_control_without_a_check_another_pages_bytes_are_loaded(
    build: Build, redis: RedisServer, redis_store: Store
) -> None:
    """A control: if flexkv's check accepts a value with another page's bytes, the comparison of bytes in these tests
    notices it. One page's bytes are stored under another page's key, with a trailer that matches that key."""
    keys = chain("prompt", 2)
    first = build()
    written(first, keys)
    spoiler = Spoiler(redis_store, first)
    form, value = spoiler.formats[0], spoiler.read(keys[0])
    size = first.shape.stripe_bytes
    slot = np.zeros(first.unit.pool.slot_bytes, np.uint8)
    for part, target in zip(
        (value[:size], value[size : 2 * size]), form.parts(slot, value[:0])[:2], strict=True
    ):
        target[:] = part
    trailer = np.zeros(form.trailer_bytes, np.uint8)
    form.seal(slot, trailer, keys[1], 4, 0, 1)
    spoiler.write(keys[1], np.concatenate((value[: 2 * size], trailer)))
    second = RemoteUnit(redis.url)
    with pytest.raises(AssertionError, match="a wrong byte"):
        second.load(keys)
    second.close()


def test_a_tier_that_is_off_costs_nothing(redis: RedisServer) -> None:
    unit = RemoteUnit("none")
    assert not any(isinstance(tier, RemoteTier) for tier in unit.manager.tiers)
    assert unit.close()
