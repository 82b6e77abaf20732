"""Tests two ranks in two processes. Each rank has its own heads, and no block is used before the copies of both ranks
have ended.
"""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest

from flexkv import c_ext
from flexkv.transfer.graph import OpKind
from tests import testing_ext
from tests.unit.tensorrt_llm.pair import run_pair
from tests.unit.tensorrt_llm.pool import Shape
from tests.unit.tensorrt_llm.world import PROMPT, WHOLE, World
from tests.unit.transfer.transfer_world import CORRUPT, STALL

LONG_S = 60.0


def hits(world: World) -> list[int]:
    world.serve(PROMPT)
    first = world.hit(world.serve(PROMPT))
    for tail in range(3):
        world.request([*PROMPT[:20], 1, tail, 3, 4, 5])
    world.executor.run()
    return [first, world.hit(world.serve([*PROMPT, 8, 8, 8]))]


def test_both_ranks_load_their_heads() -> None:
    assert run_pair(hits, {"FLEXKV_LOAD_MODE": "sync"}, chunk=9) == [[WHOLE, WHOLE]] * 2


def test_latents_are_stored_once() -> None:
    """With MLA, all ranks hold the same bytes. Only rank 0 stores the bytes, and both ranks load them."""
    shape = Shape(blocks=12, kv=1, heads=1, tokens=64)
    assert run_pair(latent_hits, {}, shape=shape) == [128, 128]


def latent_hits(world: World) -> int:
    world.executor.pool.rank = 0  # makes both ranks hold the same bytes
    prompt = [(3 * n) % 500 for n in range(130)]
    world.serve(prompt)
    return world.hit(world.serve(prompt))


stalling: list[Any] = []
"""In the process of rank 1, this list holds rank 1's mover, whose copies stall. In other processes it is empty."""


def stalls_on_rank_1() -> Any:
    """Makes rank 1's first load stall until it is released. The load of rank 0 ends long before."""
    if multiprocessing.parent_process() is None:
        return None
    rule = testing_ext.FaultRule(STALL, kind=int(OpKind.H2D), times=1)
    stalling.append(testing_ext.FaultyMover(c_ext.HostMover(), [rule]))
    return stalling[0]


def late_and_cancelled(world: World) -> list[Any]:
    """Cancels a request while its load is in flight on rank 1, then runs requests with async loads."""
    world.serve(PROMPT)
    request = world.request(PROMPT)
    world.executor.step()
    for mover in stalling:
        assert mover.wait_stalled(1, LONG_S)
    for _ in range(20):
        world.executor.step()
    was_loading = request.state == "loading"
    world.executor.cancel(request)
    for _ in range(20):
        world.executor.step()
    was_kept = request.state == "saving"
    for mover in stalling:
        mover.release()
    world.executor.run()
    return [was_loading, was_kept, *hits(world)]


def test_a_late_rank_holds_the_others() -> None:
    """The engine continues only when every rank has returned an id. An id that one rank returned early is not lost."""
    assert run_pair(late_and_cancelled, {}, movers=stalls_on_rank_1) == [[True, True, WHOLE, WHOLE]] * 2


def corrupt_on_rank_1() -> Any:
    if multiprocessing.parent_process() is None:
        return None
    rule = testing_ext.FaultRule(CORRUPT, kind=int(OpKind.H2D))
    return testing_ext.FaultyMover(c_ext.HostMover(), [rule])


def test_wrong_bytes_of_one_rank_are_seen() -> None:
    """The control for the tests above: wrong bytes on rank 1 make a test fail."""
    with pytest.raises(AssertionError, match="rank 1"):
        run_pair(hits, {}, movers=corrupt_on_rank_1)
