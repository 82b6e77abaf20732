"""The worker's side: runs one rank's copies. Each starts once the engine has named its request, and each id is returned
to the engine once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from flexkv.adapters.common.load_job import LoadJob
from flexkv.adapters.common.metric_report import MetricReport
from flexkv.adapters.common.rank_pool import RankPool
from flexkv.adapters.common.rank_reports import RankReport
from flexkv.adapters.common.rank_worker import RankWorker
from flexkv.adapters.tensorrt_llm.link import Wire, connect
from flexkv.adapters.tensorrt_llm.messages import CancelOrder, RankJoin, SaveOrder, StepMetadata
from flexkv.config import FlexKVConfig
from flexkv.errors import ClosedError, TransferError
from flexkv.facts.ranks import PoolGrant
from flexkv.observe import FailedOps, PageLoss, get_logger
from flexkv.transfer.graph import OpId, OpResult, TransferGraph, TransferOp
from flexkv.transfer.stream import stream_address

logger = get_logger(__name__)


@dataclass(slots=True)
class Awaited:
    """A request that the engine has named and that was not returned yet.

    Attributes:
        started: the order has arrived and its ops were submitted, or no order will ever arrive.
        open: ops that have not ended.
        pages: number of pages of all its ops.
        failed: why blocks of the load hold no valid KV; empty while all blocks may be valid.
        cancelled: nothing waits for the load any more, so it may be returned even if it failed.
    """

    started: bool = False
    open: set[OpId] = field(default_factory=set)
    pages: int = 0
    failed: str = ""
    cancelled: bool = False

    @property
    def ended(self) -> bool:
        return self.started and not self.open


class WorkerSide(RankWorker):
    """One rank. The engine's executor thread calls all methods."""

    def __init__(self, config: FlexKVConfig, rank: int) -> None:
        super().__init__(config, rank, _current_stream)
        self.address = ""
        self._block_tokens = 0
        self._step = 0
        self._wire: Wire | None = None
        self._load_orders: dict[int, LoadJob] = {}
        self._save_orders: dict[int, SaveOrder] = {}
        """Orders by request id, until the engine names the id."""
        self._loads: dict[int, Awaited] = {}
        self._saves: dict[int, Awaited] = {}
        self._cancelled: set[int] = set()
        self._awaited_of: dict[OpId, tuple[int, Awaited]] = {}
        self._hooks_missed = False
        self._closed = False
        self._foreign_logged = False
        self._in_forward = False
        self._broken_step = 0
        self._failed = FailedOps(logger)
        self._metrics = MetricReport(
            self.counters,
            lambda counters: None,  # the gauges are the manager's, on the scheduler's side
            logger,
            "trtllm_",
            {"unit": f"rank{rank}"},
            config.observe.metrics_log_s,
        )

    def register(self, pool: RankPool) -> None:
        """Takes the engine's pool."""
        self._block_tokens = pool.block_tokens
        self.take_group(pool)

    # --- one iteration, in the order in which the engine calls ---

    def start(self, metadata: StepMetadata | None) -> None:
        """Begins an iteration. When this returns, the loads that its forward pass reads are in place, except those for
        which it waits layer by layer.

        Raises:
            TransferError: a load did not arrive, or another scheduler planned it. The engine would compute with the
                previous content of the blocks.
        """
        if metadata is None or self._is_foreign(metadata) or metadata.step <= self._step:
            return
        self._end_broken_step()
        self._step, self._in_forward = metadata.step, metadata.computes
        self._join(metadata.address)
        self._receive()
        # Drops the failed blocks of loads between steps. `finished` reports these loads, and no forward pass reads
        # them.
        self._ops.reports.take_failed_blocks()
        for job in metadata.loads:
            self._ops.submit_load(job)
        if self.begin_step_loads(metadata.loads, by_layer=not self._hooks_missed):
            self._report(self._end_ops())
            self._refuse_lost("the forward must not read them")

    def _is_foreign(self, metadata: StepMetadata) -> bool:
        """Whether the step is from another scheduler than the one that this rank has joined.

        Raises:
            TransferError: the step has loads. Its forward pass would read blocks that this rank does not load.
        """
        if not self.address or metadata.address == self.address:
            return False
        said = f"rank {self.rank} joined the scheduler at {self.address}; a step of {metadata.address} reached it"
        self.counters.add("flexkv_refused_messages_total", kind="orders")
        if metadata.loads:
            blocks = [block for job in metadata.loads for op in job.graph.ops for block in op.blocks.tolist()]
            raise TransferError(
                f"{said} and is refused, with loads of blocks {sorted(blocks)[:8]} ({len(blocks)} in all)"
            )
        if not self._foreign_logged:
            self._foreign_logged = True
            logger.error("%s: refused, as all further ones", said)
        return True

    def wait_for_layer(self, layer: int, stream: Any) -> None:
        """Called when the forward pass is about to read this layer: returns once the step's loads have filled it, or
        failed.

        Args:
            stream: the engine's stream, if the pool is on a device.
        """
        self.layer_loads.wait(layer, None if self.device is None else stream_address(stream))

    def forward_ended(self) -> None:
        """Called when the iteration's forward pass was run (or enqueued), before tokens are sampled from it.

        Raises:
            TransferError: the forward pass did not wait for every layer of its loads, or a load did not arrive: the
                output must not be used.
        """
        if self.layer_loads.busy:
            self._hooks_missed |= not self.layer_loads.finish()
            self._report(self._end_ops())
            self._refuse_lost(
                "the forward did not call the hooks of its layers, and from now on loads end before it"
                if self._hooks_missed
                else "the forward has read them"
            )
        self._in_forward = False

    def _refuse_lost(self, what: str) -> None:
        if lost := self._ops.reports.take_failed_blocks():
            raise TransferError(
                f"rank {self.rank}: a load inside the step did not fill blocks {sorted(lost)[:8]} "
                f"({len(lost)} in all): {what}"
            )

    def _end_broken_step(self) -> None:
        """If the last forward pass has not ended, it never will. The engine ends its requests and reuses their blocks,
        whose content is unknown. So no request that had begun by then is stored, also none that was not in the step:
        there are few of those, and each costs a later miss.
        """
        if not self._in_forward:
            return
        logger.error("rank %d: a step broke off; no request that had begun by then is stored", self.rank)
        self._in_forward, self._broken_step = False, self._step
        self.layer_loads.finish()

    def finished(self, saving: Iterable[int], loading: Iterable[int]) -> tuple[list[int], list[int]]:
        """Starts requests that the engine names here for the first time. Returns the ids of ended stores and loads,
        each once.

        The id of a load that lost blocks is not returned, because the engine would count it as loaded. Its request
        waits until it is cancelled.
        """
        self._saves.update((int(request_id), Awaited()) for request_id in saving)
        self._loads.update((int(request_id), Awaited()) for request_id in loading)
        self._end_broken_step()
        self._receive()
        self._launch()
        self._ops.poll()
        results = self._end_ops()
        self._failed.flush()
        self._metrics.report_if_due()
        self._ops.reports.take_failed_blocks()
        loaded = [i for i, load in self._loads.items() if load.ended and (load.cancelled or not load.failed)]
        for request_id in loaded:
            del self._loads[request_id]
        # The engine frees a request's blocks once it is returned as saved, so its load must end before.
        saved = [i for i, save in self._saves.items() if save.ended and i not in self._loads]
        for request_id in saved:
            del self._saves[request_id]
        self._report(results)
        return saved, loaded

    # --- orders ---

    def _join(self, address: str) -> None:
        if self._wire is not None or self.address == address or (facts := self.facts()) is None:
            return
        self.address = address
        try:
            self._wire = connect(address)
        except ClosedError as error:
            logger.error("rank %d: nothing is cached: %s", self.rank, error)
            return
        self._wire.send(RankJoin(self.rank, facts, self._block_tokens))

    def _receive(self) -> None:
        if self._wire is None:
            return
        for order in self._wire.receive():
            if isinstance(order, PoolGrant):
                self._take_own_grant(order)
            elif isinstance(order, LoadJob):
                self._load_orders[int(order.request_id)] = order
            elif isinstance(order, SaveOrder):
                self._save_orders[order.request_id] = order
            elif isinstance(order, CancelOrder):
                self._cancel(order.request_id)

    def _take_own_grant(self, grant: PoolGrant) -> None:
        self.take_grant(grant)
        if self.unit != grant.unit and self._wire is not None:
            said = "the host pool was granted for another KV pool than the one that this rank has"
            logger.error("rank %d cannot use the host pool: %s", self.rank, said)
            self._wire.send(RankReport(self.rank, error=said, unit=grant.unit))

    def _launch(self) -> None:
        alone = self._wire is None or bool(self._wire.closed)
        for request_id, load in self._loads.items():
            if alone and request_id in self._saves:
                # The request has ended, but no order can arrive any more. A request that has not ended waits for its
                # KV, and must not be returned without it.
                load.started = load.cancelled = True
            if load.started:
                continue
            if request_id in self._cancelled:
                self._cancelled.discard(request_id)
                load.started = load.cancelled = True
            elif (job := self._load_orders.pop(request_id, None)) is not None:
                self._start(request_id, load, job.graph)
                self._ops.submit_load(job)
        for request_id, save in self._saves.items():
            if save.started:
                continue
            if (wanted := self._save_orders.pop(request_id, None)) is not None:
                save.started = True
                if request_id not in self._loads:
                    # The engine names a load no later than the save of its request, so it will never name this one.
                    self._cancelled.discard(request_id)
                if wanted.graph is not None and wanted.first_step <= self._broken_step:
                    self._dropped(wanted.graph.ops, "a step broke off since it began", PageLoss.BROKEN_STEP)
                elif wanted.graph is not None:
                    self._start(request_id, save, wanted.graph)
                    self._ops.submit_store(wanted.graph)
            elif alone:
                # No order can arrive any more, and the engine must get its blocks back.
                save.started = True

    def _start(self, request_id: int, awaited: Awaited, graph: TransferGraph) -> None:
        awaited.started = True
        awaited.open = {op.op_id for op in graph.ops}
        awaited.pages = sum(op.pages for op in graph.ops)
        self._awaited_of.update(dict.fromkeys(awaited.open, (request_id, awaited)))

    def _cancel(self, request_id: int) -> None:
        if (job := self._load_orders.pop(request_id, None)) is not None:
            # The load was not started here, and never will be.
            self._dropped(job.graph.ops, "the request ended first")
        load = self._loads.get(request_id)
        if load is None:
            # The engine may name the request only after its cancellation has arrived.
            self._cancelled.add(request_id)
            return
        # An order that has not arrived by now never will: the scheduler orders no load of an id after its cancellation.
        load.started = load.cancelled = True
        for op_id in load.open:
            self._ops.give_up(op_id, "the request ended")

    def _dropped(self, ops: Iterable[TransferOp], reason: str, loss: PageLoss | None = None) -> None:
        self._report(tuple(OpResult.cancelled(op.op_id, op.pages, reason, loss) for op in ops))

    # --- reports ---

    def _end_ops(self) -> tuple[OpResult, ...]:
        results = tuple(self._ops.reports.take_results())
        self._ops.reports.take_finished()
        for result in results:
            request_id, awaited = self._awaited_of.pop(result.op_id, (-1, None))
            if awaited is None:
                continue  # an op of a load inside a step
            awaited.open.discard(result.op_id)
            if len(result.failed) and not awaited.cancelled and self._loads.get(request_id) is awaited:
                awaited.failed = result.reason or "pages failed"
                self._failed.warn(
                    "load between steps",
                    f"op {result.op_id} of request {request_id}, which waits until it is cancelled",
                    len(result.failed),
                    awaited.pages,
                    f"rank {self.rank}: {awaited.failed}",
                )
        return results

    def _report(self, results: tuple[OpResult, ...]) -> None:
        if self._wire is None:
            return
        report = RankReport(self.rank, self.unit, list(results))
        self.add_news(report)
        if report != RankReport(self.rank, self.unit):
            self._wire.send(report)

    def close(self) -> None:
        super().close()
        # Ops that ended with the lanes are logged first, so that the count of failures without a line includes them.
        self._report(self._end_ops())
        self._failed.flush(at_end=True)
        if not self._closed:
            self._closed = True
            self._metrics.close()
        if self._wire is not None:
            self._wire.close()


def _current_stream(device: int) -> int:
    """The stream that this thread enqueues the engine's work on, as an integer."""
    import torch

    return int(torch.cuda.current_stream(device).cuda_stream)
