"""The control plane's contracts: the calls that an adapter may make to a cache manager, and their results.

One manager serves one ownership unit. A single thread, the engine's scheduler, makes all calls. The manager never
blocks, with one exception: `reset` waits if pages of a tier outlive the process. The manager never touches a byte of
KV. It plans transfer graphs, and its caller reports the results of their ops.
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
"""The tier of host memory. Pages of every other tier are fetched into host memory and written from there."""

EntryIds = NDArray[np.uint32]
"""Numbers that identify entries of a tier's native block index, which maps keys to slots. Each lease or op pins each of
its entries once."""

NO_ENTRIES: EntryIds = np.empty(0, np.uint32)

NO_ENTRY = np.uint32(0xFFFFFFFF)
"""The index returns this number instead of an entry number for a key that has no entry."""

MOST_BLOCKS = 2**31
"""Maximum number of pages of one request: an engine numbers its blocks with signed 32-bit integers, and no request has
more blocks than the engine."""

NO_BLOCK = -1
"""Stands in a list of engine block numbers for a block of the request that the engine does not keep."""


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """One KV group of the unit.

    Attributes:
        block_tokens: tokens per block.
        slots: number of host slots in the group's pool when all of the pool is usable.
        reach: length of the window in pages or of the chunk in tokens; 0 for rules other than WINDOW and CHUNK.
        shares: index of an earlier group whose slots this group shares; None if it has its own. Groups that share slots
            have equal `slots`, pages of the same size and one eviction order.
    """

    block_tokens: int
    slots: int
    rule: Rule = Rule.FULL
    reach: int = 0
    shares: int | None = None


def sharing(specs: Sequence[GroupSpec]) -> list[int]:
    """Returns, for each group, the number of the group that owns its slots: itself, or the group in `shares`."""
    return [number if spec.shares is None else spec.shares for number, spec in enumerate(specs)]


@dataclass(frozen=True, slots=True)
class ManagerLimits:
    """Bounds of one manager.

    Attributes:
        ranks: number of ranks that must report an op before the op counts as ended.
        inflight_store_pages: maximum number of pages in stores in flight; further pages are dropped and counted.
        inflight_load_pages: maximum number of pages that are promised or being loaded; a promise that would exceed it
            is shortened.
        lease_s: seconds after which a lookup's lease expires if no load has begun.
        rest_s: if a load fails although its pages are still in their tier, new requests get no promises for this many
            seconds. Requests that already have a promise keep it. Above 0 for engines that end a request whose load
            fails; 0 for engines that compute the missing pages.
        prefetch_requests: maximum number of requests that are prefetched and not looked up yet; 0 for no prefetches.
        asks_again: whether the engine looks a request up again, or ends it, after the lookup returned ASK_AGAIN. If
            False, no lookup returns ASK_AGAIN, and the engine computes pages for which no host slots are free.
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
    """Keys under which the tokens after the last whole block may be stored: one candidate per number of tokens.

    Attributes:
        keys: the key of each candidate, shape [candidates, KEY_BYTES].
        tokens: number of valid tokens of each candidate, int32, each in [1, block_tokens), all different.
        base_block: index of the partial block in the request: the number of whole blocks before it.
    """

    keys: Keys
    tokens: NDArray[np.int32]
    base_block: int


class Outcome(Enum):
    """The result of a lookup."""

    HIT = "hit"
    """Tokens are promised, and another lookup would not find more."""
    MISS = "miss"
    """No tokens are promised, and another lookup would not find any. `MatchResult.miss` says why."""
    COMING = "coming"
    """Fetches, or questions to tiers, that could make the match longer are in flight. The caller calls `match` again
    when `waits` returns False, or uses the promise as it is."""
    ASK_AGAIN = "ask again"
    """No tokens are promised and no pages are held: the fetches that would make the match longer need host slots that
    are free only after other ops or requests have ended. In its next step the caller calls `still_waits`, then `match`.
    Only with `ManagerLimits.asks_again`."""


class GroupMatch(NamedTuple):
    """The pages that one group can restore after `MatchResult.start_tokens`, in the group's own blocks.

    Attributes:
        blocks: number of whole blocks after the start that can be restored.
        slots: host slots of the blocks, in order, int32 [blocks]. If the last blocks are loaded straight from another
            tier, they have no host slot, and `slots` is shorter.
        tail_tokens: number of tokens in the partial tail after the last matched block; 0 without a tail.
        tail_slot: host slot of the partial tail; -1 without a tail.
        first_block: index in the request of the block in `slots[0]`. In a FULL group this is the first block after the
            start. With another rule it may be a later block, because `slots` has only the blocks that the rule needs.
    """

    blocks: int
    slots: SlotIds
    tail_tokens: int = 0
    tail_slot: int = -1
    first_block: int = 0


class MatchResult(NamedTuple):
    """The answer to a lookup. The slots in it are leased under `request_id` until they are loaded or released.

    ```
    0         start_tokens            + tokens         + tail_tokens        asked for
    |  engine's  |  whole blocks, promised  |  partial tail  |  not promised: `miss`  |
    ```

    Attributes:
        start_tokens: number of tokens before the match, which the engine has itself.
        groups: the match of each KV group.
        tokens: number of tokens after the start that all groups can restore in whole blocks; an adapter promises these.
        tail_tokens: number of tokens in the partial tail after the whole blocks, if all groups can restore it; else 0.
        outcome: the result of the lookup, which determines the caller's next step.
        miss: why no more tokens are promised; None if all are promised or more may come.
        reads: number of fetches, plus number of questions to tiers, for which the request waits.
        by_tier: number of promised tokens that each tier has supplied, by tier number. Tokens that were fetched for
            the request count for the tier from which they were fetched. Empty if no tokens are promised.
        shared_tokens: number of tokens from the request's start for which the FULL groups have all pages, because
            earlier requests began with the same tokens. A hit could end there if the other groups had the pages for
            it. 0 if all groups are FULL groups with blocks of one size.
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
        """Number of promised whole blocks, in blocks of the first group."""
        return self.groups[0].blocks

    @property
    def is_final(self) -> bool:
        """True if another lookup of the request would not find more."""
        return self.outcome is Outcome.HIT or self.outcome is Outcome.MISS


def of_first_tokens(by_tier: Sequence[int], tokens: int) -> list[int]:
    """Returns how many of a promise's first `tokens` tokens each tier has supplied. Assumes that the first tier
    supplied the first tokens of the promise, the next tier the tokens after them, and so on.

    Args:
        by_tier: number of the promise's tokens by tier; see `MatchResult`.
    """
    taken = []
    for supplied in by_tier:
        taken.append(min(supplied, tokens))
        tokens -= taken[-1]
    return taken


@dataclass(frozen=True, slots=True)
class StorePlan:
    """The result of `begin_store` for the offered blocks.

    Attributes:
        graph: the transfers to run; None if no block is stored.
        stored: indices of the offered blocks that the graph stores, int32, op by op and ascending within an op.
        known: number of blocks that are already stored or in flight, or that a peer keeps.
        dropped: number of blocks that got no slot or no queue entry; the caller may offer them again later.
        accepted: if blocks were dropped, at least this many of the first offered blocks were not dropped. They need
            not be offered again.
    """

    graph: TransferGraph | None
    stored: NDArray[np.int32]
    known: int
    dropped: int
    accepted: int = 0

    def joined(self, other: StorePlan) -> StorePlan:
        """Returns one plan that combines this one and `other`, the plans for two parts of one offer. Its `accepted` is
        0."""
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
    """Moves pages from a tier to engine blocks, on every rank."""
    STORE = "store"
    """Moves pages from engine blocks to a tier, on every rank."""
    FETCH = "fetch"
    """Moves pages from a tier to host slots."""
    WRITE = "write"
    """Moves pages from host slots to a tier."""
    PROBE = "probe"
    """Asks a tier which pages it has."""
    SEAL = "seal"
    """Publishes pages whose bytes a store has already put in a tier."""

    # Enum's own hash is a Python call at each lookup in a table keyed by role. Members are equal only if they are
    # identical, so the hash of `object` is correct too.
    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class Completion:
    """The result of an op that has ended on all ranks. The engine may reuse the op's blocks from now on.

    Attributes:
        blocks: the engine blocks of all pages of the op.
        failed_blocks: for a load, the engine blocks without valid KV; for a store, the blocks that are not published.
        published: for a store, positions of the op's pages that became visible or will become visible when they have
            been sealed; empty for a load.
        reason: the ranks' reports about failures, as text; empty if there are none.
        loss: why a rank did not begin this store; None if no rank gave such a reason.
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
    """Base class of listeners. A manager calls the methods of all its listeners, one listener after the other, when
    blocks become visible in host memory or on the unit's own disks and when they are removed. In this base class the
    methods do nothing."""

    def on_publish(self, group: int, keys: Keys) -> None:
        """Called when blocks have become visible in host memory."""

    def on_evict(self, group: int, keys: Keys) -> None:
        """Called when blocks in host memory are no longer visible: evicted, forgotten, expired or found bad."""

    def on_write(self, group: int, keys: Keys, generations: NDArray[np.uint64]) -> None:
        """Called when blocks have become visible on the unit's own disks. `generations` has one number per block, which
        identifies the write."""

    def on_unwrite(self, group: int, keys: Keys) -> None:
        """Called when blocks on the unit's own disks are no longer visible."""

    def on_erase(self, name: str) -> None:
        """Called when a namespace was erased, after `on_evict` and `on_unwrite` for its blocks."""

    def on_reset(self, epoch: int) -> None:
        """Called when a reset has begun the epoch `epoch`: all blocks in host memory and on the disks were removed."""


class CacheManager(ABC):
    """The control plane of one ownership unit.

    If `match`, `prefetch`, `begin_load` or `begin_store` raises, that call leaves nothing planned or leased.
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
        the pages beyond it that other tiers have.

        The new lease replaces the lease of the request's last lookup. Only pages that are published in host memory are
        promised, with two exceptions. From tiers that stream (`TierFacts.streams`), whole blocks that are still being
        fetched are promised too. Their load waits for each page; a page fails if it does not arrive or is found bad.
        From tiers with straight loads (directly to engine blocks), whole blocks are promised without being fetched.
        Other pages that tiers have are fetched unless the engine computes them sooner. When this method returns, they
        are being fetched (outcome COMING), or the request waits until there are host slots for all of them (ASK_AGAIN).
        If a prefix is larger than host memory, only as much of it as fits is fetched.

        If a load of the request failed to bring a page, the page is not promised to the request again by the same
        route. After two failed loads, nothing is promised to the request until `end_request`. `ManagerLimits.rest_s`
        says how failed loads limit the promises to new requests.

        Args:
            keys: per group, keys of all whole blocks of the request from its first token on.
            start_tokens: number of tokens that the engine has itself: whole blocks of every group.
            tail: per group, candidates for the partial tail. They are used only if their `base_block` is the block at
                which the match ends. None if a group's rule is not FULL or the groups' blocks differ in size.
            settings: the caller's settings for the request; they limit the promised tokens and the tiers to read.

        Raises:
            ContractError: `keys` or `tail` do not have one element per group, the start is within a block, or `tail`
                is not None although the groups cannot have tails.
            BlockRangeError: the start is negative.
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

        Meant for requests in the engine's waiting queue. The pages are held until the first `match`, which ends
        the prefetch. From then on the request waits for pages that have not arrived yet. The prefetch also ends with
        `release`, and with `expire` after about twice `TierFacts.wait_s`.

        All prefetched requests together hold at most a quarter of host memory, and their fetches use at most half of a
        tier's fetch limits, so that lookups find free slots. The first `match` fetches the pages beyond these limits.

        Call order:
            Before the request's first `match`. Does nothing for a request that has a lease or waits.

        Args:
            start_tokens: number of tokens that the engine is expected to have itself: whole blocks of every group.

        Returns:
            Number of fetches in flight for the request; 0 if nothing has to be fetched or the limits are reached.
        """

    @abstractmethod
    def begin_load(
        self, request_id: str, blocks: Sequence[BlockIds], tail: bool = False
    ) -> TransferGraph | None:
        """Plans a load of the first `len(blocks[g])` matched blocks of each group g to the engine blocks `blocks[g]`,
        and ends the lookup lease.

        With `tail`, `blocks[g]` are all matched blocks and then the engine block for the partial tail. Otherwise the
        engine may load fewer blocks than were promised, but either all or none of a group whose rule is not FULL. Pages
        that are not loaded are released, like pages whose engine block is NO_BLOCK. A promised load
        always finds a queue entry.

        Call order:
            After the `match` that promised the blocks, before `release`, `reset` or the lease's expiry.

        Returns:
            The graph that every rank has to run; None if nothing has to be loaded.

        Raises:
            ContractError: the request has no lease, or `blocks` has more blocks than the lookup promised.
        """

    @abstractmethod
    def waits(self, request_id: str) -> bool:
        """Whether the request waits for fetches or tiers' answers and its time to wait is not over. O(1)."""

    @abstractmethod
    def leased_pages(self, request_id: str) -> int:
        """Number of pages in the request's lookup lease."""

    @abstractmethod
    def still_waits(self, request_id: str) -> bool:
        """Records that the engine asks about the request again. Returns whether the request must still wait, either for
        reads (see `waits`) or for host slots. While it must, `match` need not be called. O(1).

        Requests get slots in the order of their first lookup, each for all of its missing pages at once. A request that
        waits for slots holds none. It waits for at most `TierFacts.wait_s`, not counting time in which the engine does
        not ask about it. Then it continues without these pages.
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
        """Plans a store of some of a request's blocks. Block `first_block + i` of the request has the key `keys[i]` and
        is in engine block `blocks[i]`.

        Blocks that are already stored or in flight are skipped. Never blocks, and never evicts a leased slot.

        Preconditions:
            The caller keeps the engine blocks pinned until the op's `Completion`.

        Args:
            tokens: number of valid tokens in each of the blocks; None for whole blocks.
            spare: whether the blocks are useful only to requests that diverge from this request at these blocks. Spare
                blocks may take a share of host memory. If they take more, they are evicted before all other blocks. A
                block is no longer spare when a request hits it or stores it without `spare`.
            ttl_s: whole seconds after which the pages that this call stores are misses in every tier; None for never.
                Blocks that are cached already keep their expiry time.

        Raises:
            ContractError: `keys` and `blocks` differ in length, or a block cannot have `tokens` valid tokens.
            BlockRangeError: there is no such group, or a block number is outside [0, MOST_BLOCKS).
            KeySchemeError: `keys` is not a C-contiguous uint8 array of shape [blocks, KEY_BYTES].
        """

    @abstractmethod
    def known(self, group: int, keys: Keys) -> NDArray[np.bool_]:
        """Returns which of these blocks need not be stored, bool [keys]: as far as this unit knows, they are in one of
        its tiers or in flight to it, or a peer keeps them. Leases no block and marks none as used."""

    @abstractmethod
    def complete(self, rank: int, result: OpResult) -> Completion | None:
        """Records one rank's final result of an op. The last rank's result ends the op; that call returns a Completion.

        Store: pages of the current epoch become visible if they succeeded on every rank and were not discarded. The
        slots of all other pages are freed. If an earlier load of the request is still in flight, no page becomes
        visible.

        Load: pages that failed on any rank are forgotten, so that the next lookup misses them. Two kinds of failed
        pages are kept: pages of a cancelled load, and pages that a straight load did not bring although their content
        is not in doubt. When a rank reports failed pages, the request's stores in flight are revoked from the first
        failed block on, as by `discard_from`. After a `reset`, all blocks of an earlier load count as failed, because
        they contain KV of the old weights.

        Call order:
            Once per rank and op, after the rank has stopped moving the op's bytes.

        Raises:
            ContractError: the op or the rank is unknown, or the rank has already reported the op.
        """

    @abstractmethod
    def discard_from(self, request_id: str, first_token: int) -> int:
        """Revokes the pages of the request's stores in flight that contain tokens from `first_token` on, so that they
        are not published. Returns the number of pages.

        Called when a load failed to fill engine blocks from which the request has computed further blocks. The load
        may be that of another request that shares the engine blocks. The revoked keys may be stored again at once.
        """

    @abstractmethod
    def release(self, request_id: str) -> None:
        """Ends the request's lookup lease, wait and prefetch, if any. Ops in flight continue. Idempotent.

        Also marks the request's blocks as used together; of these, the block farthest from the start is evicted first.
        """

    @abstractmethod
    def abandon_loads(self, request_id: str) -> None:
        """Marks the request's loads in flight as abandoned. The failure of an abandoned load is neither counted against
        the request nor logged as a warning.

        Meant for loads that the engine has withdrawn or that no rank received. Each of these loads still needs a call
        of `complete` per rank.
        """

    @abstractmethod
    def end_request(self, request_id: str) -> None:
        """Ends the request like `release` and `abandon_loads`, and forgets its failed loads. Idempotent."""

    @abstractmethod
    def forget(self, group: int, keys: Keys) -> int:
        """Makes these keys misses in every tier and frees their slots. A leased slot is freed when its last lease ends.
        Returns how many of the keys were known."""

    @abstractmethod
    def erase_namespace(self, name: str) -> int:
        """Forgets all pages of the namespace with this name in every tier, and returns how many were known. One in
        65,536 pages of other namespaces is forgotten too; `named_mark` in `keys.py` says why.
        """

    @abstractmethod
    def reset(self) -> int:
        """Makes all cached pages misses, because the weights are new, and returns the new epoch.

        Stores in flight are not published, and lookup leases end: a promise whose load has not begun is void. Waits
        until no tier would serve an older page any more, even after a crash.
        """

    @abstractmethod
    def disable(self) -> None:
        """Turns the cache off: from now on lookups are misses and nothing is stored. Leased pages can still be loaded,
        and ops in flight end as usual."""

    @abstractmethod
    def grow(self, group: int, slots: int) -> None:
        """Makes the first `slots` slots of the group's host pool usable. Never makes fewer usable than before."""

    @abstractmethod
    def expire(self) -> int:
        """Ends lookup leases older than `ManagerLimits.lease_s`, drops expired pages, and ends waits that ran out long
        ago (longer ago than the longest `TierFacts.wait_s`). Returns the number of leases that it ended."""

    @abstractmethod
    def inflight_ops(self) -> int:
        """Number of loads and stores that were planned and have not ended on every rank."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Checks every invariant of index, pools, leases and ops.

        Raises:
            ContractError: an invariant is broken; the message names it.
        """
