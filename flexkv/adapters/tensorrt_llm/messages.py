"""What rank 0's scheduler and the ranks' workers tell each other. Plain and picklable."""

from __future__ import annotations

from dataclasses import dataclass, field

from flexkv.adapters.common.base import LoadJob
from flexkv.facts.ranks import NO_UNIT, PoolGrant, RankFacts, UnitId
from flexkv.transfer.graph import OpResult, TransferGraph


@dataclass(frozen=True, slots=True)
class StepMetadata:
    """What `build_connector_meta` returns: the engine broadcasts it to every rank, and never takes it back.

    Attributes:
        step: counts up, so that a worker that sees the same metadata again does nothing twice.
        address: where the scheduler listens for its ranks. No two schedulers have the same, so a rank that has joined
            one takes no step of another.
        loads: of requests that this step's forward computes.
        requests: all that this step's forward computes, by id.
    """

    step: int
    address: str
    loads: tuple[LoadJob, ...] = ()
    requests: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """A load between steps. A rank starts it when its engine has told it the request's id: only then has this rank
    enqueued every forward that may still use the blocks."""

    request_id: int
    job: LoadJob


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """What a rank stores of a request that has ended, once its engine has told it the id. `graph` may be None: then
    the request's blocks only wait for its load to end."""

    request_id: int
    graph: TransferGraph | None


@dataclass(frozen=True, slots=True)
class CancelOrder:
    """Nobody waits for the request's load any more; what was not issued is dropped, and no load of this id follows."""

    request_id: int


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one rank says.

    Attributes:
        facts: of its pool, in its first report, with `block_tokens` as its pool has them.
        ready: host slots that it can use; None when the number has not changed.
        error: why it cannot use the host pool at all.
        unit: that the rank serves; NO_UNIT before its grant.
    """

    rank: int
    facts: RankFacts | None = None
    block_tokens: int = 0
    results: tuple[OpResult, ...] = ()
    ready: int | None = None
    error: str = ""
    unit: UnitId = NO_UNIT


Order = LoadOrder | SaveOrder | CancelOrder | PoolGrant


@dataclass(slots=True)
class Inbox:
    """Orders of one rank that wait for their id."""

    loads: dict[int, LoadOrder] = field(default_factory=dict)
    saves: dict[int, SaveOrder] = field(default_factory=dict)
