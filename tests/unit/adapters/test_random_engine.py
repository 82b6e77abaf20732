"""Engines take random actions in any order. No forward pass reads a wrong number. At the end, no request, lease or op
is left over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from flexkv.adapters.vllm.engine_spec import EngineRole
from flexkv.adapters.vllm.worker import WorkerSide
from flexkv.storage.striped_slabs import StripedSlabs
from tests import testing_ext
from tests.soak import soak_rounds
from tests.unit.adapters.faulty_worker import faulty_worker
from tests.unit.adapters.random_engine import RandomEngine
from tests.unit.transfer.transfer_world import CORRUPT, DELAY, FAIL

ACTS = 200
BLOCKS = 24
H2D, D2H = 0, 1
FAILS = pytest.mark.parametrize("fails", [False, True], ids=["well", "failing"])
Make = Callable[..., RandomEngine]


@pytest.fixture
def make_random() -> Iterator[Make]:
    engines: list[RandomEngine] = []

    def make(seed: int, **options: Any) -> RandomEngine:
        engines.append(RandomEngine(seed, blocks=BLOCKS, role=EngineRole(recomputes=True), **options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def failing_copies() -> type[WorkerSide]:
    """Makes a worker class in which some loads and some stores fail, each at one page."""
    numbers = [(kind, number) for kind in (H2D, D2H) for number in range(2, 40, 5)]
    return faulty_worker(
        *(testing_ext.FaultRule(FAIL, kind=kind, nth_op=n, page=n % 3, times=1) for kind, n in numbers)
    )


def run(engine: RandomEngine) -> None:
    for _ in range(ACTS):
        engine.act()
    assert {"only_ask", "admit", "compute", "end_one", "take_blocks"} <= set(engine.acts)
    engine.settle()


@pytest.mark.soak
@soak_rounds(1)
@FAILS
@pytest.mark.parametrize("store", ["eager", "lazy", "layerwise"])
@pytest.mark.parametrize("load", ["async", "sync", "layerwise"])
def test_host_memory(make_random: Make, load: str, store: str, fails: bool, soak_round: int) -> None:
    """Takes random actions on an engine with few slots, so that promised, loaded and stored pages are also evicted.
    With `fails`, some copies fail, and two ranks seem to run in separate processes. Otherwise there is one rank.
    """
    engine = make_random(
        7 + soak_round,
        ranks=1 + fails,
        remote=fails,
        worker_class=failing_copies() if fails else WorkerSide,
        **{"load.mode": load, "store.mode": store, "host.bytes": "256KiB"},
    )
    run(engine)


@pytest.mark.parametrize("store", ["eager", "layerwise"])
def test_stores_that_wait_for_room(make_random: Make, store: str) -> None:
    """Takes random actions while stores wait: few pages may be in flight, and copies are slow. While pages are pending,
    requests end, are preempted, and come again under the same name.
    """
    slow = [testing_ext.FaultRule(DELAY, kind=D2H, nth_op=n, delay_s=0.02) for n in range(1, 200, 2)]
    engine = make_random(
        21,
        worker_class=faulty_worker(*slow),
        **{"store.mode": store, "store.inflight_pages": 2, "store.max_reference_share": 0.1},
    )
    run(engine)
    assert engine.counters.data.get("flexkv_dropped_store_pages_total"), "no page was ever pending"


DISKS: list[dict[str, object]] = [
    {},
    {"disk.stream": True},
    {"disk.stream": True, "load.mode": "layerwise"},
    {"disk.stream": True, "store.mode": "lazy"},
    {"disk.gds": "on"},
    {"disk.gds": "on", "disk.gds_stores": True},
    {"disk.mode": "evict"},
    {"disk.mode": "back"},
    {"load.mode": "sync"},
]


@pytest.mark.soak
@soak_rounds(1)
@FAILS
@pytest.mark.parametrize("settings", DISKS, ids=str)
def test_disks(
    make_random: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, object],
    fails: bool,
    soak_round: int,
) -> None:
    """Takes random actions on an engine with a disk tier. Host memory has slots for 16 blocks, so most served pages
    come from disk.
    """
    if fails:
        rules = [
            testing_ext.IoFaultRule(0, write=False, times=3),
            testing_ext.IoFaultRule(0, write=True, times=2),
        ]
        monkeypatch.setattr(
            StripedSlabs, "open", partial(StripedSlabs.open, wrapper=testing_ext.IoFaults(rules))
        )
    disk = {
        "disk.folders": str(tmp_path / "disk"),
        "disk.bytes_per_folder": 4 << 20,
        "disk.compute_if_faster": False,
        "host.bytes": "64KiB",
    }
    run(make_random(12 + soak_round, **disk | settings))


def test_control_corrupted_copies_are_seen(make_random: Make) -> None:
    worker = faulty_worker(testing_ext.FaultRule(CORRUPT, kind=H2D))
    with pytest.raises(AssertionError, match="tokens"):
        run(make_random(7, worker_class=worker, **{"host.verify": False}))
