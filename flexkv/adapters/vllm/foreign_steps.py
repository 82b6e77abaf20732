"""Refuses the ops of steps that another engine's unit has ordered, and reports all blocks of their loads as failed."""

from __future__ import annotations

from flexkv.adapters.common.rank_ops import RankOps
from flexkv.adapters.common.rank_reports import RankReports
from flexkv.adapters.vllm.metadata import ConnectorMetadata
from flexkv.config import FlexKVConfig
from flexkv.facts.ranks import UnitId
from flexkv.observe import Counters, get_logger

logger = get_logger(__name__)


class ForeignSteps:
    """Refuses orders of units other than this rank's own, and reports the refusal to the unit that gave the orders.

    Such orders arrive if vLLM passes one engine's metadata to another engine's worker. No block of such a step is
    copied, and its report contains no results for this rank's own unit.

    Attributes:
        unit: the other unit that ordered the current step; None if this rank's own unit did.
        reason: why the other unit's steps are refused.
    """

    def __init__(self, config: FlexKVConfig, rank: int, counters: Counters) -> None:
        self._rank = rank
        self._counters = counters
        self._config = config
        # This RankOps has no lanes, so it refuses every op.
        self._ops = RankOps(config, rank, counters)
        self._ordered_by: UnitId | None = None
        self._logged = False
        self.unit: UnitId | None = None
        self.reason = ""

    def refuse(self, orders: ConnectorMetadata, own: UnitId) -> RankReports:
        """Begins a step that a unit other than `own` has ordered, and refuses all its ops.

        Returns:
            The reports to the unit that ordered the step.
        """
        unit = self.unit = orders.unit
        self._counters.add("flexkv_refused_messages_total", kind="orders")
        if self._ordered_by != unit:
            self._ordered_by = unit
            # The former RankOps may hold results of a third unit's step that are not reported yet. They must not reach
            # this unit, so a new RankOps is made.
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
