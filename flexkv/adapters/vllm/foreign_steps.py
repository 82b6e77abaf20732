"""Steps that another unit has ordered: every op ends as refused, every block of a load is named."""

from __future__ import annotations

from collections.abc import Iterable

from flexkv.adapters.common.base import LoadJob
from flexkv.adapters.common.rank_ops import RankOps
from flexkv.adapters.common.rank_reports import RankReports
from flexkv.config import FlexKVConfig
from flexkv.facts.ranks import UnitId
from flexkv.observe import Counters, get_logger
from flexkv.transfer.graph import TransferGraph

logger = get_logger(__name__)


class ForeignSteps:
    """Refuses what is not for this rank's unit, and reports it to who ordered it.

    Such steps come where vLLM hands an engine's metadata to the worker of another. Nothing of them is copied, and
    nothing of this rank's own unit is reported with them.

    Attributes:
        unit: that ordered the step under way; None while that is this rank's own.
        reason: why it is refused.
    """

    def __init__(self, config: FlexKVConfig, rank: int, counters: Counters) -> None:
        self._rank = rank
        self._counters = counters
        self._config = config
        # Without lanes it refuses every op.
        self._ops = RankOps(config, rank, counters)
        self._ordered_by: UnitId | None = None
        self._logged = False
        self.unit: UnitId | None = None
        self.reason = ""

    def begin(self, unit: UnitId, own: UnitId) -> RankReports:
        """A step that another unit than `own` has ordered.

        Returns:
            What is to be reported to the unit that ordered it.
        """
        self.unit = unit
        self._counters.add("flexkv_refused_messages_total", kind="orders")
        if self._ordered_by != unit:
            self._ordered_by = unit
            # What is left of another unit's step, which broke off before its report, is none of this one's ops.
            self._ops = RankOps(self._config, self._rank, self._counters)
            self.reason = self._ops.refusal = (
                f"a step of {_name(unit)} reached rank {self._rank} of {_name(own)}"
            )
            if not self._logged:
                self._logged = True
                logger.error("%s: nothing of such steps is loaded or stored", self.reason)
        return self._ops.reports

    def refuse(self, loads: Iterable[LoadJob] = (), stores: Iterable[TransferGraph] = ()) -> None:
        """Ends ops of the step."""
        for job in loads:
            self._ops.submit_load(job)
        for graph in stores:
            self._ops.submit_store(graph)


def _name(unit: UnitId) -> str:
    return f"unit {unit.hex()}" if unit else "a unit that is not made yet"
