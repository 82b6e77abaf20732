"""Messages that each engine step carries between the scheduler's side and the workers' side. Plain and picklable."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from flexkv.adapters.common.load_job import LoadJob
from flexkv.adapters.vllm.blend.orders import Arrival, BlendOrders
from flexkv.facts.ranks import NO_UNIT, PoolGrant, RankFacts, UnitId
from flexkv.observe import BlendResult
from flexkv.transfer.graph import OpId, OpResult, TransferGraph


@dataclass(frozen=True, slots=True)
class Handshake(RankFacts, KVConnectorHandshakeMetadata):
    """One worker's facts about its KV pool, in the form that vLLM carries before the first lookup.

    Attributes:
        blend_refusal: why this rank cannot blend; empty if it can, None if blending is not requested.
    """

    blend_refusal: str | None = None


@dataclass(slots=True)
class ConnectorMetadata(KVConnectorMetadata):
    """One step's orders to every worker of the unit.

    Attributes:
        unit: the unit that gives the orders; NO_UNIT before the ranks have shaken hands.
        step: number of the last step with a forward pass, this one included.
        grant: the grant of the host pool, sent until every rank has reported that it has the pool.
        early: stores of blocks that were complete before this step; submitted before its forward pass.
        reused: blocks that the engine has reused while a store still reads them (op -> positions in the op): the
            forward pass must come after the copy, or those pages count as failed.
        loads: loads to submit before the forward pass.
        stores: stores of blocks that this step's forward pass completes; submitted after it.
        settled: stores of blocks that earlier forward passes completed and that this one only reads; submitted with
            `stores`.
        spares_loads: in this step the runner touches no block that an async load of `loads` fills.
        cancel: loads for which no request waits any more; copies that were not issued are dropped.
        void: ops whose bytes must not be used, however they end.
        idle: no forward pass runs in this step, so a worker may wait a moment for copies instead of spinning.
        disk_busy: disks are at work or segments are being loaded, and an idle step may wait a moment for them too.
        blend: the orders for blending; None for none.
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
    blend: BlendOrders | None = None


@dataclass(slots=True)
class WorkerMetadata(KVConnectorWorkerMetadata):
    """The workers' report to the scheduler after a step.

    Attributes:
        unit: the unit whose orders this reports on; NO_UNIT for ranks that serve none yet.
        step: step number of the orders that were carried out; 0 if it has not changed since the last report. Once a
            step is reported, the outcome of its forward pass is known, including that of another connector's loads.
        results: (rank, terminal result of an op on that rank), in order of arrival.
        ready: rank -> host slots that it can use; sent when the number has changed.
        errors: rank -> why it cannot use the pool at all.
        no_gds: rank -> why it cannot load from the disks without a page of host memory.
        handshakes: handshakes of ranks that have no host pool yet. vLLM collects handshakes itself at the start, but a
            MultiConnector passes on those of only one of its connectors.
        blend_arrived: rank -> see `BlendPages.take_arrived`.
        blend_stored: rank -> see `BlendPages.take_stored`.
        blend_disk: rank -> whether it reads segments from disk or writes them; sent when that has changed.
        others: reports of ranks that serve another unit, or that shake hands for a rank that this report already has.
    """

    unit: UnitId = NO_UNIT
    step: int = 0
    results: list[tuple[int, OpResult]] = field(default_factory=list)
    ready: dict[int, int] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    no_gds: dict[int, str] = field(default_factory=dict)
    handshakes: dict[int, Handshake] = field(default_factory=dict)
    blend_arrived: dict[int, dict[str, Arrival]] = field(default_factory=dict)
    blend_stored: dict[int, dict[int, BlendResult]] = field(default_factory=dict)
    blend_disk: dict[int, bool] = field(default_factory=dict)
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
        self.blend_arrived.update(other.blend_arrived)
        self.blend_stored.update(other.blend_stored)
        self.blend_disk.update(other.blend_disk)
        self.others.extend(other.others)
        return self
