"""What the manager keeps for each request: the lease of its last lookup, and what it waits for."""

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
    """A request whose lookup found more behind host memory than in it.

    Attributes:
        since_s: the clock when it began to wait for each tier.
        ends_s: the clock until which it waits at most.
        ops: fetches that have not ended.
        held: what is fetched for it, and what follows, until its next lookup has leased it.
        skipped: tiers that it goes on without, and why.
        probed: tiers that were asked for its pages, each once (True: for its tail), with the number of the question.
        ready_end: end of what was in host memory when it began to wait, in blocks of the request.
        fetched: blocks that were brought to host memory for it, by the tier that they came from.
    """

    since_s: dict[TierId, float] = field(default_factory=dict)
    ends_s: float = 0.0
    ops: dict[OpId, TierId] = field(default_factory=dict)
    held: list[HeldPages] = field(default_factory=list)
    skipped: dict[TierId, MissReason] = field(default_factory=dict)
    probed: dict[tuple[TierId, bool], OpId] = field(default_factory=dict)
    ready_end: int | None = None
    fetched: dict[TierId, int] = field(default_factory=dict)


class RequestTable:
    """The lookup leases by request, oldest first, with the pages they reserve; and the waits.

    Attributes:
        waits: by request.
        prefetched: those of them that no lookup has asked for yet.
        reserved_pages: of all leases.
        misses: why the last lookup of a request promised no more, and how many whole blocks it did not promise; of
            lookups that were not acted on yet.
    """

    def __init__(self) -> None:
        self._leases: dict[str, Lease] = {}
        self.waits: dict[str, Wait] = {}
        self.prefetched: set[str] = set()
        self.reserved_pages = 0
        self.misses: dict[str, tuple[MissReason, int]] = {}

    # --- leases ---

    def knows(self, request_id: str) -> bool:
        """Whether the request has a lease or waits."""
        return request_id in self._leases or request_id in self.waits

    def leases(self) -> Iterator[Lease]:
        return iter(self._leases.values())

    def lease(self, request_id: str) -> Lease | None:
        return self._leases.get(request_id)

    def add_lease(self, request_id: str, lease: Lease) -> None:
        """Enters a lease, unless it is of no page. The request must have none."""
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
        """Requests whose lease was made before `since_s`. Costs no more than those, as leases are kept in order."""
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
        """The request waits for these fetches: number, tier, and how long it waits for that tier.

        Returns:
            Tiers that it did not wait for before.
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
        """The request goes on without these tiers, until its wait is dropped."""
        self.waits.setdefault(request_id, Wait()).skipped.update(dict.fromkeys(tiers, reason))

    def skipped(self, request_id: str) -> Mapping[TierId, MissReason]:
        """The tiers that the request goes on without, and why."""
        wait = self.waits.get(request_id)
        return {} if wait is None else wait.skipped

    def probe_of(self, request_id: str, tier: TierId, tail: bool) -> OpId | None:
        """The question that was asked for the request; None before."""
        wait = self.waits.get(request_id)
        return None if wait is None else wait.probed.get((tier, tail))

    def probed(self, request_id: str, tier: TierId, tail: bool, op_id: OpId) -> None:
        """A question was asked for the request."""
        self.waits.setdefault(request_id, Wait()).probed[tier, tail] = op_id

    def hold(self, request_id: str, pages: HeldPages) -> None:
        """Leased once for the request, until `take_held`."""
        if len(pages.entries):
            self.waits.setdefault(request_id, Wait()).held.append(pages)

    def held_by(self, request_id: str) -> Sequence[HeldPages] | None:
        """What is held for a request; None while it waits for a fetch, or before a lookup has asked for it."""
        wait = self.waits.get(request_id)
        if wait is None:
            return ()
        return None if wait.ops or request_id in self.prefetched else wait.held

    def held_pages(self, request_id: str) -> int:
        wait = self.waits.get(request_id)
        return 0 if wait is None else sum(len(held.entries) for held in wait.held)

    def take_held(self, request_id: str) -> Sequence[HeldPages]:
        """What was held; the pins are the caller's to end."""
        wait = self.waits.get(request_id)
        if wait is None:
            return ()
        held, wait.held = wait.held, []
        return held

    def held(self) -> Iterator[HeldPages]:
        """All that is held."""
        return (held for wait in self.waits.values() for held in wait.held)

    def is_waiting(self, request_id: str, now_s: float) -> bool:
        """Whether the request's last lookup waits for a fetch and has not done so for too long. O(1)."""
        wait = self.waits.get(request_id)
        if wait is None or not wait.ops or now_s > wait.ends_s:
            return False
        return request_id not in self.prefetched

    def begin_prefetch(self, request_id: str, ready_end: int) -> None:
        """What the request waits for is fetched before a lookup asks for it."""
        self.prefetched.add(request_id)
        self.begins_to_wait(request_id, ready_end)

    def end_prefetch(self, request_id: str) -> list[OpId]:
        """A lookup asks: the request's waits begin with it. Returns the fetches that have not ended."""
        self.prefetched.discard(request_id)
        wait = self.waits[request_id]
        ops = list(wait.ops)
        wait.ops.clear()
        wait.since_s.clear()
        return ops

    def prefetched_pages(self) -> int:
        """Pages of host memory that are held for prefetched requests."""
        return sum(
            len(held.entries) for request_id in self.prefetched for held in self.waits[request_id].held
        )

    def probe_ended(self, request_id: str, op_id: OpId) -> None:
        """A tier has answered."""
        if (wait := self.waits.get(request_id)) is not None:
            wait.ops.pop(op_id, None)

    def fetch_ended(self, request_id: str, op_id: OpId, pages: int) -> None:
        """A fetch has brought so many pages."""
        wait = self.waits.get(request_id)
        if wait is not None and (tier := wait.ops.pop(op_id, None)) is not None:
            wait.fetched[tier] = wait.fetched.get(tier, 0) + pages

    def begins_to_wait(self, request_id: str, ready_end: int) -> None:
        """Blocks of the request up to `ready_end` are in host memory; it waits for what follows."""
        wait = self.waits.get(request_id)
        if wait is not None and wait.ready_end is None:
            wait.ready_end = ready_end

    def fetched_for(self, request_id: str, start: int, end: int) -> dict[TierId, int]:
        """Of the request's blocks from `start` to `end` those that it waited for, by the tier that they came from."""
        wait = self.waits.get(request_id)
        if wait is None or wait.ready_end is None or not wait.fetched:
            return {}
        return self.fetched_pages(request_id, max(0, end - max(start, wait.ready_end)))

    def fetched_pages(self, request_id: str, most: int) -> dict[TierId, int]:
        """Pages that were brought to host memory for the request, by the tier that they came from; `most` over all
        tiers, as some may have been brought twice."""
        wait = self.waits.get(request_id)
        left, found = most, {}
        for tier, pages in wait.fetched.items() if wait is not None else ():
            found[tier] = min(pages, left)
            left -= found[tier]
        return found

    def drop_wait(self, request_id: str) -> Wait | None:
        """The request waits no more. Nothing may be held."""
        self.prefetched.discard(request_id)
        return self.waits.pop(request_id, None)

    def waiting_before(self, ends_s: float) -> list[str]:
        """Requests that were to stop waiting before `ends_s`."""
        return [request_id for request_id, wait in self.waits.items() if wait.ends_s < ends_s]

    def recount(self, in_flight: set[OpId]) -> None:
        """Counts the leased pages anew, and ends the waits for fetches that are not `in_flight`: what was noting them
        broke off."""
        self.reserved_pages = sum(lease.pages for lease in self.leases())
        for wait in self.waits.values():
            wait.ops = {op_id: tier for op_id, tier in wait.ops.items() if op_id in in_flight}

    def check_integrity(self) -> None:
        """
        Raises:
            ContractError: another number of pages is counted than is leased, or a prefetched request has no wait.
        """
        if strange := self.prefetched - set(self.waits):
            raise ContractError(f"requests {sorted(strange)} were prefetched and wait for nothing")
        pages = sum(lease.pages for lease in self.leases())
        if pages != self.reserved_pages:
            raise ContractError(f"{self.reserved_pages} pages are counted as reserved, not {pages}")
