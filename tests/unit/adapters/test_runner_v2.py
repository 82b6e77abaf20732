"""After a load fails within a step, vLLM's Model Runner V2 continues at the request's old position. flexkv stores
nothing that is computed from there on. tests/engines_vllm33 tests that runner itself, after a failed load of another
connector.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from flexkv.adapters.vllm.engine_spec import EngineRole, possible_load_mode
from flexkv.observe import log
from tests import testing_ext
from tests.unit.adapters.faulty_worker import faulty_worker
from tests.unit.adapters.mini_engine import MiniEngine, stored_engine
from tests.unit.adapters.test_builtin import engine as described
from tests.unit.adapters.vllm_objects import make_request
from tests.unit.transfer.transfer_world import FAIL

Make = Callable[..., MiniEngine]
PROMPT = list(range(100, 123))
H2D = 0
MODES = ["eager", "layerwise", "lazy"]


def settle(engine: MiniEngine) -> None:
    """Runs steps, so that lazy stores are planned, and waits until all planned stores have ended."""
    for _ in range(4):
        engine.step({})
        engine.drain()


def failed_within_a_step(
    make_engine: Make, keeps_computed: bool, store_mode: str, goes_on: bool = True
) -> MiniEngine:
    """Returns an engine on V2 in which block 2 of a sync load of "two" failed. With `goes_on`, "two" has also computed
    the rest.
    """
    engine = make_engine(
        blocks=8 if store_mode == "lazy" else 32,  # lazy stores look only at the free queue's head
        worker_class=faulty_worker(testing_ext.FaultRule(FAIL, kind=H2D, page=2, times=1)),
        role=EngineRole(recomputes=True, keeps_computed=keeps_computed),
        **{"load.mode": "sync", "store.mode": store_mode, "store.max_reference_share": 1.0},
    )
    engine.run(make_request(PROMPT[:16], "one"))
    settle(engine)
    engine.forget()
    engine.takes_back = False
    assert engine.add(make_request(PROMPT, "two")) == 16
    engine.step()
    assert len(engine.invalid) == 1
    if goes_on:
        engine.step()
        assert engine.wrong("two"), "the runner went on where it was"
    return engine


def serves_wrong_kv(engine: MiniEngine) -> bool:
    """Returns whether a new request with the same tokens gets wrong KV."""
    settle(engine)
    engine.forget()
    engine.add(make_request(PROMPT, "three"))
    engine.takes_back = True
    engine.step()
    return engine.wrong("three") != []


@pytest.mark.parametrize("store_mode", MODES)
def test_a_request_that_lost_blocks_in_a_step_stores_nothing_more(
    make_engine: Make, store_mode: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("flexkv"), "propagate", True)
    monkeypatch.setattr(log, "_warned", set())
    engine = failed_within_a_step(make_engine, True, store_mode)
    before = engine.stored_pages
    engine.finish("two")
    settle(engine)
    assert engine.stored_pages == before
    assert not serves_wrong_kv(engine)
    assert caplog.text.count("VLLM_USE_V2_MODEL_RUNNER=0") == 1


@pytest.mark.parametrize("store_mode", MODES)
def test_control_without_knowing_the_runner_wrong_kv_is_served(make_engine: Make, store_mode: str) -> None:
    engine = failed_within_a_step(make_engine, False, store_mode)
    engine.finish("two")
    assert serves_wrong_kv(engine)


@pytest.mark.parametrize("store_mode", ["eager", "layerwise"])
@pytest.mark.parametrize("keeps_computed", [True, False])
def test_what_others_compute_from_the_engines_own_copy_of_it_is_not_stored(
    make_engine: Make, store_mode: str, keeps_computed: bool
) -> None:
    """flexkv does not store KV that another request computes from the wrong blocks, which vLLM's own prefix cache keeps
    under their hashes. In the control, `keeps_computed` is false.
    """
    engine = failed_within_a_step(make_engine, keeps_computed, store_mode, goes_on=False)
    blocks = engine.live["two"].blocks
    sharing = make_request([*PROMPT[:20], *range(9)], "sharing")
    engine.adopt(sharing, blocks[:5])  # this happens before the engine plans another step for "two"
    engine.step()
    engine.finish("two")
    engine.finish("sharing")
    settle(engine)
    engine.forget()
    assert engine.add(make_request([*PROMPT[:20], *range(9)], "again")) <= (8 if keeps_computed else 28)
    engine.step()
    assert (engine.wrong("again") == []) == keeps_computed


def test_a_request_that_waited_for_its_load_is_stored_when_it_is_computed(make_engine: Make) -> None:
    """A request that waited for its failed load is stored after it was computed. The runner gets this request for the
    first time when the failure is already known, so the runner has no old position for it.
    """
    engine = stored_engine(
        make_engine,
        PROMPT,
        worker_class=faulty_worker(testing_ext.FaultRule(FAIL, kind=H2D, page=2, times=1)),
        role=EngineRole(recomputes=True, keeps_computed=True),
    )
    engine.takes_back = False
    assert engine.run(make_request(PROMPT, "two")) == 20
    assert len(engine.invalid) == 1
    engine.forget()
    assert engine.run(make_request(PROMPT, "three")) == 20


def test_a_request_that_starts_again_after_it_stores_again(make_engine: Make) -> None:
    """After a failed load, the KV of a request that is preempted and starts again is stored. The preemption gives the
    request other blocks, and the runner forgets the request's old position.
    """
    engine = failed_within_a_step(make_engine, True, "eager")
    request = engine.live["two"].request
    engine.preempt("two")
    engine.takes_back = True
    assert engine.run(request) == 8
    engine.forget()
    assert engine.run(make_request(PROMPT, "three")) == 20


@pytest.mark.parametrize("asked", ["sync", "layerwise"])
@pytest.mark.parametrize(
    ("v2", "overlap", "policy", "settings"),
    [
        (True, False, "recompute", "set VLLM_USE_V2_MODEL_RUNNER=0,"),
        (True, True, "recompute", "set --no-async-scheduling and VLLM_USE_V2_MODEL_RUNNER=0,"),
        (False, True, "recompute", "set --no-async-scheduling,"),
        (True, False, "fail", ""),
        (False, False, "recompute", ""),
    ],
)
def test_loads_within_the_step_are_for_engines_that_recover_from_their_failure(
    asked: str,
    v2: bool,
    overlap: bool,
    policy: str,
    settings: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("flexkv"), "propagate", True)
    config = described(
        scheduler_config__async_scheduling=overlap, kv_transfer_config__kv_load_failure_policy=policy
    )
    config.use_v2_model_runner = v2
    assert possible_load_mode(asked, config) == ("async" if settings else asked)
    assert len(caplog.records) == bool(settings)
    assert settings in caplog.text
