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
    """A request's wait for fetches and for answers of tiers behind host memory, and the results of the wait.

    Attributes:
        since_s: by tier, the clock time at which the request began to wait for the tier.
        ends_s: clock time at which the wait ends at the latest.
        ops: by op number, the tier of each fetch or question that has not ended yet.
        held: pages that are pinned for the request until its next lookup has leased them: the pages that its fetches
            bring, and the pages between them that were already in host memory.
        skipped: by tier, the reason why the request continues without the tier's pages. Has no element for tiers that
            the request still uses.
        probed: op number of each question asked for the request, by tier and by whether the question was for the tail.
            Each tier is asked at most once for whole blocks and once for a tail.
        ready_end: number of leading blocks of the request that were in host memory when the wait began; None before it
            begins.
        fetched: number of pages that were fetched to host memory for the request, by tier.
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
"""Maximum number of recorded misses; if it is exceeded, the oldest is dropped. Engines queue far fewer requests. The
limit bounds the memory for requests whose end is never reported."""


class RequestLedger:
    """The lookup leases (oldest first), the waits and the misses of all requests, and the pages that plugins keep.

    Attributes:
        waits: each request's wait, by request id.
        prefetched: ids of requests whose pages are being fetched before their first lookup; each has a wait.
        reserved_pages: number of pages in all leases.
        misses: by request id, the reason why the last lookup promised no more, and the number of whole blocks that it
            did not promise. An element is removed when the engine acts on the lookup.
        kept: pages that plugins keep in host memory, by the name that the plugin gave; each is pinned once.
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
        """Records why the request's last lookup did not promise `blocks` whole blocks. Replaces the record of an
        earlier lookup.
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
        """Adds the request's lease. Does nothing if the lease has no pages. Precondition: the request has no lease."""
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
        """Returns the requests whose lease was made before `since_s`. Examines only their leases and the next one,
        because leases are kept in the order in which they were made."""
        expired = []
        for request_id, lease in self._leases.items():
            if lease.since_s >= since_s:
                break
            expired.append(request_id)
        return expired

    def leased(self) -> list[str]:
        """Returns the ids of all requests that have a lease."""
        return list(self._leases)

    # --- waits ---

    def wait(self, request_id: str, ops: Iterable[tuple[OpId, TierId, float]], now_s: float) -> list[TierId]:
        """Adds ops to the request's wait.

        Args:
            ops: per op, its number, its tier, and for how many seconds the request waits for the tier.

        Returns:
            The tiers for which the request did not wait before.
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
        """Records that the request continues without pages of these tiers, and the reason. The record lasts until the
        request's wait is dropped."""
        self.waits.setdefault(request_id, Wait()).skipped.update(dict.fromkeys(tiers, reason))

    def skipped(self, request_id: str) -> Mapping[TierId, MissReason]:
        """Returns, by tier, why the request continues without the tier's pages."""
        wait = self.waits.get(request_id)
        return {} if wait is None else wait.skipped

    def probe_of(self, request_id: str, tier: TierId, tail: bool) -> OpId | None:
        """Returns the op number of the question that was sent to the tier for the request; None if none was sent.

        Args:
            tail: whether the question was for the request's tail rather than for whole blocks.
        """
        wait = self.waits.get(request_id)
        return None if wait is None else wait.probed.get((tier, tail))

    def probed(self, request_id: str, tier: TierId, tail: bool, op_id: OpId) -> None:
        """Records the op number of the question that was sent to the tier for the request."""
        self.waits.setdefault(request_id, Wait()).probed[tier, tail] = op_id

    def hold(self, request_id: str, pages: HeldPages) -> None:
        """Records pages that the caller has pinned once for the request. They stay pinned until `take_held`."""
        if len(pages.entries):
            self.waits.setdefault(request_id, Wait()).held.append(pages)

    def held_by(self, request_id: str) -> Sequence[HeldPages] | None:
        """Returns the pages held for the request; None while it waits for an op, or while it is prefetched and no
        lookup has asked for it."""
        wait = self.waits.get(request_id)
        if wait is None:
            return ()
        return None if wait.ops or request_id in self.prefetched else wait.held

    def held_pages(self, request_id: str) -> int:
        wait = self.waits.get(request_id)
        return 0 if wait is None else sum(len(held.entries) for held in wait.held)

    def take_held(self, request_id: str) -> Sequence[HeldPages]:
        """Removes and returns the pages held for the request; the caller must unpin them."""
        wait = self.waits.get(request_id)
        if wait is None:
            return ()
        held, wait.held = wait.held, []
        return held

    def held(self) -> Iterator[HeldPages]:
        """Iterates over the pages held for any request."""
        return (held for wait in self.waits.values() for held in wait.held)

    def is_waiting(self, request_id: str, now_s: float) -> bool:
        """Whether the request waits for ops since its last lookup, and its time to wait is not over. O(1)."""
        wait = self.waits.get(request_id)
        if wait is None or not wait.ops or now_s > wait.ends_s:
            return False
        return request_id not in self.prefetched

    def awaited(self, request_id: str) -> int:
        """Number of fetches and questions in flight for which the request waits, even if its time to wait is over."""
        wait = self.waits.get(request_id)
        return 0 if wait is None else len(wait.ops)

    def begin_prefetch(self, request_id: str, ready_end: int) -> None:
        """Marks the request as prefetched: its wait begins before its first lookup. `ready_end`: see
        `begins_to_wait`."""
        self.prefetched.add(request_id)
        self.begins_to_wait(request_id, ready_end)

    def end_prefetch(self, request_id: str) -> list[OpId]:
        """Ends the request's prefetch, because a lookup now asks for the request. Removes and returns the ops of the
        request's wait. The time to wait begins anew with the next op. Held pages stay held."""
        self.prefetched.discard(request_id)
        wait = self.waits[request_id]
        ops = list(wait.ops)
        wait.ops.clear()
        wait.since_s.clear()
        return ops

    def prefetched_pages(self) -> int:
        """Number of pages held for all prefetched requests."""
        return sum(
            len(held.entries) for request_id in self.prefetched for held in self.waits[request_id].held
        )

    def probe_ended(self, request_id: str, op_id: OpId) -> None:
        """Removes from the request's wait a question that has ended."""
        if (wait := self.waits.get(request_id)) is not None:
            wait.ops.pop(op_id, None)

    def fetch_ended(self, request_id: str, op_id: OpId, pages: int) -> None:
        """Removes from the request's wait a fetch that has ended and brought `pages` pages, and counts these pages."""
        wait = self.waits.get(request_id)
        if wait is not None and (tier := wait.ops.pop(op_id, None)) is not None:
            wait.fetched[tier] = wait.fetched.get(tier, 0) + pages

    def begins_to_wait(self, request_id: str, ready_end: int) -> None:
        """Records that the request's blocks before `ready_end` are in host memory and that it waits for later blocks.
        Only the first call for a wait has an effect.
        """
        wait = self.waits.get(request_id)
        if wait is not None and wait.ready_end is None:
            wait.ready_end = ready_end

    def fetched_for(self, request_id: str, start: int, end: int) -> dict[TierId, int]:
        """Returns how many of the request's blocks in [start, end) were fetched for it, by tier."""
        wait = self.waits.get(request_id)
        if wait is None or wait.ready_end is None or not wait.fetched:
            return {}
        return self.fetched_pages(request_id, max(0, end - max(start, wait.ready_end)))

    def fetched_pages(self, request_id: str, most: int) -> dict[TierId, int]:
        """Returns how many pages were fetched to host memory for the request, by tier. A page may have been fetched
        twice, so the sum over all tiers is limited to `most`."""
        wait = self.waits.get(request_id)
        left, found = most, {}
        for tier, pages in wait.fetched.items() if wait is not None else ():
            found[tier] = min(pages, left)
            left -= found[tier]
        return found

    def drop_wait(self, request_id: str) -> Wait | None:
        """Removes and returns the request's wait; None if it has none. Precondition: no pages are held for it."""
        self.prefetched.discard(request_id)
        return self.waits.pop(request_id, None)

    def waiting_before(self, ends_s: float) -> list[str]:
        """Returns the requests whose time to wait (`Wait.ends_s`) was over before `ends_s`."""
        return [request_id for request_id, wait in self.waits.items() if wait.ends_s < ends_s]

    def recount(self, in_flight: set[OpId]) -> None:
        """Recounts the leased pages, and removes from all waits the ops that are not `in_flight`. Called after a call
        was interrupted.
        """
        self.reserved_pages = sum(lease.pages for lease in self.leases())
        for wait in self.waits.values():
            wait.ops = {op_id: tier for op_id, tier in wait.ops.items() if op_id in in_flight}

    def check_integrity(self) -> None:
        """Checks the records.

        Raises:
            ContractError: `reserved_pages` is not the number of leased pages, or a prefetched request has no wait.
        """
        if strange := self.prefetched - set(self.waits):
            raise ContractError(f"requests {sorted(strange)} were prefetched and wait for nothing")
        pages = sum(lease.pages for lease in self.leases())
        if pages != self.reserved_pages:
            raise ContractError(f"{self.reserved_pages} pages are counted as reserved, not {pages}")
