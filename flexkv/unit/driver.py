"""Submits the manager's planned ops to the planes of its tiers (a plane executes a tier's ops), and reports the ops'
results to the manager. Only `close` waits for ops.
"""

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
"""The shortest interval between calls of each tier's own `poll`."""

SAY_LEFT_EVERY_S = 60.0
"""The shortest interval between log lines about pages that the engine computes although a tier has them."""

FLUSH_SHARE = 0.7
"""During a close, writes may begin only in this first share of the time. In the rest, the writes finish and become
durable.
"""

WORK_SHARE = 0.8
"""After this share of its time, a close no longer waits for writes. The rest of the time is reserved for closing the
planes and tiers, so that one disk that hangs cannot use up the time in which the other disks make their pages durable.
"""

CLOSE_LOOK_S = 0.002
"""Seconds between two checks of whether the writes have finished, during a close."""


class UnitDriver:
    """Moves pages between host memory and the tiers behind it. The manager's thread calls `poll` whenever it is free.

    The driver owns the planes and tiers, and closes them.

    Args:
        manager: the unit's manager. Its first tier is host memory, which has no plane.
        fail_read: takes the host slots and the op id of a fetch that was never submitted, and fails the loads that wait
            for it. For fetches that were submitted to a plane, the plane does this.
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
        """The value that `close` returned; None before its first call."""

    @property
    def busy(self) -> bool:
        """Whether a tier has ops to submit, ops in flight or pages not yet durable, or a reset is unfinished."""
        return self._closed is None and (
            self._manager.work.busy or self._manager.resets or any(tier.unflushed for tier in self._behind)
        )

    def poll(self) -> None:
        """Collects results, plans writes and submits planned ops. Costs about a microsecond if it has no work."""
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
        """Polls the tiers. Returns whether all pages written so far would survive a crash."""
        return all(tier.durable() for tier in self._behind)

    def _submit(self, tier: TierId, graph: TransferGraph) -> None:
        name = self._manager.tiers[tier].facts.name
        reason = f"the queue of the {name} tier is full"
        try:
            if self._planes[tier].submit(graph) is not None:
                return
        except Exception as error:
            # The engine can do without the tier, whatever the error is (for example, the system cannot start another
            # thread). From now on the tier's pages are misses. Graphs for the other tiers are still submitted.
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
        """Writes waiting pages and pages that only host memory has, closes the planes, and makes all pages durable.

        Returns False if after `deadline_s` seconds some page is still being copied, was not written, or is not durable.
        Only pages that were not written are lost. Further calls return the same value.

        Writes begin only during the first `FLUSH_SHARE` of the time, so that they can finish and become durable in the
        rest. At least `1 - WORK_SHARE` of the time is left for closing first the planes and then the tiers, one after
        another. When a plane or tier is closed, it gets an equal share of the time that is left.
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
        self._give_up_writes(deadline_s)  # the last `poll` may have lasted until the deadline
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
    """Closes `parts` one after another by `ends_s`. Each part gets an equal share of the time that is left when the
    parts before it are closed. Returns for each part whether it was closed without loss.

    Args:
        behind: number of further parts that the caller closes afterwards. Each of these parts gets a share of the time,
            too.
    """
    turns = range(len(parts) + behind, behind, -1)
    return [
        _close(part, max(0.0, ends_s - time.monotonic()) / turn)
        for part, turn in zip(parts, turns, strict=True)
    ]


def _close(part: Plane | Tier, deadline_s: float) -> bool:
    """Closes one plane or tier. Returns whether it was closed without loss. Logs an exception instead of raising it, so
    that the other parts are closed, too."""
    try:
        return part.close(deadline_s)
    except Exception:
        logger.exception("a part of the tiers behind host memory was not closed: %r", part)
        return False
