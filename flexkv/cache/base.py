"""The control plane's contracts: what an adapter may ask of a cache manager, and what the manager returns.

One manager serves one ownership unit. A single thread drives it (the engine's scheduler). It never blocks, except in a
`reset` with tiers that outlive the process. It never touches a byte of KV: it plans transfer graphs, and its caller
reports how their ops ended.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, NewType

import numpy as np
from numpy.typing import NDArray

from flexkv.facts.keys import Keys, Rule
from flexkv.facts.request_settings import NO_SETTINGS, RequestSettings
from flexkv.observe import MissReason, PageLoss
from flexkv.transfer.graph import BlockIds, OpId, OpResult, SlotIds, TransferGraph

TierId = NewType("TierId", int)
"""Index of a tier in the order in which a lookup asks the tiers."""

HUB = TierId(0)
"""Host memory: every other tier reads into it and is written from it."""

EntryIds = NDArray[np.uint32]
"""Entries of a tier's native block index, each pinned once for every lease or op that names it."""

NO_ENTRIES: EntryIds = np.empty(0, np.uint32)

NO_ENTRY = np.uint32(0xFFFFFFFF)
"""Stands for a missing entry: the index does not know the key."""

MOST_BLOCKS = 2**31
"""Most pages of one request: an engine numbers its blocks with 32 bits, and no request has more blocks than the
engine."""

NO_BLOCK = -1
"""Stands for a missing engine block: the engine keeps no page there."""


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """One KV group of the unit.

    Attributes:
        block_tokens: tokens per block.
        slots: host slots of this group's pool once the whole pool is usable.
        reach: for a WINDOW in pages, for a CHUNK in tokens; 0 for the other rules.
        shares: number of an earlier group whose slots this one shares, with the same `slots`; their pages have the same
            size, and one eviction order covers both. None for slots of its own.
    """

    block_tokens: int
    slots: int
    rule: Rule = Rule.FULL
    reach: int = 0
    shares: int | None = None


def sharing(specs: Sequence[GroupSpec]) -> list[int]:
    """For each group, the number of the group that owns its slots: its own, unless it shares another's."""
    return [number if spec.shares is None else spec.shares for number, spec in enumerate(specs)]


@dataclass(frozen=True, slots=True)
class ManagerLimits:
    """Bounds of one manager; every queue and wait has one.

    Attributes:
        ranks: workers that must report each op before it counts as ended.
        inflight_store_pages: stores beyond this many pages in flight are dropped and counted (BUSY).
        inflight_load_pages: promises beyond this many reserved pages are cut to what fits.
        lease_s: a lookup's lease expires after this long without a load.
        rest_s: after a load that did not bring pages which are still in their tier, new requests are promised nothing
            for this long; those with a promise keep it. For an engine that ends a request whose load fails; 0 for one
            that computes the missing pages.
        prefetch_requests: most requests that are prefetched and not looked up yet; 0 for none.
        asks_again: the engine asks again for a request whose lookup returns ASK_AGAIN, or ends the request. If False,
            no lookup returns it, and the engine computes the pages that find no room at once.
    """

    ranks: int = 1
    inflight_store_pages: int = 65_536
    inflight_load_pages: int = 65_536
    lease_s: float = 60.0
    rest_s: float = 0.0
    prefetch_requests: int = 16
    asks_again: bool = False


@dataclass(frozen=True, slots=True)
class TailCandidates:
    """Keys under which the tokens after the last whole block may be stored.

    Attributes:
        keys: shape [candidates, KEY_BYTES].
        tokens: valid tokens of each candidate, int32, each in [1, block_tokens), no two alike.
        base_block: number of the block that the candidates would fill, which is the number of whole blocks before it.
    """

    keys: Keys
    tokens: NDArray[np.int32]
    base_block: int


class Outcome(Enum):
    """The result of a lookup."""

    HIT = "hit"
    """Tokens are promised, and nothing more will come."""
    MISS = "miss"
    """Nothing is promised, and nothing will come. `MatchResult.miss` says why."""
    COMING = "coming"
    """Fetches or answers that would make the match longer are under way. The caller asks again once `waits` returns
    False, or uses the promise as it is."""
    ASK_AGAIN = "ask again"
    """Nothing is promised or kept, because the fetches that would make the match longer find no room in host memory
    until others have ended. The caller asks again in its next step, calling `still_waits` first. Only with
    `ManagerLimits.asks_again`."""


class GroupMatch(NamedTuple):
    """The pages that one group can restore after `MatchResult.start_tokens`, in the group's own blocks.

    Attributes:
        blocks: whole blocks restorable after the start.
        slots: their host slots, in order, int32 [blocks]; fewer if the last blocks are loaded straight from another
            tier.
        tail_tokens: tokens of a partial tail block that follows the last matched (or local) block; 0 for none.
        tail_slot: host slot of that tail, or -1.
        first_block: number within the request of the block in `slots[0]`. For a FULL group this is the first block
            after the start. The other rules need only the last blocks, so it is later, and `slots` has only the blocks
            that they need.
    """

    blocks: int
    slots: SlotIds
    tail_tokens: int = 0
    tail_slot: int = -1
    first_block: int = 0


class MatchResult(NamedTuple):
    """The answer to a lookup. All named slots are leased under `request_id` until they are loaded or released.

    ```
    0         start_tokens            + tokens         + tail_tokens        asked for
    |  engine's  |  whole blocks, promised  |  partial tail  |  not promised: `miss`  |
    ```

    Attributes:
        start_tokens: tokens that the engine has itself.
        groups: one entry per group of the manager.
        tokens: tokens after those that every group can restore, in whole blocks: the length that an adapter may
            promise.
        tail_tokens: tokens of the partial tail that every group can restore after those.
        outcome: tells the caller what to do next.
        miss: why no more is promised; None if everything asked for is promised or may still come.
        reads: number of fetches and of tiers' answers to wait for.
        by_tier: by tier number, how many of `tokens` the tier has supplied. Tokens that were fetched for the request
            count for the tier that they came from. Empty if nothing is promised.
        shared_tokens: if groups need different pages, the tokens from the request's start for which the groups of full
            attention have every page, so earlier requests began with these tokens. A hit could end there if the other
            groups had the pages for it. 0 if every group restores whole prefixes.
    """

    request_id: str
    start_tokens: int
    groups: tuple[GroupMatch, ...]
    tokens: int
    tail_tokens: int
    outcome: Outcome
    miss: MissReason | None
    reads: int = 0
    by_tier: tuple[int, ...] = ()
    shared_tokens: int = 0

    @property
    def blocks(self) -> int:
        """`tokens` in blocks of the first group."""
        return self.groups[0].blocks

    @property
    def is_final(self) -> bool:
        """Whether asking again would not bring more."""
        return self.outcome is Outcome.HIT or self.outcome is Outcome.MISS


def of_first_tokens(by_tier: Sequence[int], tokens: int) -> list[int]:
    """How many of a promise's first `tokens` each tier has supplied; host memory's come first.

    Args:
        by_tier: see `MatchResult`.
    """
    taken = []
    for supplied in by_tier:
        taken.append(min(supplied, tokens))
        tokens -= taken[-1]
    return taken


@dataclass(frozen=True, slots=True)
class StorePlan:
    """What `begin_store` decided.

    Attributes:
        graph: the transfers to run; None when nothing needs to move.
        stored: positions in the offer of the blocks that the graph stores, int32: those of its first op, ascending,
            then those of the next op.
        known: blocks that were stored or in flight already, or that a peer keeps.
        dropped: blocks that found no slot or no queue entry (BUSY); the caller may offer them again later.
        accepted: if blocks were dropped, a lower bound on the number of leading blocks of the offer that were not.
            These need not be offered again.
    """

    graph: TransferGraph | None
    stored: NDArray[np.int32]
    known: int
    dropped: int
    accepted: int = 0

    def joined(self, other: StorePlan) -> StorePlan:
        """The plan for two parts of an offer together; `accepted` is 0."""
        ops = tuple(op for plan in (self, other) if plan.graph is not None for op in plan.graph.ops)
        return StorePlan(
            TransferGraph(ops) if ops else None,
            np.concatenate((self.stored, other.stored)),
            self.known + other.known,
            self.dropped + other.dropped,
        )


class OpRole(Enum):
    """The purpose of an op."""

    LOAD = "load"
    """From a tier to engine blocks, on every rank."""
    STORE = "store"
    """From engine blocks to a tier, on every rank."""
    FETCH = "fetch"
    """From a tier to host slots."""
    WRITE = "write"
    """From host slots to a tier."""
    PROBE = "probe"
    """A question to a tier: which pages it has."""
    SEAL = "seal"
    """Makes pages visible whose bytes a store has already put in a tier."""

    # Members are compared by identity. Enum's own hash would be a Python call at each lookup in a table keyed by role.
    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class Completion:
    """An op's end over all ranks. The engine blocks it leased may be reused from now on.

    Attributes:
        blocks: the engine blocks of all pages of the op.
        failed_blocks: for a load, the engine blocks that hold no valid KV; for a store, blocks not published.
        published: for a store, the positions of the op's pages that became visible, or will when they have been sealed.
        loss: why a rank never began this store; None otherwise.
    """

    op_id: OpId
    request_id: str
    role: OpRole
    group: int
    blocks: BlockIds
    failed_blocks: BlockIds
    published: NDArray[np.int32]
    reason: str = ""
    loss: PageLoss | None = None


class CacheListener:
    """Base class of listeners, whose methods a manager calls in order as keys appear in host memory and on the unit's
    own disks, and leave them. The methods here do nothing."""

    def on_publish(self, group: int, keys: Keys) -> None:
        """These blocks became visible."""

    def on_evict(self, group: int, keys: Keys) -> None:
        """These blocks are no longer visible: they were evicted, forgotten or found bad."""

    def on_write(self, group: int, keys: Keys, generations: NDArray[np.uint64]) -> None:
        """These blocks became visible on the unit's own disks; `generations` [keys] are those of their pages."""

    def on_unwrite(self, group: int, keys: Keys) -> None:
        """These blocks are no longer visible there."""

    def on_erase(self, name: str) -> None:
        """The pages of this namespace were forgotten; `on_evict` and `on_unwrite` have named them."""

    def on_reset(self, epoch: int) -> None:
        """Every block left host memory and the disks; `epoch` has begun."""


class CacheManager(ABC):
    """The control plane of one ownership unit.

    A `match`, `prefetch`, `begin_load` or `begin_store` that raises leaves nothing planned or leased.
    """

    @abstractmethod
    def match(
        self,
        request_id: str,
        keys: Sequence[Keys],
        start_tokens: int,
        tail: Sequence[TailCandidates | None] | None = None,
        settings: RequestSettings = NO_SETTINGS,
    ) -> MatchResult:
        """Looks up the longest restorable prefix after `start_tokens`, leases it for `request_id`, and begins to fetch
        the pages that other tiers have beyond it.

        Asking again replaces the former lease. Only pages in host memory, published and verified, are promised, with
        two exceptions. From tiers that stream (`TierFacts.streams`), whole blocks on their way are promised too: their
        load waits for each page, and fails those that do not come or do not verify. From tiers with straight loads,
        whole blocks are promised without being fetched. All other pages that tiers have are being fetched when this
        returns, and the outcome says so (COMING). If host memory has no room for all of them, the request may have to
        wait for it (ASK_AGAIN). A prefix larger than host memory is fetched as far as there is room.

        Pages that a load of the request did not bring are not promised to it again by the same route, and after two
        failed loads nothing is promised to it until `end_request`. With `ManagerLimits.rest_s`, other requests are
        promised nothing for a while either.

        Args:
            keys: per group, keys of all whole blocks of the request from its first token on.
            start_tokens: tokens that the engine has itself: whole blocks of every group.
            tail: per group, partial-tail candidates; only those count whose `base_block` equals the end of the match.
                None if a group's rule is not FULL or the groups' blocks differ in size.
            settings: the settings that the caller gave with the request; they bound the promise and the tiers that are
                read.

        Raises:
            ContractError: not one element per group, a start within a block, or a tail where there may be none.
            BlockRangeError: a negative start.
        """

    @abstractmethod
    def prefetch(
        self,
        request_id: str,
        keys: Sequence[Keys],
        start_tokens: int = 0,
        settings: RequestSettings = NO_SETTINGS,
    ) -> int:
        """Begins to fetch other tiers' pages of a request that has not been looked up yet. Promises nothing.

        For requests that wait in the engine's queue. The pages are kept for the request's first `match`, which waits
        for those that have not arrived yet; the time to wait begins there. `release` ends the prefetch, and `expire`
        does some time after `TierFacts.wait_s`. Prefetched requests together keep at most a share of host memory, and
        their fetches leave room for those of lookups. The first `match` fetches pages that did not fit.

        Call order:
            Before the request's first `match`. For a request with a lease or a wait it does nothing.

        Args:
            start_tokens: tokens that the engine has itself, as far as is known: whole blocks of every group.

        Returns:
            Number of fetches under way for it; 0 if there is nothing to fetch or no room.
        """

    @abstractmethod
    def begin_load(
        self, request_id: str, blocks: Sequence[BlockIds], tail: bool = False
    ) -> TransferGraph | None:
        """Plans a load of the first `len(blocks[g])` matched blocks of each group to those engine blocks, and ends the
        lookup lease.

        With `tail`, the last engine block of each group takes the matched partial tail, after all the matched blocks.
        The engine may take fewer blocks than were promised (for a group whose rule is not FULL: all or none). The rest
        is released, as are pages whose engine block is NO_BLOCK. Never BUSY.

        Call order:
            After the `match` that promised the blocks, before `release`, `reset` or the lease's expiry.

        Returns:
            The graph that every rank has to run; None when there is nothing to load.

        Raises:
            ContractError: the request has no lease, or asks for more than it was promised.
        """

    @abstractmethod
    def waits(self, request_id: str) -> bool:
        """Whether the request's last match waits for reads that have not ended, and its time to wait is not over.
        O(1)."""

    @abstractmethod
    def leased_pages(self, request_id: str) -> int:
        """Number of pages that the request's lookup lease holds."""

    @abstractmethod
    def still_waits(self, request_id: str) -> bool:
        """Records that the engine asks for a request again, and returns whether `match` would find that it must still
        wait: for reads, as `waits` says, or for room. O(1).

        Room for fetches goes to whole prompts, in the order in which they first asked, and a request that waits for
        room holds none. It waits at most `TierFacts.wait_s`, counting only time in which the engine asks for it, and
        then continues without these pages.
        """

    @abstractmethod
    def begin_store(
        self,
        request_id: str,
        group: int,
        keys: Keys,
        blocks: BlockIds,
        first_block: int,
        tokens: int | None = None,
        spare: bool = False,
        ttl_s: int | None = None,
    ) -> StorePlan:
        """Plans a store of `keys[i]` from engine block `blocks[i]`; block i is number `first_block + i` of the request.

        Keys that are stored or in flight are skipped, so nothing is stored twice. Never blocks, never evicts a leased
        slot.

        Preconditions:
            The caller keeps the engine blocks pinned until the op's `Completion`.

        Args:
            tokens: valid tokens in each of the blocks; None for whole blocks.
            spare: the blocks are of use only to requests that diverge from this one here. Such blocks have a share of
                host memory; beyond it they are evicted first, until a request hits them or offers them without `spare`.
            ttl_s: whole seconds after which the pages that this call stores are misses in every tier; None for never.
                Blocks that are cached already keep the time with which they were stored.

        Raises:
            ContractError: `keys` and `blocks` differ in length, or a block has no such number of valid tokens.
            BlockRangeError: no such group, or a block of the engine or of the request outside [0, MOST_BLOCKS).
            KeySchemeError: `keys` is not a C-contiguous uint8 array of shape [blocks, KEY_BYTES].
        """

    @abstractmethod
    def known(self, group: int, keys: Keys) -> NDArray[np.bool_]:
        """Which of these blocks are in one of the unit's tiers or on their way there, or left to a peer that keeps
        them, as far as is known here, bool [keys]. Leases nothing, and counts no block as used."""

    @abstractmethod
    def complete(self, rank: int, result: OpResult) -> Completion | None:
        """Records one rank's terminal result of an op; with the last rank's, ends the op and returns its Completion.

        Store: pages of the current epoch that ended OK on every rank and were not discarded become visible; all other
        slots are freed. A store that ends while an earlier load of its request is in flight is not published.

        Load: pages that failed on any rank are forgotten, so that the next lookup misses them; those of a cancelled
        load are kept, because nothing is wrong with them. From the first rank's report of a failure on, the request's
        in-flight stores are revoked from the first failed block on, as by `discard_from`. A load that was planned
        before a `reset` ends with all of its blocks failed: they hold KV of the old weights.

        Call order:
            Once per rank and op, after the rank has stopped moving the op's bytes.

        Raises:
            ContractError: unknown op, unknown rank, or a second report of the same rank.
        """

    @abstractmethod
    def discard_from(self, request_id: str, first_token: int) -> int:
        """Keeps the request's stores in flight from publishing pages with tokens from `first_token` on; returns how
        many pages that are.

        For blocks that were computed from a failed load's target, also those of requests that shared the target's
        engine blocks. The keys may be stored again at once.
        """

    @abstractmethod
    def release(self, request_id: str) -> None:
        """Ends the request's lookup lease, wait and prefetch, if any. Ops in flight go on. Idempotent.

        It also marks the request's blocks as used together, so that the one farthest from the start is evicted first.
        """

    @abstractmethod
    def abandon_loads(self, request_id: str) -> None:
        """Marks the request's loads in flight as abandoned: a failure is neither counted against the request nor logged
        as a warning.

        For loads that the engine has taken back, or that were sent to no rank. They still have to end by `complete`.
        """

    @abstractmethod
    def end_request(self, request_id: str) -> None:
        """Ends the request: `release`, `abandon_loads`, and its failed loads are forgotten. Idempotent."""

    @abstractmethod
    def forget(self, group: int, keys: Keys) -> int:
        """Makes these keys misses in every tier; leased slots are freed when their last lease ends. Returns how many
        were known."""

    @abstractmethod
    def erase_namespace(self, name: str) -> int:
        """Forgets every page of the namespace with this name, in every tier; returns how many were known. One in 65,536
        other pages is forgotten too: see `named_mark`.
        """

    @abstractmethod
    def reset(self) -> int:
        """Makes every entry a miss and bars in-flight stores from being published, because the weights are new. Returns
        the new epoch.

        Waits until no tier serves anything older, not even after a crash.

        Lookup leases end too: a promise that was not turned into a load before cannot be kept.
        """

    @abstractmethod
    def disable(self) -> None:
        """Turns the cache off: from now on lookups are misses and nothing is stored. Promises and ops in flight end as
        before."""

    @abstractmethod
    def grow(self, group: int, slots: int) -> None:
        """Makes the first `slots` slots of the group's host pool usable. Never shrinks."""

    @abstractmethod
    def expire(self) -> int:
        """Ends lookup leases older than `ManagerLimits.lease_s`, and waits whose request is not looked up again;
        returns the number of leases. Also drops pages whose time to live is over."""

    @abstractmethod
    def inflight_ops(self) -> int:
        """Number of ops that were planned and have not ended on every rank."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Checks every invariant of index, pools, leases and ops.

        Raises:
            ContractError: an invariant is broken; the message names it.
        """
