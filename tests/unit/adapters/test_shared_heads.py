"""If there are more ranks than KV heads, several adjacent ranks have the same head. They share a stripe, which the
first of these ranks writes.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests import testing_ext
from tests.unit.adapters.faulty_worker import faulty_worker
from tests.unit.adapters.mini_engine import MiniEngine
from tests.unit.adapters.vllm_objects import make_request
from tests.unit.transfer.transfer_world import FAIL

Make = Callable[..., MiniEngine]
PROMPT = list(range(100, 123))
D2H = 1


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("verify", [False, True])
def test_a_head_is_stored_once_and_served_to_all_ranks_that_have_it(
    make_engine: Make, remote: bool, verify: bool
) -> None:
    engine = make_engine(ranks=4, remote=remote, head_replicas=2, **{"host.verify": verify})
    apart = make_engine(ranks=4, remote=remote, **{"host.verify": verify})
    stripes = [places[0].stripe for places in engine.unit.places]
    assert stripes[0] == stripes[1] != stripes[2] == stripes[3]
    assert len({places[0].stripe for places in apart.unit.places}) == 4
    engine.run(make_request(PROMPT, "one"))
    moved = [
        worker.counters.value("flexkv_moved_pages_total", direction="store") for worker in engine.workers
    ]
    assert moved == [5, 0, 5, 0]
    engine.forget()
    assert engine.run(make_request(PROMPT, "two")) == 20  # the pass compares every rank's bytes
    assert engine.invalid == set()


def test_ranks_that_only_seem_to_have_one_head_load_what_is_wrong(make_engine: Make) -> None:
    """The control: ranks with different heads that share a stripe load wrong KV. Only two ranks have the same head, but
    four share a stripe.
    """
    engine = make_engine(ranks=4, head_replicas=4, **{"load.mode": "sync"})
    engine.pools.replicas = 2
    engine.run(make_request(PROMPT, "one"))
    engine.forget()
    request = make_request(PROMPT, "two")
    assert engine.add(request) == 20
    engine.step()
    assert engine.wrong("two", 20) != []


def test_a_store_that_fails_on_the_rank_that_writes_is_a_miss_for_all(make_engine: Make) -> None:
    worker = faulty_worker(testing_ext.FaultRule(FAIL, kind=D2H, page=1, times=1))
    engine = make_engine(ranks=4, head_replicas=2, worker_class=worker)
    engine.run(make_request(PROMPT, "one"))
    engine.forget()
    assert engine.run(make_request(PROMPT, "two")) == 4
