"""With MLA, every tensor-parallel rank has the same latent KV, so a slot has one stripe. Rank 0 writes the stripe, and
all ranks read it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from flexkv.adapters.vllm.geometry import build_views, replicas
from flexkv.adapters.vllm.scheduler import SchedulerSide
from flexkv.errors import GeometryError
from flexkv.layout.format_id import FormatId
from tests import testing_ext
from tests.unit.adapters.faulty_worker import faulty_worker
from tests.unit.adapters.mini_engine import MiniEngine
from tests.unit.adapters.mini_pools import CONTENT, LAYERS, kv_config, make_caches
from tests.unit.adapters.vllm_objects import BLOCK_TOKENS, make_request
from tests.unit.transfer.transfer_world import FAIL

Make = Callable[..., MiniEngine]
PROMPT = list(range(100, 123))
D2H = 1


def test_a_page_is_one_latent_a_layer_for_any_number_of_ranks() -> None:
    config = kv_config(9, latent=True)
    (one,) = build_views(make_caches(config), config, 1)
    (four,) = build_views(make_caches(config), config, 4 // replicas(config, 4))
    assert one.facts.stripe_bytes == four.facts.stripe_bytes == LAYERS * BLOCK_TOKENS * CONTENT * 4
    assert one.facts.format_id == four.facts.format_id, "the same page whatever the ranks"
    assert FormatId.parse(one.facts.format_id).ranks == 1


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("verify", [False, True])
def test_one_stripe_serves_all_ranks(make_engine: Make, remote: bool, verify: bool) -> None:
    engine = make_engine(ranks=3, remote=remote, latent=True, **{"host.verify": verify})
    apart = make_engine(ranks=3, remote=remote, **{"host.verify": verify})
    unit = engine.unit
    assert len({places[0].stripe for places in unit.places}) == 1
    assert len({places[0].stripe for places in apart.unit.places}) == 3
    engine.run(make_request(PROMPT, "one"))
    moved = [
        worker.counters.value("flexkv_moved_pages_total", direction="store") for worker in engine.workers
    ]
    assert moved == [5, 0, 0]
    engine.forget()
    assert engine.run(make_request(PROMPT, "two")) == 20  # the pass compares every rank's bytes
    assert engine.invalid == set()


@pytest.mark.parametrize(("partial_blocks", "served"), [(False, 20), (True, 22)])
def test_partial_blocks_are_a_choice_with_one_latent_too(
    make_engine: Make, partial_blocks: bool, served: int
) -> None:
    """With MLA too, `store.partial_blocks` decides whether the partial tail is stored or computed again."""
    engine = make_engine(ranks=2, latent=True, **{"store.partial_blocks": partial_blocks})
    engine.run(make_request(PROMPT, "one"))
    engine.forget()
    assert engine.run(make_request(PROMPT, "two")) == served
    assert engine.invalid == set()


def test_a_store_that_fails_on_the_rank_that_writes_is_a_miss_for_all(make_engine: Make) -> None:
    worker = faulty_worker(testing_ext.FaultRule(FAIL, kind=D2H, page=1, times=1))
    engine = make_engine(ranks=2, latent=True, worker_class=worker)
    engine.run(make_request(PROMPT, "one"))
    engine.forget()
    assert engine.run(make_request(PROMPT, "two")) == 4


def test_ranks_that_disagree_on_it_are_refused(make_engine: Make) -> None:
    engine = make_engine(ranks=2, latent=True)
    shaken = dict(engine.side.handshakes.of_rank)
    engine.close()
    side = SchedulerSide(engine.side._spec)
    side.bind_block_pool(engine.pool)
    with pytest.raises(GeometryError, match="same bytes"):
        side.take_handshake(shaken | {1: replace(shaken[1], replicas=1)})
