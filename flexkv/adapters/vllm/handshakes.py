"""Collects the handshakes of an engine's ranks, and detects messages that come from another engine's ranks."""

from __future__ import annotations

from collections.abc import Mapping

from flexkv.adapters.vllm.metadata import Handshake, StepReport
from flexkv.errors import ContractError, GeometryError
from flexkv.facts.ranks import NO_UNIT, PoolId, UnitId
from flexkv.observe import Counters, get_logger

logger = get_logger(__name__)

HANDSHAKE_STEPS = 16
"""Number of engine steps after which a rank without a handshake counts as missing. vLLM delivers handshakes at its
start, or with the report of the first step, which arrives with the third step if two batches are in flight."""


class Handshakes:
    """The handshakes of the `expected` ranks of one engine, by rank."""

    def __init__(self, expected: int, counters: Counters) -> None:
        self.of_rank: dict[int, Handshake] = {}
        self._expected = expected
        self._counters = counters
        self._refused = False

    @property
    def complete(self) -> bool:
        return len(self.of_rank) == self._expected

    @property
    def pools(self) -> list[PoolId]:
        """The id of each rank's pool, in the order of the ranks."""
        return [handshake.pool_id for _, handshake in sorted(self.of_rank.items())]

    def take(self, ranks: Mapping[int, Handshake]) -> None:
        """Adds the handshakes of some ranks.

        Raises:
            ContractError: a rank has already sent a handshake for another pool, so one of the two pools belongs to
                another engine.
        """
        if foreign := self._foreign_pool(ranks):
            raise ContractError(foreign)
        self.of_rank.update(ranks)

    def check_blocks(self, num_blocks: int) -> None:
        """Compares the scheduler's number of blocks with the ranks'.

        Raises:
            GeometryError: the numbers differ.
        """
        counts = {handshake.num_blocks for handshake in self.of_rank.values()}
        if counts != {num_blocks}:
            raise GeometryError(f"the ranks have {sorted(counts)} blocks, the scheduler {num_blocks}")

    def refuses(self, report: StepReport, own: UnitId) -> bool:
        """Whether a report that is not for the unit `own` must be dropped, because it is for another unit or comes from
        another engine's rank. Counts such reports, and logs the first one."""
        reason = self._foreign_pool({report.rank: report.handshake} if report.handshake else {})
        if not reason and report.unit != NO_UNIT:
            # The other unit's ops may have the same numbers as this unit's ops, so the other unit's results must not be
            # mistaken for results of this unit.
            of = f"unit {own.hex()}" if own != NO_UNIT else "one that is not made yet"
            reason = f"a report of unit {report.unit.hex()} reached the scheduler's side of {of}"
        if reason:
            self._counters.add("flexkv_refused_messages_total", kind="reports")
            if not self._refused:
                self._refused = True
                logger.error("%s: dropped, as all further ones", reason)
        return bool(reason)

    def warn_if_missing(self, step: int) -> None:
        """Logs in the engine's `HANDSHAKE_STEPS`-th step which ranks have sent no handshake. Does nothing in other
        steps."""
        if step == HANDSHAKE_STEPS:
            missing = [rank for rank in range(self._expected) if rank not in self.of_rank]
            logger.warning(
                "no handshake from rank(s) %s of %d after %d steps of the engine: until every rank has shaken hands "
                "nothing is stored and nothing is loaded",
                ", ".join(map(str, missing)),
                self._expected,
                step,
            )

    def _foreign_pool(self, ranks: Mapping[int, Handshake]) -> str:
        """Returns why one of these handshakes does not come from this engine; empty if all may come from it."""
        for rank, handshake in ranks.items():
            known = self.of_rank.get(rank, handshake)
            if known.pool_id != handshake.pool_id:
                return (
                    f"rank {rank} has shaken hands for KV pool {known.pool_id.hex()} and does so again for "
                    f"{handshake.pool_id.hex()}: a rank has one pool, so one of the two is another engine's"
                )
        return ""
