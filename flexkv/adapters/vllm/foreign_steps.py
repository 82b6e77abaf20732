"""Refuses steps that another unit has ordered: every op is refused, and every block of a load is reported as failed."""

from __future__ import annotations

from flexkv.adapters.common.rank_ops import RankOps
from flexkv.adapters.common.rank_reports import RankReports
from flexkv.adapters.vllm.metadata import ConnectorMetadata
from flexkv.config import FlexKVConfig
from flexkv.facts.ranks import UnitId
from flexkv.observe import Counters, get_logger

logger = get_logger(__name__)


class ForeignSteps:
    """Refuses orders that are not for this rank's unit, and reports this to the unit that ordered.

    Such steps arrive if vLLM passes one engine's metadata to another's worker. None of their blocks are copied, and no
    result of this rank's own unit is reported with them.

    Attributes:
        unit: the unit that ordered the step under way; None while that is this rank's own.
        reason: why the unit's steps are refused.
    """

    def __init__(self, config: FlexKVConfig, rank: int, counters: Counters) -> None:
        self._rank = rank
        self._counters = counters
        self._config = config
        # A RankOps without lanes refuses every op.
        self._ops = RankOps(config, rank, counters)
        self._ordered_by: UnitId | None = None
        self._logged = False
        self.unit: UnitId | None = None
        self.reason = ""

    def refuse(self, orders: ConnectorMetadata, own: UnitId) -> RankReports:
        """Begins a step ordered by a unit other than `own`, and ends all its ops.

        Returns:
            The reports for the unit that ordered it.
        """
        unit = self.unit = orders.unit
        self._counters.add("flexkv_refused_messages_total", kind="orders")
        if self._ordered_by != unit:
            self._ordered_by = unit
            # A step of a third unit may have been interrupted before its report; its results must not reach this unit.
            self._ops = RankOps(self._config, self._rank, self._counters)
            self.reason = self._ops.refusal = (
                f"a step of {_name(unit)} reached rank {self._rank} of {_name(own)}"
            )
            if not self._logged:
                self._logged = True
                logger.error("%s: nothing of such steps is loaded or stored", self.reason)
        for job in orders.loads:
            self._ops.submit_load(job)
        for graph in (*orders.early, *orders.settled, *orders.stores):
            self._ops.submit_store(graph)
        return self._ops.reports


def _name(unit: UnitId) -> str:
    return f"unit {unit.hex()}" if unit else "a unit that is not made yet"
