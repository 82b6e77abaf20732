"""Messages that each engine step carries between the scheduler's side and the workers' side. Plain and picklable."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from flexkv.adapters.common.load_job import LoadJob
from flexkv.adapters.common.rank_reports import RankReport
from flexkv.adapters.vllm.blend.orders import Arrival, BlendOrders
from flexkv.facts.ranks import NO_UNIT, PoolGrant, RankFacts, UnitId
from flexkv.observe import BlendResult
from flexkv.transfer.graph import OpId, TransferGraph


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
class StepReport(RankReport):
    """One rank's report to the scheduler after a step.

    Attributes:
        step: step number of the orders that were carried out; 0 if it has not changed since the last report. Once a
            step is reported, the outcome of its forward pass is known, including that of another connector's loads.
        handshake: sent while the rank has no host pool. vLLM collects handshakes itself at the start, but a
            MultiConnector passes on those of only one of its connectors.
        blend_arrived: see `BlendPages.take_arrived`.
        blend_stored: see `BlendPages.take_stored`.
        blend_disk: whether the rank reads segments from disk or writes them; sent when that has changed.
    """

    step: int = 0
    handshake: Handshake | None = None
    blend_arrived: dict[str, Arrival] = field(default_factory=dict)
    blend_stored: dict[int, BlendResult] = field(default_factory=dict)
    blend_disk: bool | None = None


@dataclass(slots=True)
class WorkerMetadata(KVConnectorWorkerMetadata):
    """The reports of all ranks after a step; ranks with nothing to report are left out."""

    reports: list[StepReport]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerMetadata:
        """Joins other ranks' reports to these."""
        assert isinstance(other, WorkerMetadata), f"expected a WorkerMetadata, got {type(other).__name__}"
        self.reports += other.reports
        return self
