"""Messages between rank 0's scheduler and the ranks' workers. All are plain and picklable."""

from __future__ import annotations

from dataclasses import dataclass

from flexkv.adapters.common.load_job import LoadJob
from flexkv.facts.ranks import PoolGrant, RankFacts
from flexkv.transfer.graph import TransferGraph


@dataclass(frozen=True, slots=True)
class StepMetadata:
    """The result of `build_connector_meta`, which the engine broadcasts to every rank.

    Attributes:
        step: number of the step, counting up. A worker ignores metadata with a number that it has already seen.
        address: the address at which the scheduler listens for its ranks. No two schedulers have the same address, so a
            rank that has joined one scheduler can refuse the steps of another scheduler.
        loads: loads of requests that this step's forward pass computes.
        computes: whether this step's forward pass computes any request.
    """

    step: int
    address: str
    loads: tuple[LoadJob, ...] = ()
    computes: bool = True


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """Orders the ranks to store the blocks of a finished request. A rank starts after the engine has passed the
    request's id to it in `get_finished`.

    Attributes:
        request_id: the engine's id of the request.
        graph: the store ops; None if nothing is stored, and the request's blocks are kept only until its load has
            finished.
        first_step: number of the first step that computed the request; 0 if none did. A rank on which this step or a
            later one was interrupted by an error does not store the request.
    """

    request_id: int
    graph: TransferGraph | None
    first_step: int


@dataclass(frozen=True, slots=True)
class CancelOrder:
    """Cancels the request's load between steps: copies that were not issued yet are dropped. The scheduler orders no
    further load with this id."""

    request_id: int


@dataclass(frozen=True, slots=True)
class RankJoin:
    """One rank's first message to the scheduler; all its later messages are `RankReport`s.

    Attributes:
        rank: number of the rank.
        facts: facts about the rank's pool.
        block_tokens: tokens per block of the rank's pool.
    """

    rank: int
    facts: RankFacts
    block_tokens: int


Order = LoadJob | SaveOrder | CancelOrder | PoolGrant
"""A message from the scheduler to every rank. A `LoadJob` orders a load between steps. A rank starts it only after the
engine has passed the request's id to it in `get_finished`, because only then has this rank enqueued every forward pass
that may still use the blocks."""
