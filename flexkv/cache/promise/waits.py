"""Who waits for which fetches, and for how long."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flexkv.cache.base import TierId
from flexkv.cache.ledger.leases import HeldPages
from flexkv.cache.ledger.ops import ProbeOp
from flexkv.cache.moves.fetches import FetchedPages, WantedPages
from flexkv.cache.tiers.tables import CacheTables
from flexkv.transfer.graph import OpId


class FetchWaits:
    """Of one manager. A request's time to wait is kept by tier, and begins with its first lookup that waits for it.

    Args:
        tables: of the manager; the waits are entered in its requests.
    """

    def __init__(self, tables: CacheTables) -> None:
        self._tiers = tables.tiers
        self._hub = tables.hub
        self._ops = tables.ops
        self._requests = tables.requests
        self._clock = tables.clock

    def join(
        self,
        request_id: str,
        wanted: Sequence[WantedPages],
        pages: Sequence[FetchedPages],
        ops: dict[OpId, TierId],
        counted: bool = True,
    ) -> int:
        """The request waits for these fetches, and what they bring is kept for it. Returns how many.

        Args:
            counted: as a lookup that waits.
        """
        for part, fetched in zip(wanted, pages, strict=True):
            if ops:
                self._requests.hold(request_id, HeldPages(part.group, fetched.entries, fetched.slots))
            else:
                self._hub.index.unpin(fetched.entries)
        if not ops:
            return 0
        waits = []
        for op_id, tier in ops.items():
            op = self._ops.fetch(op_id)
            assert op is not None
            op.waiters.add(request_id)
            waits.append((op_id, tier, self._tiers[tier].facts.wait_s))
        for tier in self._requests.wait(request_id, waits, self._clock()):
            self._tiers[tier].counts.waits += counted
        return len(ops)

    def join_probe(self, request_id: str, probe: ProbeOp, wait_s: float) -> None:
        """The request waits `wait_s` for what a tier answers."""
        probe.waiters.add(request_id)
        self._requests.wait(request_id, [(probe.op_id, probe.tier, wait_s)], self._clock())

    def skipped(self, request_id: str) -> set[TierId]:
        """The tiers that the request goes on without. Where it has waited too long, its wait ends, and those that it
        waited for are among them from now on."""
        wait = self._requests.waits.get(request_id)
        if wait is None:
            return set()
        if wait.ops and self._clock() > wait.ends_s:
            late = set(wait.ops.values())
            for tier in late:
                self._tiers[tier].counts.late += 1
            self._leave(request_id, wait.ops)
            wait.ops.clear()
            wait.skipped.update(late)
        return wait.skipped

    def end_prefetch(self, request_id: str) -> None:
        """A lookup asks for a prefetched request: what it waits for from now on is the lookup's to say."""
        self._leave(request_id, self._requests.end_prefetch(request_id))

    def end(self, request_id: str) -> None:
        """The request waits no more. The fetches go on: what they bring is worth having."""
        if request_id not in self._requests.waits:
            return
        for held in self._requests.take_held(request_id):
            self._hub.index.unpin(held.entries)
        wait = self._requests.drop_wait(request_id)
        if wait is not None:
            self._leave(request_id, wait.ops)

    def _leave(self, request_id: str, fetches: Iterable[OpId]) -> None:
        for op_id in fetches:
            if (op := self._ops.awaited(op_id)) is not None:
                op.waiters.discard(request_id)
