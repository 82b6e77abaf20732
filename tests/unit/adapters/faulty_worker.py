"""A worker whose copies go wrong where a test says so."""

from __future__ import annotations

from typing import Any, ClassVar

from flexkv import c_ext
from flexkv.adapters.vllm.worker import WorkerSide

FAIL, DELAY, STALL, CORRUPT = range(4)
"""Actions of a `c_ext.FaultRule`."""


class FaultyWorker(WorkerSide):
    """A worker around a FaultyMover with `rules`; its mover is `movers[rank]`."""

    rules: ClassVar[list[Any]] = []
    movers: ClassVar[dict[int, Any]] = {}

    def make_mover(self) -> Any:
        mover = c_ext.FaultyMover(c_ext.HostMover(), self.rules)
        self.movers[self.rank] = mover
        return mover


def faulty_worker(*faults: Any) -> type[FaultyWorker]:
    """A class of its own with these rules."""

    class ThisFaultyWorker(FaultyWorker):
        rules: ClassVar[list[Any]] = list(faults)
        movers: ClassVar[dict[int, Any]] = {}

    return ThisFaultyWorker
