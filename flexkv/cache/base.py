"""The control plane's contracts: what an adapter may ask of a cache manager, and what it gets.

One manager serves one ownership unit. It is driven by a single thread (the engine's scheduler), never blocks but in a
`reset` with tiers that outlive the process, and never touches a byte of KV: it hands out transfer graphs and is told
how their ops ended.
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
from flexkv.observe import MissReason, PageLoss
from flexkv.transfer.graph import BlockIds, OpId, OpResult, SlotIds, TransferGraph

TierId = NewType("TierId", int)
"""Place of a tier in the order in which a lookup asks them."""

HUB = TierId(0)
"""Host memory, which every other tier reads into and is written from."""

EntryIds = NDArray[np.uint32]
"""Entries of a tier's native block index, each pinned once for every lease or op that names it."""

NO_ENTRIES: EntryIds = np.empty(0, np.uint32)

NO_ENTRY = np.uint32(0xFFFFFFFF)
"""In place of an entry: the index does not know the key."""

MOST_BLOCKS = 2**31
"""Most pages of one request: an engine numbers its blocks with 32 bits, and no request has more than all of them."""

NO_BLOCK = -1
"""In place of an engine block: the engine keeps no page there."""


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """One KV group of the unit.

    Attributes:
        block_tokens: tokens a block.
        slots: host slots of this group's pool once all of it is up.
        reach: of a WINDOW in pages, of a CHUNK in tokens; 0 for the other rules.
        shares: number of a group before it whose slots this one shares, and then has as many: groups whose pages have
            one size, of which whichever is used least is evicted first. None for slots of its own.
    """

    block_tokens: int
    slots: int
    rule: Rule = Rule.FULL
    reach: int = 0
    shares: int | None = None


def sharing(specs: Sequence[GroupSpec]) -> list[int]:
    """Of each group the one whose slots it shares, itself where it has its own."""
    return [number if spec.shares is None else spec.shares for number, spec in enumerate(specs)]


@dataclass(frozen=True, slots=True)
class ManagerLimits:
    """Bounds of one manager; every queue and wait has one.

    Attributes:
        ranks: workers that must report each op before it counts as ended.
        inflight_store_pages: stores beyond this many pages in flight are dropped and counted (BUSY).
        inflight_load_pages: promises beyond this many reserved pages are cut to what fits.
        lease_s: a lookup's lease expires after this long without a load.
        rest_s: after a load that did not bring pages which are still there, nothing is promised to any request for so
            long, but to those that have a promise already. For an engine that ends a request whose load fails; 0 for
            one that computes what did not come.
        prefetch_requests: requests that are prefetched and not looked up yet, at most; 0 for none.
        asks_again: the engine asks again for a request whose lookup ends in ASK_AGAIN, or ends it. False: no lookup
            ends so, and what finds no room at once is left to the engine.
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
        base_block: number of the block that the candidates would fill (whole blocks before it).
    """

    keys: Keys
    tokens: NDArray[np.int32]
    base_block: int


class Outcome(Enum):
    """What a lookup came to."""

    HIT = "hit"
    """Something is promised, and nothing more will come."""
    MISS = "miss"
    """Nothing is promised, and nothing will come. `MatchResult.miss` says why."""
    COMING = "coming"
    """Fetches or answers that would make the match longer are under way. The caller asks again when `waits` says so, or
    takes what is promised."""
    ASK_AGAIN = "ask again"
    """Nothing is promised or kept, because fetches that would make the match longer find no room in host memory until
    others have ended. The caller asks again with its next step, by `still_waits` first; only with
    `ManagerLimits.asks_again`."""


class GroupMatch(NamedTuple):
    """What one group can restore after `MatchResult.start_tokens`. Blocks are the group's own.

    Attributes:
        blocks: whole blocks restorable after the start.
        slots: their host slots, in order, int32 [blocks]; fewer where the last blocks are loaded from where they lie.
        tail_tokens: tokens of a partial tail block that follows the last matched (or local) block; 0 for none.
        tail_slot: host slot of that tail, or -1.
        first_block: number in the request of the block in `slots[0]`: the first after the start for a FULL group; later
            for the other rules, which need only the last blocks (their `slots` are as many as they need).
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
        start_tokens: that the engine has itself.
        groups: one entry per group of the manager.
        tokens: that follow these and every group can restore (the length an adapter may promise): whole blocks.
        tail_tokens: partial-tail tokens that every group can restore after those.
        outcome: what the caller does next.
        miss: why no more than this is promised; None where all that was asked for is, or may still come.
        reads: fetches and answers to wait for.
        by_tier: for each tier of the manager, by its number, how many of `tokens` it has supplied: those that were
            fetched for the request count for the tier that they came from. Empty where nothing is promised.
        shared_tokens: where groups need other pages each, tokens from the request's start up to which those of full
            attention have all of theirs: so far other requests were the same. A hit could end there if the other groups
            had what it needs. 0 where every group restores whole prefixes.
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
        """Whether asking again would bring nothing more."""
        return self.outcome is Outcome.HIT or self.outcome is Outcome.MISS


@dataclass(frozen=True, slots=True)
class StorePlan:
    """What `begin_store` decided.

    Attributes:
        graph: None when nothing needs to move.
        stored: positions (into the blocks offered) that the graph stores, int32: those of its first op, ascending, then
            those of the next.
        known: blocks that were stored or in flight already.
        dropped: blocks that found no slot or no queue entry (BUSY); the caller may offer them again later.
        accepted: where blocks were dropped, so many leading blocks of the offer at least were not: they need not be
            offered again.
    """

    graph: TransferGraph | None
    stored: NDArray[np.int32]
    known: int
    dropped: int
    accepted: int = 0

    def joined(self, other: StorePlan) -> StorePlan:
        """One plan for two parts of an offer."""
        ops = tuple(op for plan in (self, other) if plan.graph is not None for op in plan.graph.ops)
        return StorePlan(
            TransferGraph(ops) if ops else None,
            np.concatenate((self.stored, other.stored)),
            self.known + other.known,
            self.dropped + other.dropped,
        )


class OpRole(Enum):
    """What an op is for."""

    LOAD = "load"
    """From a tier to engine blocks, on every rank."""
    STORE = "store"
    """From engine blocks to a tier, on every rank."""
    FETCH = "fetch"
    """From a tier to host slots."""
    WRITE = "write"
    """From host slots to a tier."""
    PROBE = "probe"
    """Asks a tier what it has."""
    SEAL = "seal"
    """Makes pages of a store exist that lies in a tier already."""

    # Members are compared by identity. Enum's own hash is a call of Python at each look into a table by role.
    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class Completion:
    """An op's end over all ranks. The engine blocks it leased may be reused from now on.

    Attributes:
        blocks: the engine blocks of the op (all of its pages).
        failed_blocks: for a load, the engine blocks that hold no valid KV; for a store, blocks not published.
        published: for a store, the positions of the op's pages that became visible, or do when they have been sealed.
        loss: for a store that a rank never began, why.
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
    """Is told which keys appear in the host tier and which leave it, in order. Does nothing by itself."""

    def on_publish(self, group: int, keys: Keys) -> None:
        """These blocks became visible."""

    def on_evict(self, group: int, keys: Keys) -> None:
        """These blocks were visible and are not any more: evicted, forgotten or found bad."""

    def on_reset(self, epoch: int) -> None:
        """Every block left; `epoch` has begun."""


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
    ) -> MatchResult:
        """Looks up the longest restorable prefix after `start_tokens` and leases it for `request_id`.

        Asking again replaces the former lease. A hit is only what is in host memory, published and verified. What other
        tiers have besides is being fetched when this returns, and the answer says so (COMING). Of tiers that stream
        (`TierFacts.streams`) whole blocks on their way are promised too: their load waits for each page, and fails
        those that do not come or do not verify. Of tiers with straight loads they are promised where they lie. Where
        host memory has no room for all that would be fetched, the request may have to wait for it (ASK_AGAIN); what
        is larger than host memory is fetched as far as there is room.

        What a load of the request did not bring is not promised to it again by the same way, and after two failed loads
        nothing is, until `end_request`. With `ManagerLimits.rest_s` others are promised nothing either for a while.

        Args:
            keys: per group, keys of all whole blocks of the request from its first token on.
            start_tokens: that the engine has itself: whole blocks of every group.
            tail: per group, partial-tail candidates: only those whose `base_block` equals the end of the match count.
                None where groups have other rules than FULL or blocks of other sizes.

        Raises:
            ContractError: not one element a group, a start within a block, or a tail where there may be none.
            BlockRangeError: a negative start.
        """

    @abstractmethod
    def prefetch(self, request_id: str, keys: Sequence[Keys], start_tokens: int = 0) -> int:
        """Begins to fetch what other tiers have of a request that no lookup has asked for yet. Promises nothing.

        For requests that wait in the engine's queue. What is fetched is kept for the request's first `match`, which
        waits for what has not come yet: its time to wait begins there. It ends with `release`, and some time after
        `TierFacts.wait_s` by `expire`. Prefetched requests together are kept a share of host memory at most, and their
        fetches leave room for those of lookups; what does not fit is fetched by the first `match`.

        Args:
            start_tokens: whole blocks that the engine has itself, as far as is known.

        Returns:
            Fetches under way for it; 0 where there is nothing to bring or no room.
        """

    @abstractmethod
    def begin_load(
        self, request_id: str, blocks: Sequence[BlockIds], tail: bool = False
    ) -> TransferGraph | None:
        """Turns the first `len(blocks[g])` matched blocks into a load to those engine blocks and ends the lookup lease.

        With `tail`, the last engine block of each group takes the matched partial tail, after all the matched blocks.
        The engine may take fewer blocks than were promised (of a group whose rule is not FULL: all or none); the
        rest is released, and so is what has NO_BLOCK for an engine block. None when there is nothing to load. Never
        BUSY.

        Raises:
            ContractError: the request has no lease, or asks for more than it was promised.
        """

    @abstractmethod
    def waits(self, request_id: str) -> bool:
        """Whether the request's last match began reads that have not ended, and not for too long. O(1)."""

    @abstractmethod
    def still_waits(self, request_id: str) -> bool:
        """Notes that the engine asks for a request again; whether `match` would find that it has to wait yet: for
        reads, as `waits` says, or for room. O(1).

        Room for fetches goes to whole prompts, in the order in which they first asked, and a request that waits for it
        has none. It waits `TierFacts.wait_s` at most, as far as the engine asks for it meanwhile, then goes on without.
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
    ) -> StorePlan:
        """Plans a store of `keys[i]` from engine block `blocks[i]`; block i is number `first_block + i` of the request.

        Keys that are stored or in flight are skipped, so nothing is stored twice. Never blocks, never evicts a leased
        slot. The engine blocks stay pinned by the caller until the op's `Completion`.

        Args:
            tokens: valid tokens in each of the blocks; None for whole blocks.
            spare: of use only to requests that part from this one here. Such blocks have a share of host memory, and
                leave it first where they are more, until a request hits them or one offers them without it.

        Raises:
            ContractError: `keys` and `blocks` differ in length, or a block has no such number of valid tokens.
            BlockRangeError: no such group, or a block of the engine or of the request outside [0, MOST_BLOCKS).
            KeySchemeError: `keys` is no C-contiguous uint8 array of shape [blocks, KEY_BYTES].
        """

    @abstractmethod
    def known(self, group: int, keys: Keys) -> NDArray[np.bool_]:
        """Which of these blocks are in one of the unit's tiers or on their way there, as far as is known here. Nothing
        is leased, and no block counts as used."""

    @abstractmethod
    def complete(self, rank: int, result: OpResult) -> Completion | None:
        """Takes one rank's terminal result of an op; returns the Completion once every rank has reported.

        Store: pages that ended OK on every rank, of the current epoch and not discarded, become visible; other slots
        are freed. Load: pages that failed on any rank are forgotten, so that the next lookup misses them (not those of
        a cancelled load: nothing is wrong with them). From the first rank's report of a failed load on, the request's
        in-flight stores from the first failed block on are revoked as by `discard_from`; a store that ends while an
        earlier load of its request is in flight is not published. A load that was planned before a `reset` ends with
        all of its blocks failed: they hold KV of the old weights.

        Raises:
            ContractError: unknown op, unknown rank, or a second report of the same rank.
        """

    @abstractmethod
    def discard_from(self, request_id: str, first_token: int) -> int:
        """Bars the request's stores in flight, of pages with tokens from `first_token` on, from being published.

        For blocks that were computed from a failed load's target; also those of requests that shared the target's
        engine blocks. The keys may be stored again at once. Returns how many pages were revoked.
        """

    @abstractmethod
    def release(self, request_id: str) -> None:
        """Ends the request's lookup lease, if any. Ops in flight are not touched. Idempotent.

        The request's blocks then count as used together, so that of them the one farthest from the start is evicted
        first.
        """

    @abstractmethod
    def abandon_loads(self, request_id: str) -> None:
        """Nobody waits for the request's loads in flight: that they fail is not held against them, and no warning.

        For loads that the engine has taken back, or that no rank was given. They end by `complete` all the same.
        """

    @abstractmethod
    def end_request(self, request_id: str) -> None:
        """The request has ended: `release`, `abandon_loads`, and its failed loads are forgotten. Idempotent."""

    @abstractmethod
    def forget(self, group: int, keys: Keys) -> int:
        """Makes these keys misses; leased slots are freed when their last lease ends. Returns how many were known."""

    @abstractmethod
    def reset(self) -> int:
        """New weights: every entry becomes a miss, in-flight stores will not be published. Returns the new epoch.

        It waits until nothing older is served from any tier, not even after a crash.

        Lookup leases end too: a promise that was not turned into a load before cannot be kept.
        """

    @abstractmethod
    def disable(self) -> None:
        """From now on lookups are misses and nothing is stored; what is promised or under way ends as before."""

    @abstractmethod
    def grow(self, group: int, slots: int) -> None:
        """The first `slots` slots of the group's host pool are up and may be used. Never shrinks."""

    @abstractmethod
    def expire(self) -> int:
        """Ends lookup leases older than `ManagerLimits.lease_s`; returns how many."""

    @abstractmethod
    def inflight_ops(self) -> int:
        """Ops that have been planned and have not ended on every rank."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Checks every invariant of index, pools, leases and ops.

        Raises:
            ContractError: an invariant is broken; the message names it.
        """
