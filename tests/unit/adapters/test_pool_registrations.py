"""No registration of an engine's pool with cuFile outlives the pool's memory. Registrations end before the engine
sleeps, and are made again when it wakes. Plain memory needs no registration, so the tests only record the lane's calls.
tests/native has a fake cuFile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flexkv import c_ext
from flexkv.adapters.vllm.engine_spec import EngineRole
from flexkv.config import load_config
from flexkv.transfer.gds_lane import log_lost_registration, log_refusal
from tests.unit.adapters.disk_engines import PROMPT, SLAB_BYTES
from tests.unit.adapters.faulty_worker import FaultyWorker
from tests.unit.adapters.sleeping_engine import SleepingEngine
from tests.unit.adapters.vllm_objects import make_request

Make = Callable[..., SleepingEngine]


class Registration:
    """Records a lane's calls. `held` says whether, according to these calls, the pool is registered."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.held = True
        self.calls: list[str] = []
        monkeypatch.setattr(c_ext.GdsLane, "release_pool", lambda lane: self._note("released", False))
        monkeypatch.setattr(c_ext.GdsLane, "restore_pool", lambda lane: self._note("restored", True))

    def _note(self, what: str, held: bool) -> None:
        self.calls.append(what)
        self.held = held


class KeepingWorker(FaultyWorker):
    """For the control test: a worker that leaves the pool registered."""

    def end_registrations(self) -> None:
        """Does not end the registration."""


@pytest.fixture
def make_sleeping(tmp_path: Path) -> Iterator[Make]:
    engines: list[SleepingEngine] = []

    def make(**options: Any) -> SleepingEngine:
        settings: dict[str, Any] = {
            "disk.folders": str(tmp_path),
            "disk.bytes_per_folder": SLAB_BYTES,
            "disk.gds": "on",
            "role": EngineRole(recomputes=True),
        }
        engines.append(SleepingEngine(**settings | options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def sleeps(engine: SleepingEngine, registration: Registration) -> bool:
    """Runs a request, then makes the engine release its KV memory as before a sleep. Returns whether the pool's
    registration has ended by the time the memory is released.
    """
    engine.run(make_request(PROMPT, "one"))
    engine.forget()
    engine.lose_memory()
    return not registration.held


def test_registrations_end_before_a_sleep_and_are_made_again_on_waking(
    make_sleeping: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    registration = Registration(monkeypatch)
    engine = make_sleeping()
    assert sleeps(engine, registration)
    engine.wake_up()
    assert registration.calls == ["released", "restored"]
    engine.wake_up()  # a second call changes nothing
    assert registration.calls == ["released", "restored"]
    assert engine.run(make_request(PROMPT, "two")) == 20


def test_control_a_worker_that_leaves_the_pool_registered_is_found(
    make_sleeping: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    registration = Registration(monkeypatch)
    assert not sleeps(make_sleeping(worker_class=KeepingWorker), registration)


def test_they_also_end_for_an_engine_that_sleeps_without_a_call(
    make_sleeping: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    registration = Registration(monkeypatch)
    engine = make_sleeping()
    engine.run(make_request(PROMPT, "one"))
    engine.workers[0].end_copies([])
    assert registration.calls == ["released"], "the next transfer registers the pool again"


def test_a_pool_that_was_to_be_registered_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    pool: Any = {"refusal": "a block lies in 160 pieces of it"}
    log_refusal(pool, load_config({"gds.register_pool": "auto"}, {}).gds)
    assert caplog.text == ""
    log_refusal(pool, load_config({"gds.register_pool": "on"}, {}).gds)
    assert "gds.register_pool=on: the pool passes through staging: a block lies in 160 pieces" in caplog.text


def test_a_pool_that_is_not_registered_again_after_a_sleep_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for pool in ({"released": 3, "regions": 1}, {"released": 0, "regions": 0}):
        again: Any = pool | {"refusal": "BAR1"}
        log_lost_registration(again)
    assert caplog.text == ""
    lost: Any = {"released": 3, "regions": 0, "refusal": "BAR1"}
    log_lost_registration(lost)
    assert "the pool passes through staging since the sleep: BAR1" in caplog.text


@pytest.mark.parametrize("mode", ["off", "auto", "on"])
def test_the_setting_reaches_the_lane_and_plain_memory_needs_none(make_sleeping: Make, mode: str) -> None:
    engine = make_sleeping(**{"gds.register_pool": mode})
    engine.run(make_request(PROMPT, "one"))
    engine.forget()
    assert engine.run(make_request(PROMPT, "two")) == 20
    pool = engine.workers[0]._gds_lane.pool
    assert (pool["registered"], pool["refusal"]) == (0, "")
