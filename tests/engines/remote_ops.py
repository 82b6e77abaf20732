"""Operations on the remote tier of an engine whose scheduler runs in this process. One operation returns the data with
which a test can read the engine's values in the store. Another one sends signals to processes while pages are being
read from the store.
"""

from __future__ import annotations

import base64
import os
import pickle
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

from demo.engine_child import Operation, RequestTracker
from flexkv.cache.manager import LocalCacheManager
from flexkv.cache.tiers.remote.tier import RemoteTier
from flexkv.remote.plane import RemotePlane
from flexkv.transfer.graph import OpKind, TransferGraph

HELPER = 0
"""Used in place of a process id. It stands for the helper, in which the store's client runs."""


def _plane(llm: Any) -> RemotePlane:
    unit = llm.llm_engine.engine_core.engine_core.scheduler.connector.scheduler.unit
    assert isinstance(unit.manager, LocalCacheManager)
    [tier] = [tier for tier in unit.manager.tiers if isinstance(tier, RemoteTier)]
    assert isinstance(tier.plane, RemotePlane)
    return tier.plane


def value_parts(llm: Any) -> dict[str, Any]:
    """Returns the owner of the engine's values, and the geometry of their KV groups. Both results are pickled."""
    setup = _plane(llm).link._setup
    return {"pickled": base64.b64encode(pickle.dumps((setup.owner, setup.groups))).decode()}


def signal_while_reading(
    llm: Any,
    requests: list[dict[str, Any]],
    before: Sequence[Sequence[int]] = (),
    after: Sequence[Sequence[int]] = (),
    later: Sequence[Sequence[int]] = (),
    reset: bool = False,
) -> dict[str, Any]:
    """Runs requests, and sends signals to processes around the first read of pages from the store.

    Args:
        before, after: pairs of a process id (or HELPER) and a signal, sent right before the read is submitted, and
            right after.
        later: pairs of the same kind, sent `STEPS_MEANWHILE` engine steps later.
        reset: whether to drop the engine's own cache and flexkv's after these steps, before sending `later`.

    Returns:
        reads: number of pages of the first read.
        moving: number of ops that were in flight after these steps.
        reset: whether the engine reported that the reset was done.
    """
    plane = _plane(llm)
    submit = plane.submit
    reads: list[int] = []

    def send(signals: Sequence[Sequence[int]]) -> None:
        for pid, number in signals:
            process = plane.link._process
            assert process is not None
            os.kill(process.pid if pid == HELPER else pid, signal.Signals(number))

    def submitted(graph: TransferGraph) -> int | None:
        pages = sum(op.pages for op in graph.ops if op.kind is OpKind.DISK_READ)
        if not pages or reads:
            return submit(graph)
        reads.append(pages)
        send(before)
        ticket = submit(graph)
        send(after)
        return ticket

    plane.submit = submitted  # type: ignore[method-assign]
    try:
        found = _run(llm, requests, reads, lambda: send(later), plane, reset)
    finally:
        plane.submit = submit  # type: ignore[method-assign]
    return {"reads": sum(reads), **found}


STEPS_MEANWHILE = 5


def _run(
    llm: Any,
    requests: list[dict[str, Any]],
    reads: list[int],
    later: Callable[[], None],
    plane: RemotePlane,
    reset: bool,
) -> dict[str, Any]:
    tracker = RequestTracker(llm)
    for number, request in enumerate(requests):
        tracker.add(f"s{number}-{time.monotonic_ns()}", request)
    while not reads and tracker.step():
        pass
    for _ in range(STEPS_MEANWHILE):
        tracker.step()
    moving, done = len(plane._moving), False
    if reset:
        done = bool(llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True))
    later()
    while tracker.step():
        pass
    return {"moving": moving, "reset": done, "requests": tracker.results()}


OPERATIONS: dict[str, Operation] = {"value_parts": value_parts, "signal_while_reading": signal_while_reading}
