"""What travels between the scheduler's side and the workers' side with each engine step. Plain and picklable."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from flexkv.adapters.common.base import LoadJob
from flexkv.facts.ranks import NO_UNIT, PoolGrant, RankFacts, UnitId
from flexkv.transfer.graph import OpId, OpResult, TransferGraph


@dataclass(frozen=True, slots=True)
class Handshake(RankFacts, KVConnectorHandshakeMetadata):
    """What one worker says about its KV pool before the first lookup, as vLLM carries it."""


@dataclass(slots=True)
class ConnectorMetadata(KVConnectorMetadata):
    """One step's orders to every worker of the unit.

    Attributes:
        unit: whose orders these are; NO_UNIT before the ranks have shaken hands.
        step: number of the last step with a forward, this one included.
        grant: the host pool, until every rank has said that it has it.
        early: stores of blocks that were complete before this step; submitted before its forward.
        reused: blocks that were handed out again while a store still reads them (op -> positions in the op): the
            forward must come after the copy, or those pages count as failed.
        stores: stores of blocks that this step's forward completes; submitted after it.
        settled: stores of blocks that earlier forwards completed and that this one only reads; submitted with `stores`.
        spares_loads: what the runner does in this step touches no block that an async load of `loads` fills.
        cancel: loads nobody waits for any more; what was not issued is dropped.
        void: loads whose bytes must not be used, however they end.
        idle: no forward runs in this step, so a worker may wait a moment for copies instead of spinning.
        disk_busy: the unit's disks are at work, which an idle step may wait a moment for as well.
    """

    unit: UnitId = NO_UNIT
    step: int = 0
    grant: PoolGrant | None = None
    early: list[TransferGraph] = field(default_factory=list)
    reused: dict[OpId, list[int]] = field(default_factory=dict)
    loads: list[LoadJob] = field(default_factory=list)
    stores: list[TransferGraph] = field(default_factory=list)
    settled: list[TransferGraph] = field(default_factory=list)
    spares_loads: bool = False
    cancel: list[OpId] = field(default_factory=list)
    void: list[OpId] = field(default_factory=list)
    idle: bool = False
    disk_busy: bool = False


@dataclass(slots=True)
class WorkerMetadata(KVConnectorWorkerMetadata):
    """What the workers tell the scheduler after a step.

    Attributes:
        unit: that ordered what this reports; NO_UNIT of ranks that serve none yet.
        step: of the orders that were carried out, where it had a forward. Once it is reported, so is how that forward
            ended, also of loads that were not ours.
        results: (rank, terminal result of an op on that rank), in the order in which they came.
        ready: host slots that a rank can use, sent when the number changed.
        errors: why a rank cannot use the pool at all.
        no_gds: why a rank cannot load from the disks without a page of host memory.
        handshakes: of ranks that have no pool yet. vLLM collects handshakes itself at the start, but a MultiConnector
            passes on those of one of its connectors only.
        others: reports of ranks that serve another unit, or shake hands as a rank of this report does.
    """

    unit: UnitId = NO_UNIT
    step: int = 0
    results: list[tuple[int, OpResult]] = field(default_factory=list)
    ready: dict[int, int] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    no_gds: dict[int, str] = field(default_factory=dict)
    handshakes: dict[int, Handshake] = field(default_factory=dict)
    others: list[WorkerMetadata] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerMetadata:
        """Joins another rank's report to this one."""
        assert isinstance(other, WorkerMetadata), f"expected a WorkerMetadata, got {type(other).__name__}"
        if other.unit != self.unit or not self.handshakes.keys().isdisjoint(other.handshakes):
            self.others.append(other)
            return self
        self.step = max(self.step, other.step)
        self.results.extend(other.results)
        self.ready.update(other.ready)
        self.errors.update(other.errors)
        self.no_gds.update(other.no_gds)
        self.handshakes.update(other.handshakes)
        self.others.extend(other.others)
        return self
