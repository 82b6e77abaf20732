"""After each step, a manager with a disk tier is compared with the model. Broken managers must be caught."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from flexkv.c_ext import eviction_policies
from flexkv.cache.base import GroupSpec
from flexkv.cache.manager import LocalCacheManager
from flexkv.cache.tiers.contract import WriteMode
from flexkv.facts.keys import Rule
from flexkv.simulation.base import SimulationConfig
from flexkv.simulation.run import Simulation
from flexkv.transfer.graph import FailureCause, OpResult
from tests.soak import soak_rounds
from tests.unit.cache.broken_disk_managers import BROKEN
from tests.unit.cache.broken_gds_managers import BROKEN_GDS_LOADS, BROKEN_GDS_STORES
from tests.unit.cache.broken_managers import caught_by
from tests.unit.cache.broken_streams import BROKEN_STREAMS

GROUPS = {
    "one group": (GroupSpec(4, 12),),
    "two groups": (GroupSpec(4, 12), GroupSpec(4, 16)),
    "hybrid": (GroupSpec(4, 12), GroupSpec(4, 12, Rule.WINDOW, 2)),
}
STEPS = 6_000


def config(seed: int, groups: str, mode: WriteMode, steps: int = STEPS) -> SimulationConfig:
    return SimulationConfig(
        seed=seed,
        steps=steps,
        groups=GROUPS[groups],
        ranks=1 + seed % 2,
        ordered_reports=seed % 3 != 2,
        disk_places=(40, 64)[seed % 2],
        disk_mode=mode,
        disks=1 + seed % 3,
    )


@pytest.mark.soak
@soak_rounds(2)
@pytest.mark.parametrize("mode", [WriteMode.THROUGH, WriteMode.BACK, WriteMode.EVICT])
@pytest.mark.parametrize("groups", GROUPS)
def test_no_rule_is_broken(groups: str, mode: WriteMode, soak_round: int) -> None:
    report = Simulation(config(soak_round, groups, mode)).run()
    assert report.steps == STEPS
    assert report.verified_pages > 50
    assert report.disk.written > 10
    assert report.disk.read > (0 if mode is WriteMode.EVICT else 5)


@pytest.mark.parametrize("policy", eviction_policies())
def test_no_rule_is_broken_with_any_eviction_policy(policy: str) -> None:
    for mode in (WriteMode.THROUGH, WriteMode.BACK, WriteMode.EVICT):
        run = dataclasses.replace(config(3, "two groups", mode, 3_000), policy=policy)
        report = Simulation(run).run()
        assert report.disk.written > 5
        assert report.stats.evicted_blocks > 0


def test_every_action_and_outcome_occurs() -> None:
    modes = (WriteMode.BACK, WriteMode.THROUGH)
    reports = [Simulation(config(seed, "one group", modes[seed % 2])).run() for seed in range(1, 7)]
    actions = {name for report in reports for name in report.actions}
    assert {"disk_move", "disk_deliver", "disk_cancel", "disk_lose", "prefetch"} <= actions
    outcomes = (
        "written",
        "failed_writes",
        "dropped_writes",
        "read",
        "failed_reads",
        "unread",
        "evicted",
        "gone",
    )
    for name in (*outcomes, "waits", "lost", "prefetched"):
        assert sum(getattr(report.disk, name) for report in reports) > 0, name


def test_ranks_and_disks_blame_everybody_and_nobody() -> None:
    """The simulation covers all failure causes: each cause occurs in disk ops, in loads from host memory and in GDS
    loads.
    """
    said: dict[str, set[int]] = {}

    class Hears(LocalCacheManager):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            complete = self.work.complete

            def of_disk(result: OpResult) -> None:
                said.setdefault("disk", set()).update(result.causes.tolist())
                complete(result)

            self.work.complete = of_disk  # type: ignore[method-assign]

        def complete(self, rank: int, result: OpResult) -> Any:
            kind = self.tables.ops.get(result.op_id).kind.name
            said.setdefault(kind, set()).update(result.causes.tolist())
            return super().complete(rank, result)

    for seed in range(8):
        gds = dataclasses.replace(
            config(seed, "one group", WriteMode.THROUGH),
            gds_loads=seed > 0,
            failure_rate=0.1,
            source_error_rate=0.5,
        )
        Simulation(gds, Hears).run()
    for of_whom in ("disk", "H2D", "GDS_READ"):
        assert said[of_whom] == set(FailureCause), of_whom


def test_what_is_computed_sooner_is_left_to_the_engine() -> None:
    reports = [
        Simulation(dataclasses.replace(config(seed, groups, WriteMode.THROUGH), measured_steps=True)).run()
        for seed, groups in enumerate(GROUPS)
    ]
    for report in reports:
        assert report.disk.left > 0
        assert report.disk.read > 0
        assert report.verified_pages > 50


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("groups", GROUPS)
def test_no_rule_is_broken_by_promises_of_what_comes_up(groups: str, seed: int) -> None:
    streaming = dataclasses.replace(
        config(seed, groups, WriteMode.THROUGH), stream=True, measured_steps=bool(seed)
    )
    report = Simulation(streaming).run()
    assert report.steps == STEPS
    assert report.verified_pages > 50
    # flexkv streams only full-attention groups, so a request with a window group waits as usual.
    assert (report.streamed_pages > 5) == (groups != "hybrid")
    assert report.stats.streamed_pages == report.streamed_pages


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("groups", GROUPS)
def test_no_rule_is_broken_by_gds_loads(groups: str, seed: int) -> None:
    gds = dataclasses.replace(
        config(seed, groups, WriteMode.THROUGH), gds_loads=True, measured_steps=bool(seed), stream=bool(seed)
    )
    report = Simulation(gds).run()
    assert report.steps == STEPS
    assert report.verified_pages > 50
    assert (report.gds_pages > 5) == (groups != "hybrid")
    assert 0 < report.disk.gds_read <= report.gds_pages or groups == "hybrid"


@pytest.mark.parametrize("seed", [0, 5])
@pytest.mark.parametrize("groups", GROUPS)
def test_no_rule_is_broken_by_gds_stores(groups: str, seed: int) -> None:
    gds = dataclasses.replace(
        config(seed, groups, WriteMode.THROUGH), gds_loads=True, gds_stores=True, measured_steps=bool(seed)
    )
    report = Simulation(gds).run()
    assert report.steps == STEPS
    assert report.verified_pages > 50
    counts = report.disk
    assert counts.gds_written > 50
    from_host = counts.written - counts.gds_written
    assert from_host <= report.stored_while_read + counts.failed_reads, "only what a read was bringing"
    assert counts.failed_writes > 0
    # With a window group, too few requests have a load and a store in flight at the same time.
    assert report.stats.discarded_pages > 0 or groups == "hybrid"


def test_a_seed_repeats_its_steps() -> None:
    first, second = (Simulation(config(5, "two groups", WriteMode.BACK, 1_500)).run() for _ in range(2))
    assert first == second


def narrow_configs(
    stream: bool = False, gds_loads: bool = False, gds_stores: bool = False
) -> Iterator[SimulationConfig]:
    """Yields configurations with few host and disk slots, so that evictions and reuse are common. The simulation runs
    without `check_integrity`.
    """
    for seed in range(8):
        yield SimulationConfig(
            seed=seed,
            steps=12_000 if gds_stores else 4_000,
            # GDS loads need pages that are on disk only, so host memory is smaller for them.
            groups=(GroupSpec(4, 5 if gds_loads else 14),),
            ranks=2 if gds_stores else 1,
            failure_rate=0.1 if gds_stores else 0.05,
            ordered_reports=not gds_stores or seed % 2 == 0,
            integrity_every=0,
            disk_places=(20, 48)[seed % 2],
            disk_mode=WriteMode.THROUGH if seed % 4 < 2 or gds_stores else WriteMode.EVICT,
            disks=1 + seed % 3,
            stream=stream,
            gds_loads=gds_loads,
            gds_stores=gds_stores,
        )


@pytest.mark.parametrize("manager_class", BROKEN, ids=lambda c: c.__name__)
def test_a_broken_manager_is_caught(manager_class: type[LocalCacheManager]) -> None:
    assert caught_by(narrow_configs(), manager_class, 5)


@pytest.mark.parametrize("manager_class", BROKEN_STREAMS, ids=lambda c: c.__name__)
def test_a_broken_stream_is_caught(manager_class: type[LocalCacheManager]) -> None:
    assert caught_by(narrow_configs(stream=True), manager_class)


@pytest.mark.parametrize("manager_class", BROKEN_GDS_LOADS, ids=lambda c: c.__name__)
def test_a_broken_gds_load_is_caught(manager_class: type[LocalCacheManager]) -> None:
    assert caught_by(narrow_configs(gds_loads=True), manager_class)


@pytest.mark.parametrize("manager_class", BROKEN_GDS_STORES, ids=lambda c: c.__name__)
def test_a_broken_gds_store_is_caught(manager_class: type[LocalCacheManager]) -> None:
    assert caught_by(narrow_configs(gds_loads=True, gds_stores=True), manager_class)


@pytest.mark.parametrize(
    ("stream", "gds_loads", "gds_stores"),
    [(False, False, False), (True, False, False), (False, True, False), (False, True, True)],
)
def test_the_real_manager_passes_where_the_broken_ones_fail(
    stream: bool, gds_loads: bool, gds_stores: bool
) -> None:
    assert caught_by(narrow_configs(stream, gds_loads, gds_stores), LocalCacheManager, 5) == ""
