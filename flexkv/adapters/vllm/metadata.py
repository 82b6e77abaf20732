"""The messages between the scheduler's side and the workers' sides, which vLLM carries in each step, pickled."""

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
    """One worker's facts about its KV pool, which vLLM carries to the scheduler's side before the first lookup.

    Attributes:
        blend_refusal: why this rank cannot blend; empty if it can, None if blending is off.
    """

    blend_refusal: str | None = None


@dataclass(slots=True)
class ConnectorMetadata(KVConnectorMetadata):
    """One step's orders to every worker of the unit.

    Attributes:
        unit: the unit that gives the orders; NO_UNIT before all ranks have shaken hands.
        step: number of this step if it has a forward pass, otherwise that of the last step that had one.
        grant: the record with which a worker maps the host pool; sent until every rank has reported that it has mapped
            the pool, then None.
        early: store ops to submit before this step's forward pass, for blocks that were complete before this step.
        reused: for each store op that still reads blocks which the engine has reused, the positions of these blocks in
            the op. The forward pass waits a limited time for the copies of these blocks. The pages that are not copied
            by then count as failed.
        loads: loads to submit before the forward pass.
        stores: store ops to submit after the forward pass, for blocks that the forward pass completes.
        settled: store ops for blocks that earlier forward passes completed and that this one only reads; submitted
            together with `stores`.
        spares_loads: whether this step's forward pass touches no block that an async load in `loads` fills.
        cancel: ops of loads for which no request waits any more. Copies that have not begun are dropped.
        void: ops whose bytes must not be used, however the ops end.
        idle: whether this step has no forward pass. A worker may then wait a moment for copies, so that the engine does
            not run empty steps in a tight loop.
        disk_busy: whether disks are busy or segments are being loaded, so that an idle step may wait for these, too.
        blend: the orders for blending; None if there are none.
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
        step: number of the step that was executed last; 0 if it has not changed since the last report. When a step is
            reported, the outcome of its forward pass is known, including that of another connector's loads.
        handshake: the rank's facts; sent until the rank has a host pool, then None. vLLM itself collects handshakes at
            the start, but a MultiConnector passes on the handshakes of only one of its connectors.
        blend_arrived: blended requests whose segments have arrived; see `BlendPages.take_arrived`.
        blend_stored: segments whose store operation has ended; see `BlendPages.take_stored`.
        blend_disk: whether the rank is reading segments from disk or writing them; None if that has not changed since
            the last report.
    """

    step: int = 0
    handshake: Handshake | None = None
    blend_arrived: dict[str, Arrival] = field(default_factory=dict)
    blend_stored: dict[int, BlendResult] = field(default_factory=dict)
    blend_disk: bool | None = None


@dataclass(slots=True)
class WorkerMetadata(KVConnectorWorkerMetadata):
    """The reports of all ranks after a step. Ranks without anything to report are left out."""

    reports: list[StepReport]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerMetadata:
        """Appends the reports of other ranks to these, and returns the result."""
        assert isinstance(other, WorkerMetadata), f"expected a WorkerMetadata, got {type(other).__name__}"
        self.reports += other.reports
        return self
