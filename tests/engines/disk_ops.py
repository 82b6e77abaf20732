"""Operations on the disk tier of an engine whose scheduler runs in this process. They withhold the results of reads.
They also count how many pages' reads have begun when the scheduler first looks up a request.
"""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

from demo.engine_child import Operation
from flexkv.cache.base import HUB
from flexkv.cache.tiers.contract import Plane
from flexkv.simulation.world import DISK
from flexkv.transfer.graph import OpId, OpKind, OpResult, TransferGraph


class LateReads:
    """Wraps the plane of a tier, and withholds the results of reads. It passes all other calls on."""

    def __init__(self, plane: Plane) -> None:
        self.plane = plane
        self.in_flight: set[OpId] = set()
        self.ended: list[OpResult] = []

    def submit(self, graph: TransferGraph) -> int | None:
        ticket = self.plane.submit(graph)
        if ticket is not None:
            self.in_flight.update(op.op_id for op in graph.ops if op.kind is OpKind.DISK_READ)
        return ticket

    def poll(self) -> list[OpResult]:
        results = self.plane.poll()
        self.ended += [result for result in results if result.op_id in self.in_flight]
        return [result for result in results if result.op_id not in self.in_flight]

    def close(self, deadline_s: float) -> bool:
        return self.plane.close(deadline_s)


def _unit(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler.connector.scheduler.unit


def hold_reads(llm: Any, taken_for_stored: bool = False) -> dict[str, Any]:
    """Withholds the results of disk reads until `let_reads_go` is called.

    Args:
        taken_for_stored: for a control, makes stores skip the pages that a read is fetching, as if such pages were
            stored.
    """
    unit = _unit(llm)
    planes = unit.driver._planes
    planes[DISK] = LateReads(planes[DISK])
    if taken_for_stored:
        unit.manager.tiers[HUB].stores._take_over = lambda offer, room: 0
    return {}


def let_reads_go(llm: Any, deadline_s: float = 30.0) -> dict[str, Any]:
    """Waits until the withheld reads are done, and releases their results.

    Returns:
        failed: number of pages that the reads did not deliver.
    """
    unit = _unit(llm)
    planes = unit.driver._planes
    late = planes[DISK]
    ends_s = time.monotonic() + deadline_s
    while len(late.ended) < len(late.in_flight):
        if time.monotonic() > ends_s:
            raise TimeoutError(f"the disk has not ended its reads after {deadline_s:g} s")
        unit.poll()
        time.sleep(0.01)
    planes[DISK] = late.plane
    for result in late.ended:
        unit.manager.work.complete(result)
    unit.manager.check_integrity()
    return {"failed": sum(len(result.failed) for result in late.ended)}


def drop_host(llm: Any) -> dict[str, Any]:
    """Evicts from host memory every page that is not leased. Returns how many pages remain."""
    hub = _unit(llm).manager.hub
    hub.evict(0, len(hub.index))
    return {"left": len(hub.index)}


def exchange_pages(llm: Any) -> dict[str, Any]:
    """A control: gives every slot of host memory the bytes of another slot, as if leased slots had been evicted and
    reused."""
    pool = _unit(llm).pool
    slots = [pool.slot(slot) for slot in range(pool.ready_slots)]
    first = slots[0].copy()
    for slot, following in pairwise(slots):
        slot[:] = following
    slots[-1][:] = first
    return {}


class FirstAsks:
    """Wraps the plane of the disk. When the scheduler first looks up a request, it records how many pages have been
    submitted for reading so far, for all requests together.
    """

    def __init__(self, plane: Plane) -> None:
        self.plane = plane
        self.pages = 0
        self.at_first_ask: list[int] = []
        self._asked: set[str] = set()

    def submit(self, graph: TransferGraph) -> int | None:
        self.pages += sum(op.pages for op in graph.ops if op.kind is OpKind.DISK_READ)
        return self.plane.submit(graph)

    def poll(self) -> list[OpResult]:
        return self.plane.poll()

    def close(self, deadline_s: float) -> bool:
        return self.plane.close(deadline_s)

    def asked(self, request_id: str) -> None:
        if request_id not in self._asked:
            self._asked.add(request_id)
            self.at_first_ask.append(self.pages)


def watch_first_asks(llm: Any, without_hook: bool = False) -> dict[str, Any]:
    """Begins to record reads, and the scheduler's first lookup of each request.

    Args:
        without_hook: for a control, disables the hook that prefetches for waiting requests.
    """
    side = llm.llm_engine.engine_core.engine_core.scheduler.connector.scheduler
    planes = side.unit.driver._planes
    watch = planes[DISK] = FirstAsks(planes[DISK])
    match = side.__class__.match

    def asked(request: Any, computed_tokens: int) -> Any:
        watch.asked(request.request_id)
        return match(side, request, computed_tokens)

    side.match = asked
    if without_hook:
        side.prefetch = lambda request: None
    return {}


def first_asks(llm: Any) -> dict[str, Any]:
    """Ends `watch_first_asks`, and returns the recorded numbers."""
    side = llm.llm_engine.engine_core.engine_core.scheduler.connector.scheduler
    planes = side.unit.driver._planes
    watch = planes[DISK]
    planes[DISK] = watch.plane
    del side.match
    side.__dict__.pop("prefetch", None)
    return {"pages": watch.at_first_ask, "all": watch.pages}


OPERATIONS: dict[str, Operation] = {
    "hold_reads": hold_reads,
    "let_reads_go": let_reads_go,
    "drop_host": drop_host,
    "exchange_pages": exchange_pages,
    "watch_first_asks": watch_first_asks,
    "first_asks": first_asks,
}
