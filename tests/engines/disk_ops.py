"""Operations on the disk tier of an engine whose scheduler runs in this process: reads that end late, and a manager
that takes them for stored."""

from __future__ import annotations

import time
from typing import Any

from demo.engine_child import Operation
from flexkv.cache.ids import HUB
from flexkv.cache.tier import Plane
from flexkv.simulation.world import DISK
from flexkv.transfer.graph import OpId, OpKind, OpResult, TransferGraph


class LateReads:
    """A plane whose reads end when it is told so; all else as the plane behind it."""

    def __init__(self, plane: Plane) -> None:
        self.plane = plane
        self.under_way: set[OpId] = set()
        self.ended: list[OpResult] = []

    def submit(self, graph: TransferGraph) -> int | None:
        ticket = self.plane.submit(graph)
        if ticket is not None:
            self.under_way.update(op.op_id for op in graph.ops if op.kind is OpKind.DISK_READ)
        return ticket

    def poll(self) -> list[OpResult]:
        results = self.plane.poll()
        self.ended += [result for result in results if result.op_id in self.under_way]
        return [result for result in results if result.op_id not in self.under_way]

    def close(self, deadline_s: float) -> bool:
        return self.plane.close(deadline_s)


def _unit(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler.connector.scheduler.unit


def hold_reads(llm: Any, taken_for_stored: bool = False) -> dict[str, Any]:
    """From here on reads from disk end when they are let go.

    Args:
        taken_for_stored: a store of what a read is bringing counts as known: the control.
    """
    unit = _unit(llm)
    planes = unit.driver._planes
    planes[DISK] = LateReads(planes[DISK])
    if taken_for_stored:
        unit.manager.tiers[HUB].stores._take_over = lambda offer, room: 0
    return {}


def let_reads_go(llm: Any, deadline_s: float = 30.0) -> dict[str, Any]:
    """The reads that were held end as they did.

    Returns:
        failed: pages that they did not bring.
    """
    unit = _unit(llm)
    planes = unit.driver._planes
    late = planes[DISK]
    ends_s = time.monotonic() + deadline_s
    while len(late.ended) < len(late.under_way):
        if time.monotonic() > ends_s:
            raise TimeoutError(f"the disk has not ended its reads after {deadline_s:g} s")
        unit.poll()
        time.sleep(0.01)
    planes[DISK] = late.plane
    for result in late.ended:
        unit.manager.work.complete(result)
    unit.manager.check_integrity()
    return {"failed": sum(len(result.failed) for result in late.ended)}


OPERATIONS: dict[str, Operation] = {"hold_reads": hold_reads, "let_reads_go": let_reads_go}
