"""Tests one KV group with both of vLLM's model runners, whose own code calls the connector's hooks, on plain memory and
on a fake GPU. Forward passes read only expected values, and cached KV is loaded again.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import testing_ext
from tests.soak import soak_rounds
from tests.unit.adapters.fake_gpu import FakeGpuWorld
from tests.unit.adapters.faulty_worker import faulty_worker
from tests.unit.adapters.model_runners import RUNNERS
from tests.unit.adapters.random_requests import RandomRequests
from tests.unit.adapters.scheduled_engine import ScheduledEngine
from tests.unit.adapters.scheduled_pools import full
from tests.unit.transfer.transfer_world import FAIL

Make = Callable[..., ScheduledEngine]
PROMPT = list(range(10, 60))
MODES = [("async", "eager"), ("sync", "eager"), ("layerwise", "layerwise"), ("async", "lazy")]
H2D = 0


@pytest.fixture(params=["plain memory", "fake GPU"])
def make_engine(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Make]:
    """Makes one engine per test, because vLLM has one connector per process, and the fake driver has one GPU."""
    engines: list[ScheduledEngine] = []
    worlds: list[FakeGpuWorld] = []

    def make(**options: Any) -> ScheduledEngine:
        if request.param == "fake GPU":
            worlds.append(FakeGpuWorld(monkeypatch))
            options = {"worker_class": worlds[0].worker_class, "give": worlds[0].give} | options
        every_block: dict[str, Any] = {"store.max_reference_share": 1.0}
        engines.append(ScheduledEngine(tmp_path, [full(4)], **every_block | options))
        return engines[0]

    yield make
    for engine in engines:
        engine.close()
    for world in worlds:
        world.close()


on_either = pytest.mark.parametrize("runner", RUNNERS)
overlapping = pytest.mark.parametrize("overlap", [False, True])


@on_either
@overlapping
@pytest.mark.parametrize(("load", "store"), MODES)
def test_a_prompt_comes_back(make_engine: Make, runner: str, overlap: bool, load: str, store: str) -> None:
    modes = {"load.mode": load, "store.mode": store}
    engine = make_engine(runner=runner, overlap=overlap, blocks=32, **modes)
    assert engine.run("one", PROMPT) == 0
    if store == "lazy":  # lazy stores store blocks only shortly before the engine evicts them
        for number in range(4):
            engine.run(f"other{number}", [70 + number] * 50)
    engine.forget()
    assert engine.run("two", PROMPT) == 48
    assert engine.run("three", [*PROMPT[:21], 5, 5, 5]) in (0, 20), (
        "the engine has them itself, unless evicted"
    )
    engine.check()


@on_either
@overlapping
def test_tails_and_generated_blocks_come_back(make_engine: Make, runner: str, overlap: bool) -> None:
    engine = make_engine(runner=runner, overlap=overlap, **{"store.partial_blocks": True})
    request = engine.add("one", PROMPT, output=9)
    engine.settle()
    tokens = list(request.all_token_ids)
    engine.forget()
    # The KV of the last generated token was never computed.
    assert engine.run("two", [*tokens[:-1], 5]) == len(tokens) - 1
    engine.check()


@on_either
@overlapping
def test_preempted_requests_are_right_and_stored(make_engine: Make, runner: str, overlap: bool) -> None:
    engine = make_engine(runner=runner, overlap=overlap, blocks=24, step_tokens=64)
    prompts = {f"r{n}": [10 + n] * 20 for n in range(4)}
    requests = [engine.add(name, prompt, output=24) for name, prompt in prompts.items()]
    engine.settle()
    assert sum(request.num_preemptions for request in requests) > 0, "the pool was meant to be too small"
    engine.check()
    for name, prompt in prompts.items():
        engine.forget()
        assert engine.run(f"{name} again", prompt) >= 16
    engine.check()


@on_either
@overlapping
@pytest.mark.parametrize("load", ["async", "sync", "layerwise"])
def test_an_aborted_request_leaves_nothing_wrong(
    make_engine: Make, runner: str, overlap: bool, load: str
) -> None:
    engine = make_engine(runner=runner, overlap=overlap, blocks=20, **{"load.mode": load})
    engine.run("one", PROMPT)
    engine.forget()
    engine.add("two", PROMPT)
    engine.step(lambda: engine.end("two"))
    # Request "three" takes nearly all blocks at once, including those of the aborted load.
    engine.run("three", [70] * 50)
    engine.run("four", PROMPT)
    engine.check()


@on_either
@overlapping
@pytest.mark.parametrize("load", ["async", "sync", "layerwise"])
@pytest.mark.parametrize("make_engine", ["plain memory"], indirect=True)
def test_a_failed_load_is_computed(make_engine: Make, runner: str, overlap: bool, load: str) -> None:
    fails = faulty_worker(testing_ext.FaultRule(FAIL, kind=H2D, page=2, times=1))
    options = {"worker_class": fails, "load.mode": load}
    engine = make_engine(runner=runner, overlap=overlap, **options)
    engine.run("one", PROMPT)
    engine.forget()
    engine.run("two", PROMPT)
    assert fails.movers[0].acted == 1
    if load != "async" and not overlap:
        assert engine.trouble, "the step read it, and was taken back"
        engine.trouble.clear()
    engine.forget()
    assert engine.run("three", PROMPT) == 48
    engine.check()


@pytest.mark.soak
@soak_rounds(4)
@on_either
def test_nothing_wrong_is_read_whatever_clients_do(make_engine: Make, soak_round: int, runner: str) -> None:
    rng = random.Random(soak_round)
    load, store = rng.choice(MODES)
    engine = make_engine(
        runner=runner,
        overlap=rng.random() < 0.5,
        blocks=34 + rng.choice((2, 20, 80)),
        step_tokens=rng.choice((16, 24, 64, 200)),
        **{"load.mode": load, "store.mode": store, "store.partial_blocks": rng.random() < 0.5},
    )
    give = engine._give

    def give_late(work: Callable[[], None]) -> None:
        """Runs the work a little later, because a GPU's stream lags behind the host."""

        def late() -> None:
            time.sleep(rng.choice((0, 0, 0.001)))
            work()

        give(late)

    engine._give = give_late
    requests = RandomRequests(engine, rng)
    for _ in range(150):
        requests.act()
    requests.settle()
    manager: Any = engine.connector.scheduler.unit.manager
    assert manager.stats().stored_pages > 0 or store == "lazy", "nothing was put to the test"
