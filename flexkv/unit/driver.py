"""Carries ops between a manager and the planes of its tiers, and never waits for one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from flexkv.cache.base import TierId
from flexkv.cache.manager import LocalCacheManager
from flexkv.cache.tiers.contract import Plane, Tier
from flexkv.observe import get_logger
from flexkv.transfer.graph import OpKind, OpResult, SlotIds, TransferGraph

logger = get_logger(__name__)

WATCH_EVERY_S = 0.25
"""How often the tiers are polled while nothing moves."""

SAY_LEFT_EVERY_S = 60.0
"""The shortest interval between log lines about pages that the engine computes although a tier has them."""

FLUSH_SHARE = 0.7
"""During this share of a close's time writes may begin; in the rest they end and become durable."""

WORK_SHARE = 0.8
"""After this share of a close's time nothing waits for writes any more. The rest is the planes' and tiers': one disk
that hangs must not take the time in which the others make durable what they have."""

CLOSE_LOOK_S = 0.002
"""How often a close checks whether the writes have ended."""


class UnitDriver:
    """The manager's thread calls it whenever it is free. Closes the tiers and their planes.

    Args:
        manager: all of its tiers but the first may have planes.
        fail_read: fails loads that wait for a fetch (host slots and number) that will never be submitted. For a
            submitted fetch, the plane settles its loads itself.
    """

    def __init__(
        self,
        manager: LocalCacheManager,
        clock: Callable[[], float] = time.monotonic,
        fail_read: Callable[[SlotIds, int], None] = lambda slots, read: None,
    ) -> None:
        self._manager = manager
        self._behind = manager.tiers[1:]
        self._planes: dict[TierId, Plane] = {
            TierId(number): tier.plane for number, tier in enumerate(manager.tiers) if tier.plane is not None
        }
        self._probers = [tier.prober for tier in self._behind if tier.prober is not None]
        self._clock = clock
        self._fail_read = fail_read
        self._watch_at_s = 0.0
        self._say_left_at_s = 0.0
        self._given_up_pages = 0
        self._closed: bool | None = None
        """What `close` returned; None before the first call."""

    @property
    def busy(self) -> bool:
        """Whether further calls of `poll` have something to submit, to wait for, or to make durable."""
        return self._closed is None and (
            self._manager.work.busy or self._manager.resets or any(tier.unflushed for tier in self._behind)
        )

    def poll(self) -> None:
        """Takes results, plans writes, and submits planned ops. Costs about a microsecond if there is nothing to do."""
        if self._closed is not None:
            return
        if self._manager.resets:
            self._manager.poll_reset()
        if self._manager.work.moving:
            self._take_results()
        for tier, graph in self._manager.work.poll():
            self._submit(tier, graph)
        now_s = self._clock()
        if now_s >= self._watch_at_s:
            self._watch_at_s = now_s + WATCH_EVERY_S
            self._watch(now_s)

    def look_durable(self) -> bool:
        """Polls the tiers; returns whether everything written until now would survive a crash."""
        return all(tier.durable() for tier in self._behind)

    def _submit(self, tier: TierId, graph: TransferGraph) -> None:
        name = self._manager.tiers[tier].facts.name
        reason = f"the queue of the {name} tier is full"
        try:
            if self._planes[tier].submit(graph) is not None:
                return
        except Exception as error:
            # The engine can do without the tier, whatever error its plane has met (no more threads, for
            # example): its pages are misses from now on. Graphs for other tiers are still submitted.
            reason = f"{type(error).__name__}: {error}"
            self._manager.work.take_down(tier, reason)
        for op in graph.ops:
            if op.kind is OpKind.DISK_READ:
                self._fail_read(op.slots, op.op_id)
            self._manager.work.complete(OpResult.cancelled(op.op_id, op.pages, reason))

    def _take_results(self) -> None:
        for tier, plane in self._planes.items():
            while results := plane.poll():
                for result in results:
                    self._manager.work.reported(tier, result)
        for prober in self._probers:
            for op_id in prober.answers():
                self._manager.work.answered(op_id)

    def _watch(self, now_s: float) -> None:
        for tier in self._behind:
            tier.poll(now_s)
        self._say_left(now_s)

    def _say_left(self, now_s: float) -> None:
        choice = self._manager.choice
        left = choice.last_left
        if left is None or now_s < self._say_left_at_s:
            return
        choice.last_left, self._say_left_at_s = None, now_s + SAY_LEFT_EVERY_S
        logger.info(
            "pages of the %s tier are left to the engine, which computes them sooner: of the last lookup %d, in about "
            "%.3f s instead of %.3f s (compute_if_faster)",
            self._manager.tiers[left.tier].facts.name,
            left.pages,
            left.compute_s,
            left.fetch_s,
        )

    def close(self, deadline_s: float) -> bool:
        """Writes waiting pages and pages that only host memory has, ends the planes, and makes everything durable.

        Returns False if after `deadline_s` seconds some page still moves, was not written or is not durable. Only pages
        that were not written are lost. New writes begin only within `FLUSH_SHARE` of the time, so that those under way
        can end and become durable. Each plane, and then each tier, has an equal share of the time that is left when
        its turn comes, and at least `1 - WORK_SHARE` of all is left to them. Further calls return the same.
        """
        if self._closed is not None:
            return self._closed
        begun_s = time.monotonic()
        flush_ends_s, work_ends_s = (begun_s + share * deadline_s for share in (FLUSH_SHARE, WORK_SHARE))
        self._given_up_pages += self._manager.work.give_up_held()
        self._manager.work.begin_close()
        self._manager.work.offer_all()
        self._manager.work.flush()
        self.poll()
        while self._manager.work.busy and time.monotonic() < work_ends_s:
            if time.monotonic() < flush_ends_s:
                self._manager.work.flush()
            else:
                self._give_up_writes(deadline_s)
            time.sleep(CLOSE_LOOK_S)
            self.poll()
        self._give_up_writes(deadline_s)  # one poll may have lasted to the deadline
        # Closes all planes and tiers, whatever one of them returns.
        planes, tiers = list(self._planes.values()), list(reversed(self._behind))
        ended = _close_in_turn(planes, begun_s + deadline_s, len(tiers))
        self._take_results()
        durable = _close_in_turn(tiers, begun_s + deadline_s, 0)
        whole = all(ended) and all(durable)
        self._closed = whole and not self._given_up_pages
        if not whole:
            logger.warning(
                "the tiers behind host memory did not end within %.1f s: what was not durable is computed again",
                deadline_s,
            )
        return self._closed

    def _give_up_writes(self, deadline_s: float) -> None:
        if left := self._manager.work.give_up():
            self._given_up_pages += left
            logger.warning("%d pages of host memory were not written within %.1f s", left, deadline_s)


def _close_in_turn(parts: Sequence[Plane | Tier], ends_s: float, behind: int) -> list[bool]:
    """Closes parts by `ends_s`, with equal shares of the time left for those whose turn has not come; returns whether
    each has ended well.

    Args:
        behind: number of parts that come later.
    """
    turns = range(len(parts) + behind, behind, -1)
    return [
        _close(part, max(0.0, ends_s - time.monotonic()) / turn)
        for part, turn in zip(parts, turns, strict=True)
    ]


def _close(part: Plane | Tier, deadline_s: float) -> bool:
    """Closes a part; returns whether all of it ended well. Logs an error, so that the other parts are closed, too."""
    try:
        return part.close(deadline_s)
    except Exception:
        logger.exception("a part of the tiers behind host memory was not closed: %r", part)
        return False
