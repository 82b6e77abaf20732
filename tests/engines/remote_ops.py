"""Operations on the remote tier of an engine whose scheduler runs in this process: they return the parts of its values,
and send signals to other processes at the moment when pages are read.
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
"""Stands in place of a process id for the process with the store's client."""


def _plane(llm: Any) -> RemotePlane:
    unit = llm.llm_engine.engine_core.engine_core.scheduler.connector.scheduler.unit
    assert isinstance(unit.manager, LocalCacheManager)
    [tier] = [tier for tier in unit.manager.tiers if isinstance(tier, RemoteTier)]
    assert isinstance(tier.plane, RemotePlane)
    return tier.plane


def value_parts(llm: Any) -> dict[str, Any]:
    """The owner of the engine's values and the geometry of their groups, pickled."""
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
    """Runs requests; sends signals once, at the first read of pages from the store.

    Args:
        before, after: process ids (or HELPER) and signals, sent right before and after the reads are submitted.
        later: signals sent when some engine steps have passed, and after the reset.
        reset: whether to drop the engine's own cache and the connector's before the `later` signals.

    Returns:
        reads: pages that were submitted at the time of the signals.
        moving: ops that were under way when `later` was sent.
        reset: whether the reset was done.
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
