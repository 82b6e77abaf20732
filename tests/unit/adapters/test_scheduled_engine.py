"""Engines with several KV groups, driven by vLLM's own scheduler. Each forward pass checks that it reads only the
expected values.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, KVCacheSpec, MambaSpec

from flexkv.cache.base import CacheManager
from flexkv.cache.manager import LocalCacheManager
from flexkv.transfer.graph import OpKind
from tests import testing_ext
from tests.soak import soak_rounds
from tests.unit.adapters.faulty_worker import faulty_worker
from tests.unit.adapters.model_runners import RUNNERS
from tests.unit.adapters.random_requests import RandomRequests
from tests.unit.adapters.scheduled_engine import ScheduledEngine
from tests.unit.adapters.scheduled_pools import chunk, full, state, window

FAIL, STALL = 0, 2
PROMPT = list(range(10, 60))
Make = Callable[..., ScheduledEngine]


@pytest.fixture(params=RUNNERS)
def make_scheduled(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    """Returns a function that makes one engine at a time, because vLLM has one connector per process. Each test runs
    once for every model runner.
    """
    engines: list[ScheduledEngine] = []

    def make(*specs: KVCacheSpec, **options: Any) -> ScheduledEngine:
        while engines:
            engines.pop().close()
        engines.append(ScheduledEngine(tmp_path, specs, **{"runner": request.param} | options))
        return engines[0]

    yield make
    while engines:
        engines.pop().close()


KINDS = {
    "window": (full(4), window(4, 9)),
    "windows of other blocks": (full(4), window(8, 13), window(16, 5)),
    "window alone": (window(4, 9),),
    "two full, of other blocks": (full(4), full(8), window(4, 9)),
    "two full": (full(4), full(4), window(8, 9)),
    "chunk": (full(4), chunk(4, 16)),
    "state": (full(4), state(4)),
    "state and window": (full(4), state(4), window(4, 6)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step_tokens", [16, 200])
@pytest.mark.parametrize("overlap", [False, True])
def test_the_same_prompt_and_one_that_parts_from_it_hit(
    make_scheduled: Make, kind: str, step_tokens: int, overlap: bool
) -> None:
    engine = make_scheduled(*KINDS[kind], step_tokens=step_tokens, overlap=overlap, blocks=128)
    hits = []
    for name, prompt in (("first", PROMPT), ("same", PROMPT), ("other", [*PROMPT[:33], 5, 6, 7])):
        hits.append(engine.run(name, prompt))
        engine.forget()
    # A prompt that diverges from an earlier one stores its windows and states at the point where they diverge.
    hits.append(engine.run("third", [*PROMPT[:33], 8, 8, 8]))
    engine.check()
    assert hits == [0, 48, 0, 32] or (kind, hits) in (
        ("chunk", [0, 48, 32, 32]),
        ("window alone", [0, 48, 0, 0]),
    )


@pytest.mark.parametrize("store", ["eager", "layerwise"])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", ["window", "two full"])
def test_a_prompt_is_stored_whole_by_few_pages_in_flight(
    make_scheduled: Make, kind: str, overlap: bool, store: str
) -> None:
    """Although few pages may be in flight, a prompt is stored completely. First, a request runs alone in a small pool.
    Then a second one runs beside another request, and is aborted after its prompt.
    """
    settings = {"store.mode": store, "store.inflight_pages": 6, "store.max_reference_share": 0.9}
    engine = make_scheduled(*KINDS[kind], overlap=overlap, blocks=60, **settings)
    engine.run("first", PROMPT, output=2)
    engine.forget()
    assert engine.run("same", PROMPT) == 48
    engine.forget()
    engine.add("beside", [9] * 10, output=3)
    engine.add("aborted", PROMPT[::-1], output=30)
    engine.step()
    engine.end("aborted")
    engine.settle()
    engine.forget()
    found = engine.run("again", PROMPT[::-1])
    if kind == "two full" and not overlap:
        # In the other cases the hit is shorter. With a window, the aborted request's last window was not stored. With
        # overlap, the last step of the aborted request does not count as computed.
        assert found == 48
    engine.check()


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 15, 16, 17, 32, 33])
@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_at_the_edge_of_a_block_leaves_a_token_to_compute(
    make_scheduled: Make, kind: str, tokens: int
) -> None:
    engine = make_scheduled(*KINDS[kind], blocks=128)
    engine.run("first", PROMPT[:tokens])
    engine.forget()
    aligned = max(spec.block_size for spec in KINDS[kind])
    expected = (tokens - 1) // aligned * aligned
    assert engine.run("same", PROMPT[:tokens]) == expected
    engine.check()


def test_a_hit_for_which_the_engine_has_no_block_is_computed(make_scheduled: Make) -> None:
    """If the engine has no block for a promised page, it computes the tokens. Otherwise flexkv would promise the hit
    again in every step, and the load would fail again.
    """
    engine = make_scheduled(full(4), window(4, 9))
    engine.run("first", PROMPT)
    engine.forget()
    allocated, asked = engine.connector.update_state_after_alloc, []

    def without_window(request: Any, blocks: Any, num_external_tokens: int) -> None:
        asked.append(num_external_tokens)
        tables = blocks.get_block_ids()
        null = SimpleNamespace(get_block_ids=lambda: (tables[0], [0] * len(tables[1])))
        allocated(request, null if num_external_tokens else blocks, num_external_tokens)

    engine.connector.update_state_after_alloc = without_window  # type: ignore[method-assign]
    engine.run("same", PROMPT)
    assert asked[0] == 48
    assert set(asked[1:]) == {0}
    engine.check()


def local(manager: CacheManager) -> LocalCacheManager:
    assert isinstance(manager, LocalCacheManager)
    return manager


def kept(engine: ScheduledEngine, tokens: list[int]) -> list[int]:
    """Returns for each group how many pages of these tokens are in the cache."""
    side = engine.connector.scheduler
    keys = side.requests.of(engine.add("probe", tokens)).keys()
    counts = [int(local(side.unit.manager).present(at, of_group).sum()) for at, of_group in enumerate(keys)]
    engine.end("probe")
    return counts


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_any_group_is_stored_of_a_request_that_holds_kv_of_older_weights(
    make_scheduled: Make, kind: str
) -> None:
    engine = make_scheduled(*KINDS[kind], step_tokens=16, blocks=128, **{"store.checkpoint_tokens": 16})
    engine.add("old", PROMPT)
    engine.step()
    engine.connector.reset_cache()
    engine.settle()
    assert set(kept(engine, PROMPT)) == {0}


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_any_group_is_stored_of_a_request_that_asks_for_it(
    make_scheduled: Make, kind: str
) -> None:
    engine = make_scheduled(*KINDS[kind], blocks=128, **{"store.checkpoint_tokens": 16})
    engine.run("private", PROMPT, **{"flexkv.skip_save": True})
    assert set(kept(engine, PROMPT)) == {0}
    engine.run("other", PROMPT)
    assert any(kept(engine, PROMPT)), "of others it is"


@pytest.mark.parametrize(("checkpoint", "loads"), [(16, [16]), (4096, [16, 0])])
def test_an_engine_that_takes_less_than_it_was_promised_gets_that_or_computes(
    make_scheduled: Make, checkpoint: int, loads: list[int]
) -> None:
    """The engine takes only 16 of the 48 promised tokens. A hit of 16 tokens needs the window before token 16, which is
    stored only if there is a checkpoint. Without it the load fails, and the engine computes the tokens.
    """
    engine = make_scheduled(full(4), window(4, 9), blocks=128, **{"store.checkpoint_tokens": checkpoint})
    engine.run("first", PROMPT)
    engine.forget()
    matched, allocated = (
        engine.connector.get_num_new_matched_tokens,
        engine.connector.update_state_after_alloc,
    )
    taken = []

    def at_most_16(request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        tokens, is_async = matched(request, num_computed_tokens)
        return min(tokens or 0, 16), is_async

    def note(request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens or not request.num_computed_tokens:
            taken.append(num_external_tokens)
        allocated(request, blocks, num_external_tokens)

    engine.connector.get_num_new_matched_tokens = at_most_16  # type: ignore[method-assign]
    engine.connector.update_state_after_alloc = note  # type: ignore[method-assign]
    engine.run("same", PROMPT)
    assert taken == loads
    engine.check()


def test_where_there_is_not_room_for_all_stores_the_prompts_end_is_stored_first(make_scheduled: Make) -> None:
    """If not all stores fit the limit, the windows at the prompt's end are stored first, because they can be stored
    only now. Blocks of full attention are offered again later, and the other windows are spare: requests with this
    prompt do not need them.
    """
    settings = {"store.checkpoint_tokens": 16, "store.max_reference_share": 0.05}
    engine = make_scheduled(full(4), window(4, 9), blocks=64, **settings)
    engine.run("first", PROMPT, output=1)
    side = engine.connector.scheduler
    _, of_window = side.requests.of(engine.add("same", PROMPT)).keys()
    assert local(side.unit.manager).present(1, of_window).nonzero()[0].tolist() == [10, 11]
    engine.end("same")


@pytest.mark.parametrize("group", [0, 1])
def test_a_failed_page_of_any_group_fails_the_load_and_the_next_is_shorter(
    make_scheduled: Make, group: int
) -> None:
    worker_class = faulty_worker(
        testing_ext.FaultRule(FAIL, kind=int(OpKind.H2D), nth_op=group, page=0, times=1)
    )
    engine = make_scheduled(
        full(4), window(4, 9), blocks=128, worker_class=worker_class, **{"store.checkpoint_tokens": 16}
    )
    engine.run("first", PROMPT)
    engine.forget()
    taken = []
    allocated = engine.connector.update_state_after_alloc

    def note(request: Any, blocks: Any, num_external_tokens: int) -> None:
        taken.append(num_external_tokens)
        allocated(request, blocks, num_external_tokens)

    engine.connector.update_state_after_alloc = note  # type: ignore[method-assign]
    engine.run("same", PROMPT)
    assert worker_class.movers[0].acted == 1
    # The window's failed page ends at token 44. Without this page, a hit of 32 tokens is possible. Without page 0 of
    # the full group, no hit is possible.
    assert taken[:2] == ([48, 0], [48, 32])[group]
    engine.check()


def test_no_client_resets_under_requests_while_an_aborted_load_holds_blocks(make_scheduled: Make) -> None:
    """While an aborted load holds blocks, the test's clients do not reset the cache under running requests, because
    vLLM would raise an error. The load holds its blocks until its copies have ended.
    """
    worker_class = faulty_worker(testing_ext.FaultRule(STALL, kind=int(OpKind.H2D)))
    engine = make_scheduled(full(4), window(4, 9), blocks=128, worker_class=worker_class)
    engine.run("first", PROMPT)
    engine.forget()
    engine.add("aborted", PROMPT)
    engine.step()
    engine.end("aborted")
    clients = RandomRequests(engine, random.Random(0))
    assert not clients.reset_under_requests()
    manager = local(engine.connector.scheduler.unit.manager)
    epoch = manager.epoch
    with pytest.raises(RuntimeError, match="waiting for remote KV transfer"):
        engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    assert manager.epoch == epoch, "vLLM raises before it resets flexkv"
    worker_class.movers[0].release()
    engine.settle()
    assert clients.reset_under_requests()
    engine.check()


def random_specs(rng: random.Random) -> list[KVCacheSpec]:
    block, count = rng.choice((4, 4, 8)), rng.randint(1, 3)
    if rng.random() < 0.4:
        specs = [full(block), *[state(block)] * rng.randint(1, 2)]
        return [*specs, window(block, rng.choice((5, 9, 17)))] if rng.random() < 0.4 else specs
    specs = [full(block)] if rng.random() < 0.8 else []
    if rng.random() < 0.3:
        specs.append(chunk(block, block * rng.choice((1, 2, 3, 4, 8))))
    # In vLLM, a model with chunked attention has one block size for all groups.
    sizes = (block,) if any(isinstance(spec, ChunkedLocalAttentionSpec) for spec in specs) else (4, 8, 16)
    windows = (2, 3, 4, 5, 8, 9, 13, 16, 17, 30, 33)
    return specs + [window(rng.choice(sizes), rng.choice(windows)) for _ in range(count)]


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "control"])
def test_a_hit_within_a_block_of_old_weights_is_not_stored(
    make_scheduled: Make, monkeypatch: pytest.MonkeyPatch, checked: bool
) -> None:
    """The second request's hit in vLLM's own cache is shorter than a block. vLLM copies the block, and tells the
    connector of no hit.
    """
    engine = make_scheduled(full(16), state(16), match_unit=8)
    side = engine.connector.scheduler
    engine.run("one", range(3, 14))
    side.forget()
    if not checked:
        monkeypatch.setattr(side, "_old_kv", False)
    engine.run("two", [*range(3, 12), *range(40, 70)])
    assert bool(local(side.unit.manager).cached_blocks()) != checked


@pytest.mark.soak
@soak_rounds(8)
def test_nothing_wrong_is_read_whatever_clients_do(make_scheduled: Make, soak_round: int) -> None:
    rng = random.Random(soak_round)
    specs = random_specs(rng)
    options: dict[str, Any] = {"overlap": rng.random() < 0.4}
    if rng.random() < 0.6:
        options["store.checkpoint_tokens"] = rng.choice((4, 16, 32, 64))
    if any(isinstance(spec, MambaSpec) for spec in specs) and rng.random() < 0.4:
        options["match_unit"] = specs[0].block_size // 2
    if rng.random() < 0.4:
        rules = [
            testing_ext.FaultRule(FAIL, slot=rng.randrange(400), times=rng.choice((1, 3))) for _ in range(40)
        ]
        options["worker_class"] = faulty_worker(*rules)
    room = sum(-(-125 // spec.block_size) + 2 for spec in specs)
    engine = make_scheduled(
        *specs, blocks=room + rng.choice((2, 20, 80)), step_tokens=rng.choice((16, 24, 64, 200)), **options
    )
    requests = RandomRequests(engine, rng)
    for _ in range(200):
        requests.act()
    requests.settle()
