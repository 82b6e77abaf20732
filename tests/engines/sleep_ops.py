"""Operations that send an engine to sleep. On a CPU, vLLM does not free the memory for it, but all other steps are the
same as on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from demo.engine_child import Operation, RequestTracker

from .request_ops import request_status


def sleep_while_copying(
    llm: Any, requests: list[dict[str, Any]], mode: str, ends_copies: bool, deadline_s: float = 30.0
) -> dict[str, Any]:
    """Sends the engine to sleep while the requests' blocks are being stored, and wakes it up.

    Args:
        mode: what vLLM does with the requests: "abort" or "keep".
        ends_copies: whether the connector ends copies before the sleep; False for a control.

    Returns:
        before: number of copies in flight when the sleep was requested.
        at_sleep: number of copies in flight when the engine would have freed its KV memory.
        requests: results; that of an aborted request contains the tokens generated before the abort.
    """
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    core = llm.llm_engine.engine_core.engine_core
    connector, worker = core.scheduler.connector, get_kv_transfer_group().worker
    executor_sleep: Callable[[int], None] = core.model_executor.sleep
    found: dict[str, Any] = {}

    def sleep(level: int) -> None:
        found["at_sleep"] = len(worker._ops._ops)
        executor_sleep(level)

    tracker = RequestTracker(llm)
    names = [f"s{number}-{time.monotonic_ns()}" for number in range(len(requests))]
    for name, request in zip(names, requests, strict=True):
        tracker.add(name, request)
    ends_at = time.monotonic() + deadline_s
    while not worker._ops._ops:
        if not tracker.step() or time.monotonic() > ends_at:
            raise TimeoutError("nothing was stored")
    found["before"] = len(worker._ops._ops)
    core.model_executor.sleep = sleep
    end_copies = connector.scheduler._end_copies
    if not ends_copies:
        connector.scheduler._end_copies = lambda: True
    try:
        llm.sleep(level=1, mode=mode)
    finally:
        core.model_executor.sleep = executor_sleep
        connector.scheduler._end_copies = end_copies
    llm.wake_up()
    if mode == "abort":
        # If all of vLLM runs in one process, only its scheduler aborts the requests, and its front end would wait for
        # them. So this aborts them in the front end.
        llm.llm_engine.abort_request(names)
    while mode == "keep" and tracker.step():
        pass
    return found | {"requests": tracker.results()}


def sleep_while_loading(llm: Any, request: dict[str, Any], deadline_s: float = 30.0) -> dict[str, Any]:
    """Sends the engine to sleep while a request waits for its load. Returns the engine's reply. Before it returns, the
    request has been aborted and the engine is awake again.
    """
    core = llm.llm_engine.engine_core.engine_core
    tracker, name = RequestTracker(llm), f"s-{time.monotonic_ns()}"
    tracker.add(name, request)
    ends_at = time.monotonic() + deadline_s
    while request_status(core.scheduler, name) != "WAITING_FOR_REMOTE_KVS":
        if not tracker.step() or time.monotonic() > ends_at:
            raise TimeoutError("nothing was loaded")
    error = ""
    try:
        llm.sleep(level=1, mode="abort")
    except RuntimeError as refusal:
        error = str(refusal)
    asleep = core.model_executor.is_sleeping
    llm.wake_up()
    llm.llm_engine.abort_request([name])
    return {"error": error, "asleep": asleep}


def call_engine(llm: Any, method: str, **arguments: Any) -> dict[str, Any]:
    """Calls a method of vLLM's engine. After a call of `sleep`, wakes the engine up again."""
    getattr(llm.llm_engine, method)(**arguments)
    if method == "sleep":
        llm.wake_up(tags=["scheduling"] if arguments["level"] == 0 else None)
    return {}


OPERATIONS: dict[str, Operation] = {
    "sleep_while_copying": sleep_while_copying,
    "sleep_while_loading": sleep_while_loading,
    "call_engine": call_engine,
}
