"""Coordinates the ranks from rank 0's scheduler: lets them join, processes their reports, and sends them orders."""

from __future__ import annotations

from flexkv.adapters.common.metric_report import MetricReport
from flexkv.adapters.common.prompt_keys import TokenKeys, without_salt
from flexkv.adapters.common.rank_reports import RankReport
from flexkv.adapters.tensorrt_llm.arguments import EngineArguments
from flexkv.adapters.tensorrt_llm.identity import engine_namespace, engine_weights
from flexkv.adapters.tensorrt_llm.link import Listener, Wire
from flexkv.adapters.tensorrt_llm.messages import Order, RankJoin
from flexkv.adapters.tensorrt_llm.requests import RequestTracker
from flexkv.cache.base import OpRole
from flexkv.config import FlexKVConfig
from flexkv.errors import FlexKVError, GeometryError
from flexkv.facts.ranks import KvGroup, RankFacts, UnitOwner
from flexkv.observe import Counters, get_logger
from flexkv.unit.base import CacheRole, EngineUnit
from flexkv.unit.build import build_unit
from flexkv.unit.live_unit import LiveUnit
from flexkv.unit.null_unit import NullUnit

logger = get_logger(__name__)


class RankCoordinator:
    """Processes the reports of the ranks, makes the unit from their facts, and sends them orders. Never waits for a
    rank.

    Attributes:
        unit: the engine's unit; a `NullUnit` until every rank has joined, and if the ranks cannot be served.
        ranks: number of ranks.
        block_tokens: tokens per block of every rank's pool; 0 as long as the unit is a `NullUnit`.
        namespace: the namespace for requests without salt and adapter; empty as long as the unit is a `NullUnit`.
        requests: the live requests that were looked up, by id. There are never more of them than the engine has
            requests, because the engine reports the end of each request.
    """

    def __init__(self, config: FlexKVConfig, arguments: EngineArguments, counters: Counters) -> None:
        self._config = config
        self._arguments = arguments
        self._counters = counters
        self._listener = Listener()
        self._facts: dict[int, tuple[RankFacts, int]] = {}
        self._ready: set[int] = set()
        self._rank_of: dict[Wire, int] = {}
        self._refused = False
        self.unit: EngineUnit = NullUnit()
        self.ranks = arguments.ranks
        self.block_tokens = 0
        self.namespace = b""
        self.requests: dict[int, RequestTracker] = {}
        self._report: MetricReport | None = None

    @property
    def address(self) -> str:
        """The address to which the ranks connect."""
        return self._listener.address

    @property
    def usable(self) -> bool:
        """Whether pages can be promised: the unit is usable and every rank has attached the host pool."""
        return self.unit.usable and len(self._ready) == self.ranks

    def order(self, order: Order) -> None:
        self._listener.broadcast(order)

    def poll(self) -> None:
        """Processes the ranks' reports, advances the work of the disks, ends expired leases, and reports metrics. Never
        waits."""
        self.receive()
        if self._listener.broken and self.unit.usable:
            self.unit.disable(-1, f"a rank is gone: {self._listener.broken}")
        self.unit.poll()
        self.unit.expire_if_due(self._counters)
        if self._report is not None:
            self._report.report_if_due()

    def receive(self) -> None:
        """Processes the reports that have arrived from the ranks, and refuses messages that are not from a rank."""
        for wire, report in self._listener.poll():
            if refusal := self._refusal(wire, report):
                self._refuse(wire, refusal)
            else:
                self._take(wire, report)

    def _refusal(self, wire: Wire, report: object) -> str:
        """Why a report must be refused: it is not from a rank of this engine, or not for this unit. Empty if it can be
        processed."""
        if not isinstance(report, (RankJoin, RankReport)):
            return f"a {type(report).__name__} came where ranks report"
        rank, ranks = report.rank, self.ranks
        if wire not in self._rank_of:
            if isinstance(report, RankReport):
                return f"rank {rank} reports before it has joined"
            if not 0 <= rank < ranks:
                return f"rank {rank} joins an engine of {ranks} rank(s)"
            return f"rank {rank} has joined before" if rank in self._facts else ""
        if self._rank_of[wire] != rank:
            return f"rank {rank} reports on the connection of rank {self._rank_of[wire]}"
        if isinstance(report, RankJoin):
            return f"rank {rank} has joined before"
        if report.unit != self.unit.unit_id:
            return f"rank {rank} reports to unit {report.unit.hex()}, this is {self.unit.unit_id.hex()}"
        return ""

    def _refuse(self, wire: Wire, reason: str) -> None:
        """Counts a refused report and logs the first one. Closes the connection unless a rank has joined on it."""
        self._counters.add("flexkv_refused_messages_total", kind="reports")
        if not self._refused:
            self._refused = True
            logger.error("a report is refused, as all further ones that are not of this engine: %s", reason)
        if wire not in self._rank_of:
            wire.close(reason)

    def _take(self, wire: Wire, report: RankJoin | RankReport) -> None:
        if isinstance(report, RankJoin):
            self._rank_of[wire] = report.rank
            self._listener.admit(wire)
            self._facts[report.rank] = (report.facts, report.block_tokens)
            if len(self._facts) == self.ranks and not self.unit.reason:
                self._join()
            return
        unit = self.unit
        if not self.block_tokens:
            return
        report.pass_news(unit)
        if report.ready is not None:
            self._ready.add(report.rank)
        for result in report.results:
            done = unit.manager.complete(report.rank, result)
            if done is not None and done.loss is not None:
                done.loss.count(self._counters, len(done.failed_blocks))
            if done is None or done.role is not OpRole.LOAD or len(done.failed_blocks):
                # The engine's interface cannot report that a load failed, so a failed load is not removed from its
                # request: the request keeps waiting until it is cancelled.
                continue
            tracker = self.requests.get(int(done.request_id))
            if tracker is not None:
                tracker.load -= {done.op_id}

    def _join(self) -> None:
        try:
            tokens = {tokens for _, tokens in self._facts.values()}
            if len(tokens) != 1:
                raise GeometryError(f"the ranks have blocks of {sorted(tokens)} tokens")
            block_tokens = tokens.pop()
            facts = {rank: said for rank, (said, _) in self._facts.items()}
            namespace = engine_namespace(
                self._arguments, self._config, block_tokens, facts[0].groups[0].dtype
            )
            unit = build_unit(
                self._config,
                [KvGroup(block_tokens)],
                facts,
                UnitOwner(
                    self._arguments.model,
                    namespace,
                    "rank0",
                    engine_weights(self._arguments, self._config),
                ),
                CacheRole(shared=True),
                prompt_limit=self._arguments.prompt_limit,
                prompt_keys=lambda tokens, salt: [
                    TokenKeys(block_tokens, namespace, without_salt(salt)).of(tokens)
                ],
            )
        except FlexKVError as error:
            # The error is not raised, because the engine is already serving and can run without a cache.
            self.unit = NullUnit(f"{type(error).__name__}: {error}")
            logger.error("nothing is cached: %s", self.unit.reason)
            return
        logger.warning(
            "TensorRT-LLM does not say when weights change: never update them in a running engine with this connector, "
            "or KV of the old ones is served; restart it with the new ones"
        )
        self.unit, self.block_tokens, self.namespace = unit, block_tokens, namespace
        self._report = MetricReport(
            self._counters,
            unit.count,
            logger,
            "trtllm_",
            {"unit": "scheduler"},
            self._config.observe.metrics_log_s,
        )
        self.order(unit.make_grant(on_device=True))

    def close(self) -> None:
        """Logs the cache's statistics, and closes the disks and the host pool. Idempotent."""
        if self._report is not None and isinstance(self.unit, LiveUnit):
            # Reports are processed first, so that pages that all ranks have stored become visible and are written to
            # disk too.
            self.receive()
            self._report.close()
            self._report = None
            logger.info("rank 0: %s", self.unit.manager.stats())
            self.requests.clear()
        self.unit.close()
        self._listener.close()
