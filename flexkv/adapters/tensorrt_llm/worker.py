"""The worker's side: runs one rank's copies. A store operation, or a load between steps, starts only after the engine
has passed the request's id to `finished`. A later call of `finished` returns the id to the engine, once."""

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
    """A load or store operation of a request, from the moment when the engine passes the request's id to `finished`
    until `finished` returns the id.

    Attributes:
        started: whether the order has arrived and its ops were submitted, or it is certain that no order will arrive.
        open: ids of the ops that have not finished.
        pages: number of pages of all its ops.
        failed: why blocks of the load hold no valid KV; empty while all blocks may be valid.
        cancelled: whether nothing waits for the load any more, so that its id may be returned even if the load failed.
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
    """The worker's side of one rank. The engine's executor thread calls all methods."""

    def __init__(self, config: FlexKVConfig, rank: int) -> None:
        super().__init__(config, rank, _current_stream)
        self.address = ""
        self._block_tokens = 0
        self._step = 0
        self._wire: Wire | None = None
        self._load_orders: dict[int, LoadJob] = {}
        self._save_orders: dict[int, SaveOrder] = {}
        """`_load_orders` and `_save_orders` hold the orders that have arrived, by request id, until the engine passes
        the id to `finished`."""
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
            lambda counters: None,  # only the manager, on the scheduler's side, has gauges
            logger,
            "trtllm_",
            {"unit": f"rank{rank}"},
            config.observe.metrics_log_s,
        )

    def register(self, pool: RankPool) -> None:
        self._block_tokens = pool.block_tokens
        self.take_group(pool)

    # --- called by the engine in each iteration, in this order ---

    def start(self, metadata: StepMetadata | None) -> None:
        """Begins an iteration. When this returns, the loads that its forward pass reads are in place, except those for
        which the forward pass waits layer by layer.

        Raises:
            TransferError: a load did not arrive, or a different scheduler planned it. The engine would compute with the
                previous content of the blocks.
        """
        if metadata is None or self._is_foreign(metadata) or metadata.step <= self._step:
            return
        self._end_broken_step()
        self._step, self._in_forward = metadata.step, metadata.computes
        self._join(metadata.address)
        self._receive()
        # `take_failed_blocks` discards the failed blocks of loads between steps. No forward pass reads these blocks,
        # because `finished` does not return the ids of such loads.
        self._ops.reports.take_failed_blocks()
        for job in metadata.loads:
            self._ops.submit_load(job)
        if self.begin_step_loads(metadata.loads, by_layer=not self._hooks_missed):
            self._report(self._end_ops())
            self._refuse_lost("the forward must not read them")

    def _is_foreign(self, metadata: StepMetadata) -> bool:
        """Whether the step is from a different scheduler than the one that this rank has joined.

        Raises:
            TransferError: the step is from a different scheduler and has loads. Its forward pass would read blocks that
                this rank does not load.
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
        """Called when the forward pass is about to read a layer. Waits until the step's loads have filled the layer or
        have failed.

        Args:
            stream: the engine's stream; used only if the pool is on a device.
        """
        self.layer_loads.wait(layer, None if self.device is None else stream_address(stream))

    def forward_ended(self) -> None:
        """Called when the iteration's forward pass has run (or is enqueued), before tokens are sampled from its output.

        Raises:
            TransferError: the forward pass did not wait for every layer of its loads, or a load did not arrive. The
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
        """Called when an iteration begins or ends. If the last forward pass has not finished by then, an error has
        interrupted it. The engine then ends the requests of that step and reuses their blocks, whose content is
        unknown. So no blocks of requests that had begun by then are stored. This includes requests that were not in the
        step, but they are few, and each only costs a later miss.
        """
        if not self._in_forward:
            return
        logger.error("rank %d: a step broke off; no request that had begun by then is stored", self.rank)
        self._in_forward, self._broken_step = False, self._step
        self.layer_loads.finish()

    def finished(self, saving: Iterable[int], loading: Iterable[int]) -> tuple[list[int], list[int]]:
        """Starts the load and store operations of requests that the engine passes to this method for the first time.

        The id of a load that lost blocks is not returned, because the engine would count the blocks as loaded. The
        request waits until the engine cancels it.

        Args:
            saving: ids of requests whose blocks may be stored.
            loading: ids of requests whose loads between steps may start.

        Returns:
            The ids of requests whose store operations have finished, and of those whose loads have finished, each once.
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
        # The engine frees a request's blocks when its id is returned as saved, so its load must have finished before.
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
                # The request has finished, and without a connection to the scheduler no order can arrive any more, so
                # the id of its load may be returned. The id of a request that has not finished must not be returned,
                # because that request waits for its KV.
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
                    # The engine passes a request's id for loading no later than for storing. So it will not pass the id
                    # of a cancelled load any more.
                    self._cancelled.discard(request_id)
                if wanted.graph is not None and wanted.first_step <= self._broken_step:
                    self._dropped(wanted.graph.ops, "a step broke off since it began", PageLoss.BROKEN_STEP)
                elif wanted.graph is not None:
                    self._start(request_id, save, wanted.graph)
                    self._ops.submit_store(wanted.graph)
            elif alone:
                # Without a connection to the scheduler, no order can arrive any more. The id must be returned, so that
                # the engine can free the blocks.
                save.started = True

    def _start(self, request_id: int, awaited: Awaited, graph: TransferGraph) -> None:
        awaited.started = True
        awaited.open = {op.op_id for op in graph.ops}
        awaited.pages = sum(op.pages for op in graph.ops)
        self._awaited_of.update(dict.fromkeys(awaited.open, (request_id, awaited)))

    def _cancel(self, request_id: int) -> None:
        if (job := self._load_orders.pop(request_id, None)) is not None:
            # The load was not started on this rank, and never will be.
            self._dropped(job.graph.ops, "the request ended first")
        load = self._loads.get(request_id)
        if load is None:
            # The cancellation may arrive before the engine passes the request's id to `finished`.
            self._cancelled.add(request_id)
            return
        # An order that has not arrived by now never will, because after a cancellation the scheduler orders no load
        # with the same id.
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
                continue  # the op belongs to a load inside a step
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
        # The ops that finished when the lanes were closed are processed first, so that the final count of failures that
        # were not logged includes them.
        self._report(self._end_ops())
        self._failed.flush(at_end=True)
        if not self._closed:
            self._closed = True
            self._metrics.close()
        if self._wire is not None:
            self._wire.close()


def _current_stream(device: int) -> int:
    """Returns `torch_stream` of the device. Imports torch only now, because the connector's modules are also imported
    where torch is not needed.
    """
    from flexkv.adapters.torch_tensors.device import torch_stream

    return torch_stream(device)
