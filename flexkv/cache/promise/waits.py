"""Begins and ends the waits of requests for fetches and for tiers' answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flexkv.cache.ledger.leases import HeldPages
from flexkv.cache.ledger.ops import ProbeOp
from flexkv.cache.moves.fetches import Fetched, WantedPages
from flexkv.cache.tiers.tables import CacheTables
from flexkv.observe import MissReason
from flexkv.transfer.graph import OpId


class FetchWaits:
    """Begins and ends the waits of requests. The time to wait is counted separately for each tier. It begins with the
    request's first lookup that waits for the tier."""

    def __init__(self, tables: CacheTables) -> None:
        self._tables = tables

    def join_fetches(
        self, request_id: str, wanted: Sequence[WantedPages], fetched: Fetched, counted: bool = True
    ) -> int:
        """Makes the request wait for fetches, and holds for it the pages that they bring. If there are no fetches in
        flight, unpins the pages instead. Returns the number of fetches.

        Args:
            wanted: the pages that were to be fetched.
            fetched: the result of planning these fetches.
            counted: whether to count the request as one that waited for each of the tiers.
        """
        tables = self._tables
        for part, pages in zip(wanted, fetched.pages, strict=True):
            if fetched.ops:
                tables.requests.hold(request_id, HeldPages(part.group, pages.entries, pages.slots))
            else:
                tables.hub.index.unpin(pages.entries)
        if not fetched.ops:
            return 0
        waits = []
        for op_id, tier in fetched.ops.items():
            op = tables.ops.fetch(op_id)
            assert op is not None
            op.waiters.add(request_id)
            waits.append((op_id, tier, tables.tiers[tier].facts.wait_s))
        for tier in tables.requests.wait(request_id, waits, tables.clock()):
            tables.tiers[tier].counts.waits += counted
        return len(fetched.ops)

    def join_probe(self, request_id: str, probe: ProbeOp, wait_s: float) -> None:
        """Makes the request wait for a tier's answer to the question `probe`, for at most `wait_s` seconds."""
        probe.waiters.add(request_id)
        self._tables.requests.wait(request_id, [(probe.op_id, probe.tier, wait_s)], self._tables.clock())

    def skip_late(self, request_id: str) -> None:
        """If the request's time to wait is over, ends its wait: it continues without the tiers for which it waited."""
        wait = self._tables.requests.waits.get(request_id)
        if wait is None or not wait.ops or self._tables.clock() <= wait.ends_s:
            return
        late = set(wait.ops.values())
        for tier in late:
            self._tables.tiers[tier].counts.late += 1
        self._leave(request_id, wait.ops)
        wait.ops.clear()
        self._tables.requests.skip(request_id, late, MissReason.LATE)

    def end_prefetch(self, request_id: str) -> None:
        """Ends the request's prefetch. Called by its first lookup, which then decides whether the request waits."""
        self._leave(request_id, self._tables.requests.end_prefetch(request_id))

    def end_wait(self, request_id: str) -> None:
        """Ends the request's wait, and unpins the pages held for it. Its fetches continue, because other requests may
        use the pages that they bring.
        """
        if request_id not in self._tables.requests.waits:
            return
        for held in self._tables.requests.take_held(request_id):
            self._tables.hub.index.unpin(held.entries)
        wait = self._tables.requests.drop_wait(request_id)
        if wait is not None:
            self._leave(request_id, wait.ops)

    def _leave(self, request_id: str, fetches: Iterable[OpId]) -> None:
        for op_id in fetches:
            if (op := self._tables.ops.awaited(op_id)) is not None:
                op.waiters.discard(request_id)
