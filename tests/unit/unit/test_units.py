"""How a unit behaves in each of its states. If a unit cannot be built, no lock, thread or memory remains."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flexkv.cache.base import GroupSpec
from flexkv.cache.manager import LocalCacheManager
from flexkv.cache.tiers import factory
from flexkv.cache.tiers.contract import TierFacts
from flexkv.cache.tiers.disk.plan import plan_disk
from flexkv.cache.tiers.plan import TierPlan, UnitFacts
from flexkv.cache.tiers.tables import TierContext, TierFactory
from flexkv.config import load_config
from flexkv.errors import ContractError, DiskError, GeometryError
from flexkv.facts.ranks import NO_UNIT, GroupFacts, KvGroup, RankFacts, UnitOwner
from flexkv.observe import Counters
from flexkv.transfer.graph import OpResult, OpStatus
from flexkv.transfer.host_pool import HostPool
from flexkv.unit.base import CacheRole, EngineUnit, UnitState
from flexkv.unit.build import build_unit
from flexkv.unit.live_unit import LiveUnit
from flexkv.unit.null_unit import NullUnit
from flexkv.unit.tier_metrics import TierMetrics
from tests.unit.cache.test_tier_seam import ToyTier

STRIPE = 4096
OWNER = UnitOwner("a model", b"n" * 32, "unit0")
KEYS = np.random.default_rng(0).integers(0, 256, (3, 16), dtype=np.uint8)
BLOCKS = np.arange(3, dtype=np.int32)
DEADLINE_S = 30.0

Build = Callable[..., LiveUnit]


def facts(rank: int = 0, **more: object) -> RankFacts:
    run = np.array([[0, STRIPE, 0]], np.int64)
    return RankFacts(rank, 0, 8, (GroupFacts(STRIPE, run, "a format"),), **more)  # type: ignore[arg-type]


@pytest.fixture
def build() -> Iterator[Build]:
    units: list[LiveUnit] = []

    def make(
        ranks: int = 1,
        role: CacheRole = CacheRole(),  # noqa: B008 - frozen
        grown: bool = True,
        **settings: object,
    ) -> LiveUnit:
        small = {"host.bytes": 1 << 20, "host.huge_pages": "off"}
        config = load_config(small | {key.replace("__", "."): value for key, value in settings.items()}, {})
        unit = build_unit(config, [KvGroup(4)], {rank: facts(rank) for rank in range(ranks)}, OWNER, role)
        units.append(unit)
        if grown:
            unit.grow()
        return unit

    yield make
    for unit in units:
        unit.close()
        unit.manager.check_integrity()


def store(unit: EngineUnit) -> OpResult | None:
    """Begins a store of `KEYS`. Returns a result with which the test can report the store as successful, or None if
    there is nothing to store."""
    plan = unit.manager.begin_store("store", 0, KEYS, BLOCKS, 0)
    if plan.graph is None:
        return None
    (op,) = plan.graph.ops
    return OpResult(op.op_id, OpStatus.OK, np.empty(0, np.int32), "")


def stored(unit: LiveUnit) -> LiveUnit:
    result = store(unit)
    assert result is not None
    unit.manager.complete(0, result)
    return unit


def hit(unit: EngineUnit) -> int:
    blocks = unit.manager.match("probe", [KEYS], 0).blocks
    unit.manager.release("probe")
    return blocks


def in_state(state: UnitState, build: Build) -> EngineUnit:
    """Returns a unit in the given state. The unit has stored KEYS, unless it still waits for its ranks."""
    if state is UnitState.AWAITING_RANKS:
        return NullUnit()
    unit = stored(build())
    if state is UnitState.DISABLED:
        unit.disable(0, "no memory")
    if state is UnitState.CLOSED:
        unit.close()
    assert unit.state is state
    return unit


EVERY_STATE = pytest.mark.parametrize("state", list(UnitState), ids=lambda state: state.name)


@EVERY_STATE
def test_only_a_usable_unit_promises_and_stores(state: UnitState, build: Build) -> None:
    unit = in_state(state, build)
    usable = state is UnitState.USABLE
    assert unit.usable is usable
    assert hit(unit) == (3 if usable else 0)
    unit.manager.forget(0, KEYS)
    assert (store(unit) is not None) is usable
    assert bool(unit.reason) is (state in (UnitState.DISABLED, UnitState.CLOSED))


def test_control_a_manager_that_is_not_disabled_goes_on_promising(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalCacheManager, "disable", lambda self: None)
    assert hit(in_state(UnitState.DISABLED, build)) == 3


@EVERY_STATE
def test_every_call_is_allowed_in_every_state(state: UnitState, build: Build) -> None:
    unit, counters = in_state(state, build), Counters()
    unit.grow()
    unit.rank_ready({0: 1})
    unit.stop_straight_loads(0, "no lane")
    unit.expire_if_due(counters)
    unit.count(counters)
    unit.manager.release("nobody")
    unit.manager.end_request("nobody")
    unit.manager.check_integrity()
    assert not unit.poll()
    assert not unit.busy
    unit.disable(0, "once more")
    assert unit.close() == unit.close()
    assert unit.state is UnitState.CLOSED


def until_all_is_up(unit: LiveUnit) -> None:
    ends_s = time.monotonic() + DEADLINE_S
    while unit.growing:
        assert time.monotonic() < ends_s
        unit.grow()


def test_the_pool_is_polled_until_all_of_it_is_up_and_logged(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []

    def half(pool: HostPool) -> int:
        looks.append(pool.slots // 2)
        return looks[-1]

    monkeypatch.setattr(HostPool, "ready_slots", property(half))
    unit = build()
    unit.grow()
    assert (len(looks), unit.manager.free_slots(0)) == (2, unit.slots // 2)
    monkeypatch.undo()
    until_all_is_up(unit)
    assert unit.pool.settled
    assert unit.manager.free_slots(0) == unit.slots
    monkeypatch.setattr(HostPool, "ready_slots", property(half))
    unit.grow()
    assert len(looks) == 2


@EVERY_STATE
def test_what_is_in_flight_ends(state: UnitState, build: Build) -> None:
    if state is UnitState.AWAITING_RANKS:
        with pytest.raises(ContractError, match="nothing was planned"):
            NullUnit().manager.complete(0, OpResult.cancelled(1, 1, ""))  # type: ignore[arg-type]
        return
    unit = build()
    result = store(unit)
    assert result is not None
    if state is UnitState.DISABLED:
        unit.disable(0, "no memory")
    if state is UnitState.CLOSED:
        unit.close()
    assert unit.manager.inflight_ops() == 1
    done = unit.manager.complete(0, result)
    assert done is not None
    assert done.published.tolist() == [0, 1, 2]
    assert unit.manager.inflight_ops() == 0


@EVERY_STATE
def test_a_reset_is_carried_out_or_noted(state: UnitState, build: Build) -> None:
    unit = in_state(state, build)
    unit.manager.reset()
    if isinstance(unit, NullUnit):
        assert unit.was_reset
        assert not NullUnit().was_reset
    else:
        assert isinstance(unit, LiveUnit)
        assert unit.manager.cached_blocks() == 0


def test_what_a_disabled_unit_has_published_goes_to_disk(build: Build, tmp_path: Path) -> None:
    unit = stored(build(disk__folders=str(tmp_path), disk__bytes_per_folder="1MiB"))
    unit.disable(0, "no memory")
    assert unit.busy
    ends_s = time.monotonic() + DEADLINE_S
    while unit.busy:
        assert time.monotonic() < ends_s, "the pages were not written"
        unit.poll()
    assert unit.close()
    again = build(disk__folders=str(tmp_path), disk__bytes_per_folder="1MiB")
    assert again.manager.present(0, KEYS).all()


def test_a_promise_made_before_is_kept_by_a_unit_that_was_disabled(build: Build) -> None:
    unit = stored(build())
    assert unit.manager.match("request", [KEYS], 0).blocks == 3
    unit.disable(0, "no memory")
    graph = unit.manager.begin_load("request", [BLOCKS])
    assert graph is not None
    (op,) = graph.ops
    assert unit.manager.complete(0, OpResult(op.op_id, OpStatus.OK, np.empty(0, np.int32), "")) is not None


def test_slots_are_used_that_every_device_has_registered(build: Build) -> None:
    unit = build(ranks=2, role=CacheRole(shared=True))
    unit.make_grant(on_device=True)
    up = unit.manager.free_slots(0)
    assert up == unit.slots, "on a host device they are up for all at once"
    behind = build(ranks=2, role=CacheRole(shared=True), grown=False)
    behind.make_grant(on_device=True)
    for ready, usable in (({}, 0), ({1: behind.slots}, 0), ({0: 3}, 3), ({0: 5}, 5)):
        behind.rank_ready(ready)
        behind.grow()
        assert behind.manager.free_slots(0) == usable


@pytest.mark.parametrize(
    ("recomputes", "fails_requests", "rests"),
    [(False, True, True), (True, True, False), (False, False, False)],
)
def test_an_engine_rests_after_a_failed_load_that_ends_its_request(
    recomputes: bool, fails_requests: bool, rests: bool, build: Build
) -> None:
    unit = stored(build(role=CacheRole(recomputes=recomputes, fails_requests=fails_requests)))
    unit.manager.match("request", [KEYS], 0)
    graph = unit.manager.begin_load("request", [BLOCKS])
    assert graph is not None
    (op,) = graph.ops
    cancelled = OpResult.cancelled(op.op_id, len(BLOCKS), "late")
    unit.manager.complete(0, cancelled)
    assert hit(unit) == (0 if rests else 3)


def test_a_grant_ends_when_every_rank_is_ready_or_the_unit_is_disabled(build: Build) -> None:
    unit = build(ranks=2, role=CacheRole(shared=True))
    unit.grant = unit.make_grant(on_device=False)
    unit.rank_ready({0: unit.slots})
    assert unit.grant is not None
    unit.rank_ready({1: unit.slots})
    assert unit.grant is None
    unit.grant = unit.make_grant(on_device=False)
    unit.disable(1, "no memory")
    assert unit.grant is None


def test_units_have_numbers_of_their_own(build: Build) -> None:
    assert NullUnit().unit_id == NO_UNIT
    assert len({build().unit_id, build().unit_id, NO_UNIT}) == 3


# --- units that cannot be built ---

HALVES = np.array([[0, STRIPE // 2, 1], [STRIPE // 2, STRIPE // 2, 0]], np.int64)


def shared(rank: int = 0, **other: object) -> RankFacts:
    """Returns the facts of a rank whose pool has the same bytes as the pool of the other rank."""
    said = facts(rank, replicas=2)
    return replace(said, groups=(replace(said.groups[0], **other),))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ({1: facts(1)}, r"ranks \[1\]; expected 0 to 0"),
        ({0: facts(), 1: replace(facts(1), num_blocks=9)}, "8, 9 blocks"),
        ({0: facts(), 1: facts(1, replicas=2)}, "do not agree"),
        ({}, "no rank has said"),
        ({0: facts(replicas=2)}, "2 of 1 ranks hold the same bytes; allowed is what divides"),
        ({0: facts(replicas=0)}, "0 of 1 ranks"),
        ({0: shared(), 1: shared(1, stripe_bytes=2 * STRIPE)}, "do not agree"),
        ({0: shared(), 1: shared(1, format_id="another")}, "do not agree"),
        ({0: shared(), 1: shared(1, run_table=HALVES)}, "do not agree"),
    ],
)
def test_ranks_that_do_not_agree_are_refused(ranks: dict[int, RankFacts], message: str) -> None:
    with pytest.raises(GeometryError, match=message):
        build_unit(load_config({"host.bytes": 1 << 20}, {}), [KvGroup(4)], ranks, OWNER)


def test_ranks_in_a_row_share_a_stripe() -> None:
    ranks = {rank: facts(rank, replicas=2) for rank in range(6)}
    config = load_config({"host.bytes": 1 << 20, "host.huge_pages": "off"}, {})
    unit = build_unit(config, [KvGroup(4)], ranks, OWNER)
    try:
        assert [places[0].stripe // STRIPE for places in unit.places] == [0, 0, 1, 1, 2, 2]
    finally:
        unit.close()
    with pytest.raises(GeometryError, match="4 of 6 ranks"):
        build_unit(config, [KvGroup(4)], {r: facts(r, replicas=4) for r in range(6)}, OWNER)
    other = replace(ranks[3], groups=(replace(ranks[3].groups[0], run_table=HALVES),))
    with pytest.raises(GeometryError, match="do not agree"):
        build_unit(config, [KvGroup(4)], ranks | {3: other}, OWNER)


def test_a_unit_without_groups_is_refused() -> None:
    with pytest.raises(GeometryError, match="no KV group"):
        build_unit(load_config({"host.bytes": 1 << 20}, {}), [], {0: replace(facts(), groups=())}, OWNER)


class Unopenable(TierPlan):
    """The plan of a tier that cannot be opened. The unit opens this tier after the disk tier."""

    def open(self, pool: HostPool, on_error: ExitStack) -> TierFactory:
        raise DiskError("no such luck")


def plan_unopenable(unit: UnitFacts) -> TierPlan:
    return Unopenable()


def test_a_tier_that_cannot_be_opened_leaves_no_folder_locked_and_no_thread(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = set(threading.enumerate())
    with monkeypatch.context() as patched:
        patched.setattr(factory, "TIERS", (plan_disk, plan_unopenable))
        with pytest.raises(DiskError, match="no such luck"):
            build(disk__folders=str(tmp_path), disk__bytes_per_folder="1MiB")
    assert {thread.name for thread in set(threading.enumerate()) - threads} == set()
    assert build(disk__folders=str(tmp_path), disk__bytes_per_folder="1MiB").has_tiers


def test_control_without_cleaning_up_the_folder_stays_locked(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = ExitStack()
    with monkeypatch.context() as patched:
        patched.setattr(factory, "TIERS", (plan_disk, plan_unopenable))
        patched.setattr(ExitStack, "__exit__", lambda self, *error: left.push(self.pop_all()) and None)
        with pytest.raises(DiskError, match="no such luck"):
            build(disk__folders=str(tmp_path), disk__bytes_per_folder="1MiB")
    with pytest.raises(DiskError, match=r"in use|uses"):
        build(disk__folders=str(tmp_path), disk__bytes_per_folder="1MiB")
    left.close()


@pytest.mark.parametrize(("name", "counted"), [("remote", False), ("disk", True)])
def test_disk_metrics_count_tiers_on_disk_alone(name: str, counted: bool) -> None:
    def tier(context: TierContext) -> ToyTier:
        made = ToyTier(context)
        made.facts = TierFacts(name)
        return made

    manager = LocalCacheManager([GroupSpec(4, 8)], tiers=[*factory.unit_tiers(), tier])
    manager.tiers[1].counts.read = manager.tiers[1].counts.evicted = 5
    counters = Counters()
    TierMetrics(manager).count(counters)
    of_disk = {name for name in counters.data if name.startswith("flexkv_disk_")}
    assert bool(of_disk) == counted
    assert counters.data.get("flexkv_disk_pages_total", {}) == ({"read": 5} if counted else {})
