"""Operations for engines with the faulty connector. They inspect the movers that copy pages, release stalled copies,
and run other requests while a load is stuck.
"""

from __future__ import annotations

import time
from typing import Any

from demo.engine_child import Operation, RequestTracker

from .block_ops import pool
from .request_ops import request_status
from .worker_calls import call_workers


def get_mover_state(worker: Any) -> dict[str, int]:
    """Runs in each worker: returns how often its mover was called, and on how many of these calls a fault rule
    acted."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    mover = get_kv_transfer_group().worker.faults
    return {"calls": mover.calls, "acted": mover.acted, "stalled": mover.stalled} if mover else {"acted": 0}


def _release(worker: Any) -> None:
    """Runs in each worker: releases its stalled copies."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    get_kv_transfer_group().worker.faults.release()


def faults(llm: Any) -> dict[str, Any]:
    """Returns, for every rank, the state of its mover: the number of calls, and of calls on which a fault rule
    acted."""
    # The engine's core may be in another process, so `call_workers` cannot be used. flexkv takes a function whose name
    # begins with `get_` to leave the weights.
    return {"ranks": llm.collective_rpc(get_mover_state)}


def release(llm: Any) -> dict[str, Any]:
    """Releases the stalled copies of every rank."""
    call_workers(llm, _release)
    return {}


def stuck_load(
    llm: Any,
    victim: dict[str, Any],
    others: list[dict[str, Any]],
    wait_s: float,
    abort: bool,
    deadline_s: float = 60.0,
) -> dict[str, Any]:
    """Runs a request whose load stalls, and runs other requests until the load's deadline has passed. Then releases the
    load.

    Returns:
        late: the stalled request's status and the number of engine blocks that were held, at the time when the others
            had finished and `wait_s` had passed.
        requests: results; the first one is that of the stalled request.
    """
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    tracker = RequestTracker(llm)
    ends_at = time.monotonic() + deadline_s
    name = f"v-{time.monotonic_ns()}"
    tracker.add(name, victim)

    def step_until(condition: Any, what: str) -> None:
        while not condition():
            if time.monotonic() > ends_at:
                raise TimeoutError(f"waited {deadline_s:g} s for {what}")
            llm_step(tracker, llm)

    step_until(lambda: request_status(scheduler, name) == "WAITING_FOR_REMOTE_KVS", "the load to start")
    step_until(lambda: any(rank.get("stalled", 0) for rank in faults(llm)["ranks"]), "the copy to stall")
    for number, request in enumerate(others):
        tracker.add(f"o{number}-{time.monotonic_ns()}", request)
    started = time.monotonic()
    step_until(lambda: all(result["finish"] for result in tracker.results()[1:]), "the others")
    if abort:
        llm.llm_engine.abort_request([name])
    step_until(lambda: time.monotonic() - started > wait_s, "the time to pass")
    late = {"status": request_status(scheduler, name), "held": pool(llm)["held"]}
    release(llm)
    while tracker.step():
        if time.monotonic() > ends_at:
            raise TimeoutError("the victim did not end after its load was let go")
    return {"late": late, "requests": tracker.results()}


def llm_step(tracker: RequestTracker, llm: Any) -> None:
    """Steps the engine even if it has no requests left, because an engine reports an aborted load only in a step."""
    if not tracker.step():
        llm.llm_engine.step()


OPERATIONS: dict[str, Operation] = {"faults": faults, "release": release, "stuck_load": stuck_load}
