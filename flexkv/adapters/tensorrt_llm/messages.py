"""Messages between rank 0's scheduler and the ranks' workers. Plain and picklable."""

from __future__ import annotations

from dataclasses import dataclass

from flexkv.adapters.common.load_job import LoadJob
from flexkv.facts.ranks import PoolGrant, RankFacts
from flexkv.transfer.graph import TransferGraph


@dataclass(frozen=True, slots=True)
class StepMetadata:
    """The result of `build_connector_meta`, which the engine broadcasts to every rank.

    Attributes:
        step: counts up, so that a worker that gets the same metadata again does nothing twice.
        address: where the scheduler listens for its ranks. No two schedulers have the same address, so a rank that has
            joined one scheduler can refuse the steps of another.
        loads: loads of requests that this step's forward pass computes.
        computes: this step's forward pass computes a request.
    """

    step: int
    address: str
    loads: tuple[LoadJob, ...] = ()
    computes: bool = True


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """The stores of a request that has ended. A rank starts them once the engine has named the request's id to it. If
    `graph` is None, the request's blocks only wait for its load to end.

    Attributes:
        first_step: the first step that computed the request; 0 for none. A rank on which this step or a later one broke
            off does not store the request.
    """

    request_id: int
    graph: TransferGraph | None
    first_step: int


@dataclass(frozen=True, slots=True)
class CancelOrder:
    """Cancels the request's load between steps: copies that were not issued are dropped. No load of this id follows."""

    request_id: int


@dataclass(frozen=True, slots=True)
class RankJoin:
    """One rank's first message to the scheduler; all others are `RankReport`s.

    Attributes:
        facts: facts about the rank's pool.
        block_tokens: tokens per block of that pool.
    """

    rank: int
    facts: RankFacts
    block_tokens: int


Order = LoadJob | SaveOrder | CancelOrder | PoolGrant
"""A message to every rank. A `LoadJob` is a load between steps: a rank starts it once the engine has named the
request's id to it, because only then has this rank enqueued every forward pass that may still use the blocks."""
