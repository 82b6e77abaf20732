"""The manager's records of each request: the lease of its last lookup, and the ops that it waits for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from flexkv.cache.base import TierId
from flexkv.cache.ledger.leases import HeldPages, Lease
from flexkv.errors import ContractError
from flexkv.observe import MissReason
from flexkv.transfer.graph import OpId


@dataclass(slots=True)
class Wait:
    """The wait of a request whose lookup found further pages in tiers behind host memory.

    Attributes:
        since_s: by tier, the time at which the request began to wait for it.
        ends_s: the clock at which the wait ends at the latest.
        ops: fetches and questions that have not ended, with their tiers.
        held: pages that are fetched for the request, with those that its fetches found there; kept until its next
            lookup has leased them.
        skipped: tiers without which the request continues, and why.
        probed: number of the question by tier and whether it was for the tail; each tier is asked once for blocks and
            once for a tail.
        ready_end: block of the request at which the pages in host memory ended when it began to wait.
        fetched: number of pages that were brought to host memory for it, by the tier that they came from.
    """

    since_s: dict[TierId, float] = field(default_factory=dict)
    ends_s: float = 0.0
    ops: dict[OpId, TierId] = field(default_factory=dict)
    held: list[HeldPages] = field(default_factory=list)
    skipped: dict[TierId, MissReason] = field(default_factory=dict)
    probed: dict[tuple[TierId, bool], OpId] = field(default_factory=dict)
    ready_end: int | None = None
    fetched: dict[TierId, int] = field(default_factory=dict)


MOST_MISSES = 16_384
"""Misses noted at once; beyond it the oldest is dropped. Far above what an engine queues: it bounds the ids that
leak."""


class RequestLedger:
    """The lookup leases by request, oldest first, the pages that they reserve, and the waits.

    Attributes:
        waits: the waits by request.
        prefetched: requests with a wait that no lookup has asked for yet.
        reserved_pages: pages of all leases.
        misses: by request, why its last lookup promised no more, and how many whole blocks it did not promise. Contains
            only lookups that the engine has not acted on yet.
        kept: pages that plugins keep, each pinned once, by the name of the pin.
    """

    def __init__(self) -> None:
        self._leases: dict[str, Lease] = {}
        self.waits: dict[str, Wait] = {}
        self.prefetched: set[str] = set()
        self.reserved_pages = 0
        self.misses: dict[str, tuple[MissReason, int]] = {}
        self.kept: dict[str, list[HeldPages]] = {}

    # --- misses ---

    def note_miss(self, request_id: str, reason: MissReason, blocks: int) -> None:
        """Records why the request's last lookup did not promise `blocks` whole blocks, in place of an earlier
        record.
        """
        if len(self.misses) >= MOST_MISSES and request_id not in self.misses:
            del self.misses[next(iter(self.misses))]
        self.misses[request_id] = (reason, blocks)

    # --- leases ---

    def knows(self, request_id: str) -> bool:
        """Whether the request has a lease or waits."""
        return request_id in self._leases or request_id in self.waits

    def leases(self) -> Iterator[Lease]:
        return iter(self._leases.values())

    def lease(self, request_id: str) -> Lease | None:
        return self._leases.get(request_id)

    def add_lease(self, request_id: str, lease: Lease) -> None:
        """Adds a lease, unless it has no pages. Precondition: the request has no lease."""
        assert request_id not in self._leases
        if pages := lease.pages:
            self._leases[request_id] = lease
            self.reserved_pages += pages

    def pop_lease(self, request_id: str) -> Lease | None:
        lease = self._leases.pop(request_id, None)
        if lease is not None:
            self.reserved_pages -= lease.pages
        return lease

    def leased_before(self, since_s: float) -> list[str]:
        """Requests whose lease was made before `since_s`. Leases are kept in order, so it visits only those."""
        expired = []
        for request_id, lease in self._leases.items():
            if lease.since_s >= since_s:
                break
            expired.append(request_id)
        return expired

    def leased(self) -> list[str]:
        """The requests that have a lease."""
        return list(self._leases)

    # --- waits ---

    def wait(self, request_id: str, ops: Iterable[tuple[OpId, TierId, float]], now_s: float) -> list[TierId]:
        """Adds ops to the request's wait: number, tier, and seconds that the request waits for that tier.

        Returns:
            Tiers that the request did not wait for before.
        """
        wait = self.waits.setdefault(request_id, Wait())
        new = []
        for op_id, tier, wait_s in ops:
            wait.ops[op_id] = tier
            if tier not in wait.since_s:
                wait.since_s[tier] = now_s
                new.append(tier)
            wait.ends_s = max(wait.ends_s, wait.since_s[tier] + wait_s)
        return new

    def skip(self, request_id: str, tiers: Iterable[TierId], reason: MissReason) -> None:
        """Records that the request continues without these tiers, until its wait is dropped."""
        self.waits.setdefault(request_id, Wait()).skipped.update(dict.fromkeys(tiers, reason))

    def skipped(self, request_id: str) -> Mapping[TierId, MissReason]:
        """The tiers without which the request continues, and why."""
        wait = self.waits.get(request_id)
        return {} if wait is None else wait.skipped

    def probe_of(self, request_id: str, tier: TierId, tail: bool) -> OpId | None:
        """Number of the question that the tier was asked for the request; None if it was not asked."""
        wait = self.waits.get(request_id)
        return None if wait is None else wait.probed.get((tier, tail))

    def probed(self, request_id: str, tier: TierId, tail: bool, op_id: OpId) -> None:
        """Records that the tier was asked for the request."""
        self.waits.setdefault(request_id, Wait()).probed[tier, tail] = op_id

    def hold(self, request_id: str, pages: HeldPages) -> None:
        """Keeps pages, which the caller has pinned once for the request, until `take_held`."""
        if len(pages.entries):
            self.waits.setdefault(request_id, Wait()).held.append(pages)

    def held_by(self, request_id: str) -> Sequence[HeldPages] | None:
        """The pages held for a request; None while it waits for an op, or before a lookup has asked for it."""
        wait = self.waits.get(request_id)
        if wait is None:
            return ()
        return None if wait.ops or request_id in self.prefetched else wait.held

    def held_pages(self, request_id: str) -> int:
        wait = self.waits.get(request_id)
        return 0 if wait is None else sum(len(held.entries) for held in wait.held)

    def take_held(self, request_id: str) -> Sequence[HeldPages]:
        """Removes and returns the pages held for the request; the caller must end their pins."""
        wait = self.waits.get(request_id)
        if wait is None:
            return ()
        held, wait.held = wait.held, []
        return held

    def held(self) -> Iterator[HeldPages]:
        """All held pages."""
        return (held for wait in self.waits.values() for held in wait.held)

    def is_waiting(self, request_id: str, now_s: float) -> bool:
        """Whether the request's last lookup waits for ops, and its time to wait is not over. O(1)."""
        wait = self.waits.get(request_id)
        if wait is None or not wait.ops or now_s > wait.ends_s:
            return False
        return request_id not in self.prefetched

    def awaited(self, request_id: str) -> int:
        """Number of fetches and questions that are under way for the request, whatever its time to wait."""
        wait = self.waits.get(request_id)
        return 0 if wait is None else len(wait.ops)

    def begin_prefetch(self, request_id: str, ready_end: int) -> None:
        """Marks the request's wait as one that no lookup has asked for yet; `ready_end` as in `begins_to_wait`."""
        self.prefetched.add(request_id)
        self.begins_to_wait(request_id, ready_end)

    def end_prefetch(self, request_id: str) -> list[OpId]:
        """Turns a prefetched request into one that a lookup has asked for: its wait starts anew, for no op yet. Returns
        the ops that it waited for."""
        self.prefetched.discard(request_id)
        wait = self.waits[request_id]
        ops = list(wait.ops)
        wait.ops.clear()
        wait.since_s.clear()
        return ops

    def prefetched_pages(self) -> int:
        """Pages of host memory held for prefetched requests."""
        return sum(
            len(held.entries) for request_id in self.prefetched for held in self.waits[request_id].held
        )

    def probe_ended(self, request_id: str, op_id: OpId) -> None:
        """Removes a question that its tier has answered from the request's wait."""
        if (wait := self.waits.get(request_id)) is not None:
            wait.ops.pop(op_id, None)

    def fetch_ended(self, request_id: str, op_id: OpId, pages: int) -> None:
        """Removes a fetch that has ended from the request's wait, and counts the `pages` that it brought."""
        wait = self.waits.get(request_id)
        if wait is not None and (tier := wait.ops.pop(op_id, None)) is not None:
            wait.fetched[tier] = wait.fetched.get(tier, 0) + pages

    def begins_to_wait(self, request_id: str, ready_end: int) -> None:
        """Records, at the first call, that the request's blocks up to `ready_end` are in host memory and that it waits
        for the later ones.
        """
        wait = self.waits.get(request_id)
        if wait is not None and wait.ready_end is None:
            wait.ready_end = ready_end

    def fetched_for(self, request_id: str, start: int, end: int) -> dict[TierId, int]:
        """How many of the request's blocks from `start` to `end` it waited for, by the tier that they came from."""
        wait = self.waits.get(request_id)
        if wait is None or wait.ready_end is None or not wait.fetched:
            return {}
        return self.fetched_pages(request_id, max(0, end - max(start, wait.ready_end)))

    def fetched_pages(self, request_id: str, most: int) -> dict[TierId, int]:
        """Pages that were brought to host memory for the request, by the tier that they came from. At most `most` over
        all tiers, because some may have been brought twice."""
        wait = self.waits.get(request_id)
        left, found = most, {}
        for tier, pages in wait.fetched.items() if wait is not None else ():
            found[tier] = min(pages, left)
            left -= found[tier]
        return found

    def drop_wait(self, request_id: str) -> Wait | None:
        """Removes and returns the request's wait, if any. Precondition: it holds no pages."""
        self.prefetched.discard(request_id)
        return self.waits.pop(request_id, None)

    def waiting_before(self, ends_s: float) -> list[str]:
        """Requests whose time to wait (`Wait.ends_s`) was over before `ends_s`."""
        return [request_id for request_id, wait in self.waits.items() if wait.ends_s < ends_s]

    def recount(self, in_flight: set[OpId]) -> None:
        """Recounts the leased pages, and ends the waits for ops that are not `in_flight`. For a call that was
        interrupted.
        """
        self.reserved_pages = sum(lease.pages for lease in self.leases())
        for wait in self.waits.values():
            wait.ops = {op_id: tier for op_id, tier in wait.ops.items() if op_id in in_flight}

    def check_integrity(self) -> None:
        """
        Raises:
            ContractError: the number of reserved pages is not that of the leased ones, or a prefetched request has no
                wait.
        """
        if strange := self.prefetched - set(self.waits):
            raise ContractError(f"requests {sorted(strange)} were prefetched and wait for nothing")
        pages = sum(lease.pages for lease in self.leases())
        if pages != self.reserved_pages:
            raise ContractError(f"{self.reserved_pages} pages are counted as reserved, not {pages}")
