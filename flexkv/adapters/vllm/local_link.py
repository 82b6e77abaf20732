"""Finds the other side of a connector in the same process.

vLLM runs scheduler and worker in one process when there is one rank (and always without multiprocessing). Then the
host pool can be private memory, and the scheduler's side learns of ended copies without an engine step in between.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

if TYPE_CHECKING:
    from flexkv.adapters.vllm.worker import WorkerSide

_workers: WeakValueDictionary[tuple[str, int], WorkerSide] = WeakValueDictionary()


def announce(engine_id: str, worker: WorkerSide) -> None:
    """Makes a worker's side known under its engine and rank; a later one of the same name replaces it."""
    _workers[(engine_id, worker.rank)] = worker


def workers_here(engine_id: str, ranks: int) -> tuple[WorkerSide, ...]:
    """All ranks' worker sides if every one of them lives in this process, else none."""
    found = [_workers.get((engine_id, rank)) for rank in range(ranks)]
    present = tuple(worker for worker in found if worker is not None)
    return present if len(present) == ranks else ()
