"""Finds the other side of a connector in the same process.

vLLM runs scheduler and worker in one process when there is one rank (and always without multiprocessing). Then the
host pool can be private memory, and the scheduler's side learns of ended copies without an engine step in between.

Names do not pair them: a user may give two engines one `engine_id`. What pairs them is the pool that a handshake
names, or an object that both sides of one engine were made with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from flexkv.unit.ranks import PoolId

if TYPE_CHECKING:
    from flexkv.adapters.vllm.worker import WorkerSide

_engines: WeakKeyDictionary[WorkerSide, object] = WeakKeyDictionary()


def announce(worker: WorkerSide, engine: object = None) -> None:
    """Makes a worker's side known in this process.

    Args:
        engine: part of the engine's configuration: the same object on both of its sides.
    """
    _engines[worker] = engine


def workers_of_pools(pools: Sequence[PoolId]) -> tuple[WorkerSide, ...]:
    """The worker's side of each rank, by the pools that their handshakes name, if all of them live in this process."""
    by_pool = {worker.pool_id: worker for worker in list(_engines)}
    found = tuple(by_pool[pool] for pool in pools if pool in by_pool)
    return found if len(found) == len(pools) else ()


def worker_of_engine(engine: object) -> WorkerSide | None:
    """The worker's side in this process that was announced for this engine."""
    return next((worker for worker, its in list(_engines.items()) if its is engine), None)
