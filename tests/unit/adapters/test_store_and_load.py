"""Blocks are stored in host memory and loaded again unchanged. The tests use the scheduler's and the worker's side of
the connector, and vLLM's own requests.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flexkv.adapters.vllm.worker import WorkerSide
from flexkv.errors import CapacityError
from tests import testing_ext
from tests.unit.adapters.faulty_worker import faulty_worker
from tests.unit.adapters.mini_engine import MiniEngine
from tests.unit.adapters.vllm_objects import embeddings, image, lora, make_request
from tests.unit.transfer.transfer_world import CORRUPT

Make = Callable[..., MiniEngine]
PROMPT = list(range(100, 123))
"""23 tokens: 5 full blocks of 4, and a partial tail of 3."""


@pytest.mark.parametrize("mode", ["async", "sync", "layerwise"])
@pytest.mark.parametrize(("ranks", "remote"), [(1, False), (1, True), (2, True), (2, False)])
def test_a_prompt_comes_back(make_engine: Make, mode: str, ranks: int, remote: bool) -> None:
    engine = make_engine(ranks=ranks, remote=remote, **{"load.mode": mode})
    assert engine.run(make_request(PROMPT, "one")) == 0
    engine.forget()
    assert engine.run(make_request(PROMPT, "two")) == 20
    engine.forget()
    assert engine.run(make_request([*PROMPT[:12], 7, 7, 7, 7, 7], "three")) == 12


def test_corrupted_bytes_are_seen(make_engine: Make) -> None:
    """The control for all tests in this file: if a load delivers wrong bytes, the checks notice it."""
    rule = testing_ext.FaultRule(CORRUPT, kind=0, page=1)
    engine = make_engine(worker_class=faulty_worker(rule))
    engine.run(make_request(PROMPT, "one"))
    engine.forget()
    request = make_request(PROMPT, "two")
    assert engine.add(request) == 20
    engine.end_load("two")
    assert engine.wrong("two") == [4, 5, 6, 7]


def test_nothing_is_stored_twice(make_engine: Make) -> None:
    engine = make_engine()
    engine.run(make_request(PROMPT, "one"))
    engine.forget()
    engine.run(make_request(PROMPT, "two"))
    engine.run(make_request([*PROMPT[:20], *range(9)], "three"))
    assert engine.unit.manager.stats().stored_pages == 5 + 2


def test_a_hit_leaves_a_token_to_compute(make_engine: Make) -> None:
    engine = make_engine()
    engine.run(make_request(PROMPT[:20], "one"))
    engine.forget()
    assert engine.run(make_request(PROMPT[:20], "two")) == 19


def test_the_engine_may_take_less_than_it_was_promised(make_engine: Make) -> None:
    engine = make_engine(**{"load.mode": "sync"})
    engine.run(make_request(PROMPT, "one"))
    engine.forget()
    request = make_request(PROMPT, "two")
    assert engine.side.match(request, 0) == (20, False)
    assert engine.side.match(request, 0) == (20, False)
    blocks = engine.pool.get_new_blocks(6)
    ids = [block.block_id for block in blocks]
    engine.side.allocated(request, _blocks(ids), 8)
    [job] = engine.side.orders.loads
    assert job.graph.ops[0].blocks.tolist() == ids[:2]
    assert engine.side.orders.loads[0].sync


def test_a_promise_that_is_overruled_is_given_back(make_engine: Make) -> None:
    engine = make_engine()
    engine.run(make_request(PROMPT, "one"))
    engine.forget()
    request = make_request(PROMPT, "two")
    assert engine.side.match(request, 0)[0] == 20
    engine.side.allocated(request, _blocks([1, 2, 3]), 0)
    assert engine.side.orders.loads == []
    engine.unit.manager.check_integrity()
    assert engine.unit.manager.inflight_ops() == 0


def test_generated_blocks_are_stored_too(make_engine: Make) -> None:
    engine = make_engine()
    request = make_request(PROMPT[:6], "one")
    _generate(engine, request, 8)
    engine.drain()
    engine.forget()
    # There are 6 prompt tokens and 8 generated ones. The KV of the last token was never computed.
    assert engine.add(make_request([*request.all_token_ids, 1, 2, 3], "two")) == 12


def test_prompt_only_keeps_generated_blocks_out(make_engine: Make) -> None:
    engine = make_engine(**{"store.tokens": "prompt"})
    request = make_request(PROMPT[:6], "one")
    _generate(engine, request, 8)
    engine.drain()
    engine.forget()
    assert engine.add(make_request([*request.all_token_ids, 1, 2, 3], "two")) == 4


@pytest.mark.parametrize(
    "extra",
    [{"kv_transfer_params": {"skip_save": True}}, {"flexkv.skip_save": True}],
    ids=["params", "extra"],
)
def test_a_request_may_ask_not_to_be_stored(make_engine: Make, extra: dict) -> None:
    engine = make_engine(**{"store.partial_blocks": True})
    engine.run(make_request(PROMPT, "one", extra_args=extra))
    engine.forget()
    assert engine.run(make_request(PROMPT, "two")) == 0


def test_drafts_are_not_stored_before_they_are_accepted(make_engine: Make) -> None:
    engine = make_engine(**{"store.generated_blocks": 1})
    request = make_request(PROMPT[:6], "one")
    engine.add(request)
    engine.step()
    engine.live["one"].blocks += engine.pool.get_new_blocks(2)
    request.append_output_token_ids([50])
    # With one sampled token and five drafts, the step computes the KV of 12 tokens, of which 7 are accepted so far.
    request.num_output_placeholders = 6
    engine.step({"one": 6})
    engine.drain()
    assert engine.unit.manager.stats().stored_pages == 1
    request.num_computed_tokens, request.num_output_placeholders = 7, 0
    request.append_output_token_ids([51])
    engine.step({"one": 1})
    engine.drain()
    assert engine.unit.manager.stats().stored_pages == 1
    request.append_output_token_ids([52])
    engine.step({"one": 1})
    engine.drain()
    assert engine.unit.manager.stats().stored_pages == 2
    engine.check("one")


def test_two_tenants_never_share_a_block(make_engine: Make) -> None:
    engine = make_engine(**{"store.partial_blocks": True})
    makers = [
        lambda name: make_request(PROMPT, name),
        lambda name: make_request(PROMPT, name, cache_salt="a"),
        lambda name: make_request(PROMPT, name, cache_salt="b"),
        lambda name: make_request(PROMPT, name, lora_request=lora("x")),
        lambda name: make_request(PROMPT, name, lora_request=lora("y")),
        lambda name: make_request(PROMPT, name, mm_features=[image("cat", 1, 2), image("dog", 8, 3)]),
        lambda name: make_request(PROMPT, name, mm_features=[image("dog", 1, 2), image("cat", 8, 3)]),
        lambda name: make_request(prompt_embeds=embeddings(1, 23), name=name),
        lambda name: make_request(prompt_embeds=embeddings(2, 23), name=name),
    ]
    for number, make in enumerate(makers):
        assert engine.run(make(f"first{number}")) == 0, number
        engine.forget()
    for number, make in enumerate(makers):
        # Each request finds its own blocks, and also its partial tail if the tail's content can be identified.
        has_tail = number < 7
        assert engine.run(make(f"second{number}")) == (22 if has_tail else 20), number
        engine.forget()


def test_images_swapped_within_one_block_are_apart(make_engine: Make) -> None:
    engine = make_engine()
    one = make_request(PROMPT, "one", mm_features=[image("cat", 0, 1), image("dog", 2, 1)])
    two = make_request(PROMPT, "two", mm_features=[image("dog", 0, 1), image("cat", 2, 1)])
    assert engine.run(one) == 0
    engine.forget()
    assert engine.run(two) == 0


def test_a_prefix_of_three_tokens_is_a_hit(make_engine: Make) -> None:
    """A partial tail is a hit for a longer prompt, as in the docs: 3 tokens are stored, then a prompt of 7 tokens that
    begins with them runs.
    """
    engine = make_engine(**{"store.partial_blocks": True})
    assert engine.run(make_request([11, 12, 13], "hello")) == 0
    engine.forget()
    assert engine.run(make_request([11, 12, 13, 14, 15, 16, 17], "hello, how are you")) == 3
    engine.forget()
    used = engine.unit.slots - engine.unit.manager.free_slots(0)
    # Three pages are used: the tail of "hello", the full block of the second request, and the tail of the second
    # request.
    assert used == 3
    assert engine.run(make_request([11, 12, 13, 14, 15, 16, 17, 18], "again")) == 7


def test_the_longest_tail_that_fits_is_taken(make_engine: Make) -> None:
    engine = make_engine(**{"store.partial_blocks": True})
    for count in (5, 6, 7):
        engine.run(make_request(PROMPT[:count], f"store{count}"))
        engine.forget()
    assert engine.run(make_request(PROMPT[:7], "seven")) == 6
    engine.forget()
    assert engine.run(make_request([*PROMPT[:5], 1, 2, 3], "other")) == 5


def test_a_request_that_reads_no_cache_still_stores(make_engine: Make) -> None:
    engine = make_engine()
    engine.run(make_request(PROMPT, "one"))
    engine.forget()
    request = make_request(PROMPT, "two")
    request.skip_reading_prefix_cache = True
    assert engine.run(request) == 0


def test_lazy_stores_what_lies_next_to_eviction(make_engine: Make) -> None:
    engine = make_engine(blocks=13, **{"store.mode": "lazy"})
    engine.run(make_request(PROMPT, "one"))
    assert engine.unit.manager.stats().stored_pages == 0
    # The pool has 12 blocks. Request "two" takes the six unused ones, so the blocks of "one" are next in the free
    # queue.
    engine.run(make_request([*range(23)], "two"))
    engine.step({})
    engine.drain()
    assert engine.unit.manager.stats().stored_pages >= 5
    engine.forget()
    assert engine.run(make_request(PROMPT, "three")) == 20


def test_without_a_pool_nothing_is_promised_and_nothing_stored(make_engine: Make) -> None:
    class Homeless(WorkerSide):
        def attach(self, *args: object, **kwargs: object) -> None:
            raise CapacityError("no room")

    engine = make_engine(remote=True, worker_class=Homeless)
    assert engine.run(make_request(PROMPT, "one")) == 0
    assert not engine.side.has_work
    assert engine.run(make_request(PROMPT, "two")) == 0


def _blocks(ids: list[int]):
    class Blocks:
        @staticmethod
        def get_block_ids() -> tuple[list[int]]:
            return (ids,)

    return Blocks()


def _generate(engine: MiniEngine, request, count: int) -> None:
    """Runs the prefill, then one token per step, and ends the request."""
    engine.add(request)
    engine.step()
    for token in range(count):
        request.append_output_token_ids([500 + token])
        if token == count - 1:
            break
        live = engine.live[request.request_id]
        if request.num_tokens > len(live.blocks) * 4:
            live.blocks += engine.pool.get_new_blocks(1)
            engine.side.requests.of(request).block_ids.append(live.blocks[-1].block_id)
        engine.step({request.request_id: 1})
    engine.finish(request.request_id)
