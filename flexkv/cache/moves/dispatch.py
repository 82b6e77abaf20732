"""Handles the tiers' own ops: hands fetches and writes to the code that runs them, records their results, and accepts
pages to write."""

from __future__ import annotations

import numpy as np

from flexkv.cache.base import TierId
from flexkv.cache.ledger.ops import FetchOp, Op, ProbeOp, RankOp, WriteOp, good_pages
from flexkv.cache.moves.broken_plan import BrokenPlans
from flexkv.cache.moves.fetches import Promotions
from flexkv.cache.moves.op_log import OpLog
from flexkv.cache.moves.store_once import StoreOnce
from flexkv.cache.moves.writes import WriteQueue
from flexkv.cache.tiers.contract import WriteMode
from flexkv.cache.tiers.tables import CacheTables
from flexkv.errors import ContractError
from flexkv.facts.keys import Keys
from flexkv.observe import get_logger
from flexkv.transfer.graph import OpId, OpResult, OpStatus, TransferGraph

logger = get_logger(__name__)


class TierWork:
    """The part of a manager that is called by the code that runs the tiers' ops.

    Attributes:
        once: manages the pages that the unit leaves to its peers; None unless `peers.store` is `once`.
    """

    def __init__(self, tables: CacheTables, promotions: Promotions, log: OpLog, broken: BrokenPlans) -> None:
        self._tables = tables
        self._promotions = promotions
        self._log = log
        self._broken = broken
        self._writes = {
            TierId(number): WriteQueue(TierId(number), tables)
            for number, tier in enumerate(tables.tiers)
            if tier.sink is not None
        }
        self.once: StoreOnce | None = None
        for number, tier in enumerate(tables.tiers):
            if tier.keeper is not None:
                self.once = StoreOnce(tables, promotions, TierId(number), tier.keeper, self.offer)

    @property
    def takes_pages(self) -> bool:
        """Whether pages of host memory are written to at least one tier."""
        return bool(self._writes)

    def poll(self) -> list[tuple[TierId, TransferGraph]]:
        """Plans the writes that may be planned now. Removes from the outbox and returns all graphs for the tiers'
        planes, in the order in which the caller must submit them.
        """
        with self._broken:
            if self.once is not None:
                self.once.poll()
            for queue in self._writes.values():
                queue.poll()
        return self.take_planned()

    def take_planned(self) -> list[tuple[TierId, TransferGraph]]:
        """Removes from the outbox and returns all graphs planned so far. Plans no writes."""
        return self._tables.outbox.take() if len(self._tables.outbox) else []

    def reported(self, tier: TierId, result: OpResult) -> None:
        """Records the result that a tier's plane reports for an op.

        If the result does not fit the op, the tier is taken out of use. If the op is the tier's own, it ends with all
        pages failed, because they would otherwise stay pinned forever.
        """
        op = self._tables.ops.find(result.op_id)
        try:
            if op is not None and op.tier != tier:
                raise ContractError(f"op {op.op_id} is of tier {op.tier}")
            self.complete(result)
        except ContractError as error:
            reason = f"its lane reported what does not fit: {error}"
            self.take_down(tier, reason)
            if (
                op is not None
                and op.tier == tier
                and not isinstance(op, RankOp)
                and op.op_id in self._tables.ops
            ):
                self.complete(OpResult.cancelled(op.op_id, op.pages, reason))

    def complete(self, result: OpResult) -> None:
        """Ends an op that `poll` returned. Each op has one result.

        Raises:
            ContractError: no such op is in flight, or the result does not fit it.
        """
        op = self._tables.ops.get(result.op_id)
        if isinstance(op, RankOp):
            raise ContractError(f"op {op.op_id} is the ranks', not a tier's own")
        with self._broken.ending(op):
            self._complete(op, result)

    def _complete(self, op: Op, result: OpResult) -> None:
        failed = op.pages - int(np.count_nonzero(good_pages(result, op.pages)))
        self._tables.ops.remove(op)
        if result.status is OpStatus.LANE_DOWN:
            self.take_down(op.tier, result.reason or "its lane is down")
        waiters = op.waiters if isinstance(op, FetchOp) else ()
        self._log.tier_op_ended(op, failed, result, waiters)
        self._end(op, result)

    def _end(self, op: Op, result: OpResult) -> None:
        if isinstance(op, FetchOp):
            published = self._promotions.end_fetch(op, result, current=op.epoch == self._tables.epoch)
            if self.once is not None:
                self.once.end_fetch(op, published)
            brought = int(np.count_nonzero(good_pages(result, op.pages)))
            for request_id in op.waiters:
                self._tables.requests.fetch_ended(request_id, op.op_id, brought)
        elif isinstance(op, WriteOp):
            self._writes[op.tier].end_write(op, result)
        else:
            self._tables.stores_of(op.tier).follow_up_ended(op, result)

    def answered(self, op_id: OpId) -> None:
        """Ends a question that a tier has answered or will never answer. Does nothing if no such question is in flight,
        which happens if its plan was interrupted."""
        op = self._tables.ops.find(op_id)
        if not isinstance(op, ProbeOp):
            return
        with self._broken.ending(op):
            self._tables.ops.remove(op)
            for request_id in op.waiters:
                self._tables.requests.probe_ended(request_id, op_id)
            for request_id in op.waiters:
                self._tables.reactions.answered(request_id, op.keys, op.start_tokens, op.settings)

    def take_down(self, tier: TierId, reason: str) -> None:
        """Takes the tier out of use: its pages are misses, and no pages are written to it."""
        self._tables.tiers[tier].go_down(reason)
        if tier in self._writes:
            self._writes[tier].drop_waiting()

    def opened(self) -> None:
        """Called when a tier may be used after it was held (`Tier.held`). Offers the tier the pages that did not fit in
        its queue until now."""
        with self._broken:
            for queue in self._writes.values():
                queue.opened()

    @property
    def moving(self) -> bool:
        """Whether an op of one of the roles fetch, write, question and seal (see `OpRole`) is in flight."""
        return len(self._tables.ops) > self._tables.ops.of_ranks

    @property
    def busy(self) -> bool:
        """Whether a tier has work: a fetch, write, question or seal is in flight or in the outbox, pages wait for their
        write to a tier in use, or pages of an ended peer have to be copied.
        """
        return (
            self.moving
            or len(self._tables.outbox) > 0
            or any(queue.busy for queue in self._writes.values())
            or (self.once is not None and self.once.busy)
        )

    def begin_close(self) -> None:
        """Stops copying pages of ended peers."""
        if self.once is not None:
            self.once.begin_close()

    def offer_all(self) -> None:
        """Offers to each tier with `TierFacts.write_at_close`, whatever its write mode, the unpinned pages of host
        memory that it lacks."""
        with self._broken:
            for queue in self._writes.values():
                queue.offer_all()

    def flush(self) -> None:
        """Plans the waiting writes, whatever the tiers' write modes, up to the limits of writes in flight."""
        with self._broken:
            for queue in self._writes.values():
                queue.flush()

    def give_up_held(self) -> int:
        """Drops the writes that wait for tiers that may not be used yet (`Tier.held`), logs why, and returns the number
        of their pages."""
        pages = 0
        for number, queue in self._writes.items():
            if queue.held_pages:
                lost = queue.give_up_waiting()
                tier = self._tables.tiers[number]
                logger.warning(
                    "%d pages of host memory are not kept in the %s tier: the end came while %s",
                    lost,
                    tier.facts.name,
                    tier.held,
                )
                pages += lost
        return pages

    def give_up(self) -> int:
        """Drops the waiting writes, and returns the number of their pages."""
        return sum(queue.give_up_waiting() for queue in self._writes.values())

    def unwritten(self) -> int:
        """Returns the number of pages in host memory that a tier to which pages are written lacks; with several such
        tiers, the largest of these numbers. Pinned pages count as lacking."""
        return max((queue.unwritten() for queue in self._writes.values()), default=0)

    def offer(self, group: int, keys: Keys) -> None:
        for queue in self._writes.values():
            queue.offer(group, keys)

    def forgotten(self, tier: TierId, group: int, keys: Keys) -> None:
        """Offers pages to a tier that turned out not to have them although they counted as written. Only pages that are
        in host memory are offered.
        """
        there = self._tables.hub.there(group, keys)
        if tier in self._writes and there.any():
            self._writes[tier].offer(group, keys[there])

    def reused(self, tier: TierId, group: int, keys: Keys) -> None:
        """Offers to a tier pages that were used again from host memory. Called for tiers that write reused pages."""
        self._writes[tier].offer_reused(group, keys)

    def evicted(self, group: int, keys: Keys) -> None:
        """Counts as lost the evicted pages that no other tier has."""
        if not self._writes:
            return
        known = np.zeros(len(keys), np.bool_)
        for tier in self._tables.tiers[1:]:
            if tier.held:
                continue
            known |= tier.sink.known(group, keys) if tier.sink is not None else tier.present(group, keys)
        for number in self._writes:
            tier = self._tables.tiers[number]
            # If the tier is down and its write mode is THROUGH or BACK, these pages were counted when they became
            # visible.
            if not tier.down or tier.facts.write not in (WriteMode.THROUGH, WriteMode.BACK):
                tier.counts.lost += int(np.count_nonzero(~known))

    def recount(self) -> None:
        """Recounts the waiting writes. Called after a call that planned writes was interrupted."""
        for queue in self._writes.values():
            queue.recount()

    def reset(self) -> None:
        """Drops the waiting writes, and forgets which pages are copies of peers' pages."""
        if self.once is not None:
            self.once.reset()
        for queue in self._writes.values():
            queue.reset()
