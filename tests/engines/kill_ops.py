"""An operation for engines with the faulty connector: it kills one of the engine's processes while a rank copies."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from demo.engine_child import Operation, RequestTracker

from .fault_ops import faults

TITLES = {"scheduler": "EngineCore", "rank": "Worker_TP1"}
"""For each process that a test can kill, a part of the process title that vLLM gives it."""
LOOK_S = 0.02


def kill_while_copying(
    llm: Any, requests: list[dict[str, Any]], victim: str, deadline_s: float = 60.0
) -> dict[str, Any]:
    """Adds requests, and kills the process `victim` as soon as a fault rule acts on a copy. The engine cannot be used
    afterwards, because vLLM's front end may wait for a scheduler that no longer exists.

    Args:
        victim: a key of TITLES.

    Returns:
        acted: whether a rule acted before the deadline.
        processes: process ids of all child processes that the engine had before the kill.
    """
    import psutil  # type: ignore[import-untyped]

    children = psutil.Process().children(recursive=True)
    [killed] = [child.pid for child in children if TITLES[victim] in " ".join(child.cmdline())]
    before = acted(llm)
    tracker = RequestTracker(llm)
    for number, request in enumerate(requests):
        tracker.add(f"k{number}-{time.monotonic_ns()}", request)
    ends_at = time.monotonic() + deadline_s
    while (met := acted(llm) > before) is False and time.monotonic() < ends_at:
        time.sleep(LOOK_S)
    os.kill(killed, signal.SIGKILL)
    return {"acted": met, "processes": [child.pid for child in children]}


def acted(llm: Any) -> int:
    return sum(int(rank["acted"]) for rank in faults(llm)["ranks"])


OPERATIONS: dict[str, Operation] = {"kill_while_copying": kill_while_copying}
