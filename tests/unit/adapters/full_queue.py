"""Makes engines in which loads wait for a queue entry: the copy queue takes one op, and the first op stalls."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vllm.v1.request import Request

from tests import testing_ext
from tests.unit.adapters.faulty_worker import FaultyWorker, faulty_worker
from tests.unit.adapters.mini_engine import MiniEngine, stored_engine
from tests.unit.adapters.vllm_objects import BLOCK_TOKENS, make_request
from tests.unit.transfer.transfer_world import STALL

H2D = 0


def four_loads(
    make_engine: Callable[..., MiniEngine], tokens: Sequence[int], **settings: object
) -> tuple[MiniEngine, type[FaultyWorker], list[Request]]:
    """Makes an engine that has stored these tokens, and adds four requests, r0 to r3, that load them. Returns the
    engine, the class of its worker, and the requests.
    """
    slow = faulty_worker(testing_ext.FaultRule(STALL, kind=H2D, nth_op=0))
    engine = stored_engine(
        make_engine, tokens, blocks=64, worker_class=slow, **{"transfer.queue_ops": 1}, **settings
    )
    requests = [make_request(tokens, f"r{i}") for i in range(4)]
    for request in requests:
        assert engine.add(request) == len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS
    engine.step({})
    return engine, slow, requests
