"""Makes workers whose copies fail according to rules that a test gives."""

from __future__ import annotations

import time
from threading import Thread
from typing import Any, ClassVar

from flexkv import c_ext
from flexkv.adapters.vllm.worker import WorkerSide
from tests import testing_ext

LONG_S = 60.0


class FaultyWorker(WorkerSide):
    """A worker whose copies fail according to `rules`. `movers` maps each rank to its `FaultyMover`."""

    rules: ClassVar[list[Any]] = []
    movers: ClassVar[dict[int, Any]] = {}

    def make_mover(self) -> Any:
        mover = testing_ext.FaultyMover(c_ext.HostMover(), self.rules)
        self.movers[self.rank] = mover
        return mover


def faulty_worker(*faults: Any) -> type[FaultyWorker]:
    """Returns a new worker class whose copies fail according to the rules `faults`."""

    class ThisFaultyWorker(FaultyWorker):
        rules: ClassVar[list[Any]] = list(faults)
        movers: ClassVar[dict[int, Any]] = {}

    return ThisFaultyWorker


def release_when_given_up(worker: WorkerSide, mover: Any) -> Thread:
    """Starts a thread that waits until the worker has given up a load, and then releases the stalled copies of `mover`.
    Returns the thread.
    """

    def watch() -> None:
        ends_s = time.monotonic() + LONG_S
        while not any(op.given_up for op in list(worker._ops._ops.values())) and time.monotonic() < ends_s:
            time.sleep(0.001)
        mover.release()

    thread = Thread(target=watch)
    thread.start()
    return thread
