"""flexkv empties its cache if a function that may change the weights is called on vLLM's workers."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import vllm
import vllm.v1.engine.core as engine_core

from flexkv.adapters.vllm import weight_updates
from flexkv.adapters.vllm.engine_spec import EngineRole
from flexkv.adapters.vllm.store_watch import BlockWatch
from flexkv.adapters.vllm.weight_updates import LEAVE_WEIGHTS, may_change_weights
from flexkv.cache.stores.base import StoreWatch
from flexkv.cache.stores.lazy import LazyStores
from tests.unit.adapters.mini_engine import MiniEngine
from tests.unit.adapters.test_roles_and_resets import Make
from tests.unit.adapters.vllm_objects import BLOCK_TOKENS, make_request

PROMPT = list(range(100, 120))


def core(executor: Any) -> Any:
    """Makes a vLLM engine core that has only an executor. `executor` is called in place of the workers."""
    made = object.__new__(engine_core.EngineCore)
    made.model_executor = SimpleNamespace(collective_rpc=executor)
    return made


def call(method: Any, *args: Any) -> None:
    """Calls the workers' `method` as vLLM's clients do."""
    answer = core(lambda *given: list(given)).collective_rpc(method, None, args)
    assert answer == [method, None, args, None]


def stored(make_engine: Make) -> MiniEngine:
    """Returns an engine that has stored a prompt in flexkv's cache and has dropped its own prefix cache."""
    engine = make_engine()
    engine.run(make_request(PROMPT, "one"))
    engine.drain()
    engine.forget()
    assert engine.unit.manager.cached_blocks()
    return engine


def embed_anew(worker: Any) -> None:
    """Stands for a function that a caller sends to the workers."""


def profile(worker: Any) -> None:
    """A function that has the name of a method of vLLM's workers that leaves the weights as they are."""


@pytest.mark.parametrize(
    "method",
    [
        "update_weights",
        "reload_weights",
        "finish_weight_update",
        "reset_weights",
        "apply_model",
        "update_named_param",
        embed_anew,
        profile,
        lambda worker: None,
    ],
)
def test_a_call_that_may_change_weights_empties_the_cache(make_engine: Make, method: Any) -> None:
    engine = stored(make_engine)
    call(method)
    assert engine.unit.manager.cached_blocks() == 0
    assert engine.add(make_request(PROMPT, "two")) == 0


def get_rank(worker: Any) -> None:
    """A function that a caller sends to the workers, and that only reads."""


@pytest.mark.parametrize(
    "method", [*sorted(LEAVE_WEIGHTS), "get_stats", "list_loras", "check_health", get_rank]
)
def test_a_call_that_only_reads_leaves_the_cache(make_engine: Make, method: Any) -> None:
    engine = stored(make_engine)
    before = engine.unit.manager.cached_blocks()
    call(method)
    assert engine.unit.manager.cached_blocks() == before


def test_a_call_that_fails_empties_the_cache_too(make_engine: Make) -> None:
    """A call that fails empties the cache too, because it may already have changed some of the weights."""
    engine = stored(make_engine)

    def fail(*_: Any) -> None:
        raise RuntimeError("rank 1 is gone")

    with pytest.raises(RuntimeError, match="rank 1 is gone"):
        core(fail).collective_rpc("update_weights")
    assert engine.unit.manager.cached_blocks() == 0


def adopt_and_finish(engine: MiniEngine) -> int:
    """A second request finds two blocks of the first one. Returns the number of stored blocks when both have ended."""
    engine.adopt(make_request([*PROMPT[:8], *range(10)], "three"), engine.live["two"].blocks[:2])
    engine.step()
    engine.finish("two")
    engine.finish("three")
    for _ in range(3):
        engine.step({})
    engine.drain()
    return engine.unit.manager.cached_blocks()


def test_kv_of_former_weights_is_not_stored_after_the_call(make_engine: Make) -> None:
    """KV of the former weights is not stored after a call that changes the weights. vLLM keeps its own blocks, and
    computes with them until its cache is reset. flexkv neither stores nor serves the results.
    """
    engine = stored(make_engine)
    first = make_request(PROMPT, "two")
    engine.add(first)
    engine.step()
    call("update_weights")
    assert adopt_and_finish(engine) == 0


def adopted_after_update(engine: MiniEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights change while a request holds blocks that have no hash yet, as blocks that are not full or whose load
    has not been admitted. vLLM gives these blocks their hash later, and another request then finds them.
    """
    engine.add(make_request(PROMPT, "two"))
    engine.step()
    with monkeypatch.context() as unhashed:
        unhashed.setattr(engine.side._watch, "hashes", dict)
        call("update_weights")


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "control"])
def test_blocks_that_get_their_hash_after_the_change_are_not_used(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch, checked: bool
) -> None:
    engine = make_engine()
    adopted_after_update(engine, monkeypatch)
    if not checked:
        monkeypatch.setattr(engine.side, "_old_kv", False)
    assert bool(adopt_and_finish(engine)) != checked


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "control"])
def test_an_engine_that_only_stores_checks_too(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch, checked: bool
) -> None:
    engine = make_engine(role=EngineRole(loads=False))
    adopted_after_update(engine, monkeypatch)
    if not checked:
        monkeypatch.setattr(engine.side, "_old_kv", False)
    assert bool(adopt_and_finish(engine)) != checked


def test_a_change_before_the_first_forward_pass_counts_loaded_blocks(make_engine: Make) -> None:
    """After a restart, the first request may have loaded KV of the old weights when the weights change."""
    engine = stored(make_engine)
    engine.side._was_asked = False  # as after a restart
    engine.add(make_request(PROMPT, "two"))
    engine.until(lambda: "two" in engine.finished_loads)
    call("update_weights")
    assert engine.side._old_kv


def test_a_change_before_the_first_request_leaves_nothing_to_check(make_engine: Make) -> None:
    """Training frameworks connect their processes by a call before any request."""
    engine = make_engine()
    engine.side.bind_watch(StoreWatch())  # as with vLLM's own connector class, which does not see the pool
    call("init_process_group")
    assert not engine.side._old_kv
    engine.add(make_request(PROMPT, "one"))
    call("update_weights")
    assert engine.side._old_kv


def test_a_pool_is_empty_without_requests_and_cached_blocks(make_engine: Make) -> None:
    engine = make_engine()
    watch = engine.side._watch
    assert watch.is_empty()
    held = engine.pool.get_new_blocks(1)
    assert not watch.is_empty(), "a request holds a block that has no hash"
    engine.pool.free_blocks(held)
    assert watch.is_empty()
    engine.run(make_request(PROMPT, "one"))
    engine.drain()
    assert not watch.is_empty(), "free blocks are in the engine's own cache"
    assert engine.pool.reset_prefix_cache()
    assert watch.is_empty()


def test_lazy_caching_goes_on_when_the_engines_own_cache_was_reset(make_engine: Make) -> None:
    engine = make_engine(blocks=7, **{"store.mode": "lazy", "store.max_reference_share": 1.0})
    engine.run(make_request(PROMPT, "one"))
    call("update_weights")
    assert engine.pool.reset_prefix_cache()
    engine.run(make_request(PROMPT, "two"))
    engine.step({})
    engine.drain()
    assert engine.unit.manager.cached_blocks()
    stores = engine.side._stores
    assert isinstance(stores, LazyStores)
    assert not stores._only_left


def test_caching_goes_on_when_the_engines_own_cache_was_reset(make_engine: Make) -> None:
    engine = stored(make_engine)
    engine.add(make_request(PROMPT, "two"))
    engine.step()
    call("update_weights")
    engine.finish("two")
    engine.step({})
    engine.drain()
    assert engine.side._old_kv
    engine.forget()
    engine.run(make_request(PROMPT, "three"))
    engine.drain()
    assert not engine.side._old_kv
    assert engine.unit.manager.cached_blocks() == len(PROMPT) // BLOCK_TOKENS
    # The blocks get the same numbers and hashes as before the change, and are stored nevertheless.
    engine.adopt(make_request([*PROMPT, *range(8)], "four"), engine.pool.blocks[1:3])
    assert not engine.side.requests.live["four"].stale


def test_a_change_before_the_ranks_have_shaken_hands(make_engine: Make) -> None:
    """The first request has no record, because the unit is not built yet. Nothing is stored of its blocks."""
    engine = make_engine(early_handshake=False)
    request = make_request(PROMPT, "two")
    engine.add(request)
    engine.step(before_forward=lambda: call("update_weights"))
    engine.step({})
    assert engine.unit.usable
    assert adopt_and_finish(engine) == 0


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "control"])
def test_lazy_stores_no_block_of_a_request_without_a_record(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch, checked: bool
) -> None:
    """The request began before the unit was built, and its blocks got their hashes after the change."""
    monkeypatch.setattr(BlockWatch, "hashes", lambda watch: {})
    engine = make_engine(
        blocks=7,
        early_handshake=False,
        **{"store.mode": "lazy", "store.max_reference_share": 1.0},
    )
    engine.add(make_request(PROMPT, "two"))
    engine.step(before_forward=lambda: call("update_weights"))
    assert engine.unit.usable
    if not checked:
        monkeypatch.setattr(engine.side._stores, "_only_left", False)
    engine.finish("two")
    for _ in range(3):
        engine.step({})
    engine.drain()
    assert bool(engine.unit.manager.cached_blocks()) != checked


def test_of_vllms_own_calls_only_those_that_change_weights_reset_the_cache() -> None:
    """vLLM itself calls functions of its workers. Only calls that change weights reset flexkv's cache. If a regular
    call that only reads did so, the cache would stay empty.
    """
    root = Path(vllm.__file__).parent
    files = [*root.joinpath("v1", "engine").rglob("*.py"), *root.joinpath("entrypoints").rglob("*.py")]
    made = re.compile(r"(?<!executor)\.collective_rpc\(\s*\"(\w+)\"")
    calls = {name for file in files for name in made.findall(file.read_text())}
    assert "compute_weight_checksums" in calls
    assert {name for name in calls if may_change_weights(name)} == {
        "apply_model",
        "finish_weight_update",
        "reset_weights",
        "start_draft_weight_update",
        "start_weight_update",
        "update_weights",
    }


def test_a_closed_engine_is_left_alone(make_engine: Make) -> None:
    engine = stored(make_engine)
    engine.close()
    call("update_weights")


def test_a_vllm_without_the_method_cannot_be_watched(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = ModuleType(weight_updates.ENGINE)
    other.EngineCore = type("EngineCore", (), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, weight_updates.ENGINE, other)
    make_engine()
    assert not hasattr(other.EngineCore, "collective_rpc")
