"""A worker whose copies go wrong where a test says so."""

from __future__ import annotations

from typing import Any, ClassVar

from flexkv import c_ext
from flexkv.adapters.vllm.worker import WorkerSide

FAIL, DELAY, STALL, CORRUPT = range(4)
"""Actions of a `c_ext.FaultRule`."""


def faulty_worker(*rules: Any) -> type[WorkerSide]:
    """A worker class around a FaultyMover with these rules; its mover is `movers[rank]`."""

    class FaultyWorker(WorkerSide):
        movers: ClassVar[dict[int, Any]] = {}

        def make_mover(self) -> Any:
            mover = c_ext.FaultyMover(c_ext.HostMover(), list(rules))
            self.movers[self.rank] = mover
            return mover

    return FaultyWorker
