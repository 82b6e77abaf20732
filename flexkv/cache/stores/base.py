"""The types through which adapters and store planners work together: the adapter's reports about requests, steps and
the engine's pool, and the planner's results.

An adapter reports which tokens of a request are certain, which blocks the engine is about to reuse, and which tokens a
step computes. A planner (`planner.py`) decides which blocks are offered to the cache manager, and when.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from flexkv.cache.base import CacheManager, StorePlan
from flexkv.cache.stores.kept_out import KeptOut
from flexkv.config import StoreConfig
from flexkv.errors import ContractError
from flexkv.facts.keys import Keys, Rule
from flexkv.facts.request_settings import NO_SETTINGS, RequestSettings
from flexkv.observe import Counters
from flexkv.transfer.graph import BlockIds, OpId, TransferGraph

GROUP = 0
"""The group number that all keys contain. The keys of different groups differ by their namespaces instead."""

BlocksByGroup = Sequence[Sequence[int]]
"""The engine's blocks of one request, one sequence per KV group, in the order of the unit's groups."""


class StoreGroup(Protocol):
    """One KV group of the engine; see `GroupSpec`."""

    @property
    def block_tokens(self) -> int: ...
    @property
    def rule(self) -> Rule: ...
    @property
    def reach(self) -> int: ...


class BlockKeySource(Protocol):
    """Makes the keys of one request's blocks in one KV group."""

    def keys(self) -> Keys:
        """Returns the keys of all whole blocks whose tokens are known, shape [blocks, KEY_BYTES]. O(new blocks)."""


@dataclass(slots=True, eq=False)
class BlockTable:
    """A request's blocks of one KV group.

    Attributes:
        keys: makes the keys of the blocks.
        ids: numbers of the engine's blocks, in order, as the engine reported them; 0 where the engine reported none. A
            block that has left the attention window stays in the list although the engine may have reused the block.
        cursor: index of the first block that still has to be offered; all blocks before it are stored, in flight, or
            not to be stored.
        has_pending: whether blocks from the cursor on are certain (see `StoreRequest.certain`) but could not be stored
            yet, because there were no slots or queue entries for them.
    """

    keys: BlockKeySource
    ids: list[int] = field(default_factory=list)
    cursor: int = 0
    has_pending: bool = False

    def blocks(self, first: int, end: int) -> BlockIds:
        """Returns the numbers by which the engine identifies blocks [first, end) of the request, int32."""
        return np.array(self.ids[first:end], dtype=np.int32)


@dataclass(slots=True, eq=False)
class StoreRequest(ABC):
    """A planner's record of one live request.

    The figure shows a request's tokens in one step, and which forward passes of the engine compute their KV:

        0            computed             step_end
        |  earlier    |  this step's       |  later
        |  passes     |  pass              |  passes
        |.............................|
                                   certain: the KV of all tokens before it is computed and accepted. Drafts of the step
                                   and the token that it samples come after it.

    Attributes:
        tables: one block table per KV group, in the order of the unit's groups.
        kept_out: tokens that the caller keeps out of the cache.
        settings: the caller's settings for the request.
        stale: whether none of the request's KV may be stored, because it was computed with replaced weights, or from a
            failed load whose blocks the engine does not compute again.
        suspect_from: in the first group, index of the first block that was computed from a failed load and not computed
            again yet; None if there is no such block.
        own_from: in the first group, index of the first block that did not come from the engine's own prefix cache.
        computed: number of tokens before those that the step computes.
        step_end: number of tokens up to the last one that the step computes.
        certain: number of leading tokens that are certain after the step and that `settings` allow to be stored.
        reached_tokens: the boundaries up to this number of tokens were stored or skipped; see `Boundaries`. For a model
            with states, the last boundary that was stored.
        states_at: the last boundary at which a step of the engine ended, so that the request's table has the states
            there; 0 if there is none.
        next_offer: while `certain` is smaller than this number, the planner has no block to offer. Code that sets a
            cursor back or changes the prompt must set `next_offer` to 0.
    """

    request_id: str
    tables: tuple[BlockTable, ...]
    kept_out: KeptOut
    _: KW_ONLY
    settings: RequestSettings = NO_SETTINGS
    stale: bool = False
    suspect_from: int | None = None
    own_from: int = 0
    computed: int = 0
    step_end: int = 0
    certain: int = 0
    reached_tokens: int = 0
    states_at: int = 0
    next_offer: int = 0

    @property
    @abstractmethod
    def prompt_tokens(self) -> int:
        """Number of the request's prompt tokens."""

    @property
    @abstractmethod
    def leading_shared(self) -> int:
        """Number of leading tokens that the request is known to share with an earlier request."""

    @abstractmethod
    def tail_key(self, tokens: int) -> Keys | None:
        """Returns the key of the partial block in which the request's first `tokens` tokens end, shape [1, KEY_BYTES];
        None if the partial block has no key.
        """

    @property
    @abstractmethod
    def has_own_names(self) -> bool:
        """True if the engine's hash of a block does not identify the block's content. The keys of this request's blocks
        must then be made from `key_part`."""

    @abstractmethod
    def key_part(self, block: int, block_hash: bytes) -> tuple[bytes, bytes]:
        """Returns the namespace and the engine's key from which the key of a block of the first group is made.

        Args:
            block: index of the block in the request.
            block_hash: the hash that the engine's pool has for the block.
        """

    def storable(self, tokens: int) -> int:
        """Returns how many of the first `tokens` tokens the request's settings allow to be stored."""
        most = self.settings.max_store_tokens
        return tokens if most is None else min(tokens, most)

    @property
    def block_ids(self) -> list[int]:
        """The engine's blocks of the first group, in order."""
        return self.tables[0].ids


class StepBlocks(Protocol):
    """The engine's report about its blocks in one step. Needed only for groups of windows, chunks or states."""

    def blocks(self, request_id: str) -> BlocksByGroup | None:
        """Returns the request's current blocks; None if the engine does not report them."""

    def states(self, request_id: str) -> Iterable[tuple[int, int, int]]:
        """Returns the states that the engine hands over: (group, block, number of tokens that the states cover)."""


class StoreOrders(Protocol):
    """The graphs that store blocks in one step.

    Attributes:
        early: graphs that store blocks that were complete before the step; submitted before the step's forward pass.
        stores: graphs that store blocks that the forward pass completes; submitted after it.
        settled: graphs that store blocks that the forward pass only reads; submitted together with `stores`.
    """

    early: list[TransferGraph]
    stores: list[TransferGraph]
    settled: list[TransferGraph]


class StoreEvents(Protocol):
    """An object that is notified of planned stores, so that it can publish events when the blocks become visible."""

    def planned(self, request: StoreRequest, group: int, plan: StorePlan, first_block: int) -> None: ...
    def planned_by_hash(self, plan: StorePlan, keys: Keys, hashes: Sequence[bytes]) -> None: ...


class PoolBlock(NamedTuple):
    """A whole block of the engine's pool, and the hash that the pool has for it."""

    number: int
    block_hash: bytes


class HeldBlocks:
    """Blocks of an ended request that wait to be stored.

    Attributes:
        block_ids: the numbers by which the engine identifies the blocks.
        lost: those of `block_ids` that the engine has reused, or dropped in a reset, since the request ended.
        was_reset: whether the engine has reset its pool since the request ended.
    """

    __slots__ = ("block_ids", "lost", "was_reset")

    def __init__(self, block_ids: Sequence[int]) -> None:
        self.block_ids = block_ids
        self.lost: set[int] = set()
        self.was_reset = False


class StoreWatch:
    """Watches whether the engine reuses blocks that are being stored or wait to be stored.

    Adapters of engines that report which blocks they reuse override this class. The class itself is for engines that do
    not report reuse. Their stores end within the step that computed the blocks, so no block is reused before its store
    ends.

    Attributes:
        ops: by op number, the engine blocks of each store in flight.
    """

    def __init__(self) -> None:
        self.ops: dict[OpId, BlockIds] = {}

    # --- stores in flight ---

    @property
    def room(self) -> int:
        """Number of further blocks that stores in flight may read although no request holds the blocks."""
        return 1 << 31

    def add(self, op_id: OpId, blocks: BlockIds, holder: str | None = None) -> None:
        """Watches the blocks of a store in flight. A request holds these blocks or is about to lose them.

        Args:
            holder: id of the request if it holds the blocks until `release`; None if the engine may reuse them earlier.
        """
        self.ops[op_id] = blocks

    def add_free(self, op_id: OpId, blocks: BlockIds) -> None:
        """Watches the blocks of a store in flight. No request holds these blocks. They keep their hash until the engine
        reuses them."""
        self.ops[op_id] = blocks

    def add_held(self, op_id: OpId, blocks: BlockIds) -> None:
        """Watches the blocks of a store in flight. These are blocks that an earlier call of `hold` still watches (see
        `still_held`)."""
        self.ops[op_id] = blocks

    def release(self, holder: str) -> None:
        """Called when a request no longer holds its blocks or is about to lose them. From then on, those of its blocks
        that stores in flight read count against `room`."""

    def end(self, op_id: OpId) -> None:
        """Stops watching the blocks of a store that has ended on every rank."""
        self.ops.pop(op_id, None)

    def take_reused(self) -> dict[OpId, list[int]]:
        """Returns the blocks that the engine has reused since the last call: their positions in the op, by op number.
        Later calls do not return them again."""
        return {}

    # --- blocks that wait for a store ---

    def hold(self, block_ids: Sequence[int]) -> HeldBlocks:
        """Watches blocks that a request is about to lose, until `end_hold`. The engine may reuse them at any time."""
        raise ContractError("this connector does not hear which blocks the engine hands out")

    def end_hold(self, held: HeldBlocks) -> None:
        """Stops watching held blocks."""

    def still_held(self, block_ids: Sequence[int]) -> int:
        """Returns the number of leading blocks of `block_ids` that an earlier call of `hold` still watches."""
        return 0

    # --- the pool ---

    def is_empty(self) -> bool:
        """Whether certainly no block of the engine's pool is held by a request or in the engine's own prefix cache."""
        return False

    def has_cached(self, block_hash: bytes) -> bool:
        """Whether the engine's own prefix cache is known to have a block with this hash."""
        return False

    def hash_of(self, block: int) -> bytes | None:
        """Returns the hash that the pool has for a block; None if the block has no hash or the hash is not known."""
        return None

    def hashes(self) -> dict[int, bytes]:
        """Returns the hash of each block that is known to be in the engine's own prefix cache, by block number."""
        return {}

    @property
    def free_head(self) -> tuple[int, int]:
        """The block that the engine will reuse next (-1 if none), and the number of free blocks. If both values are the
        same as before, callers assume that the free queue has not changed.
        """
        raise ContractError("this connector is not given the engine's block pool")

    def free_blocks(self, count: int) -> list[PoolBlock]:
        """Returns the whole blocks that have a hash among the `count` blocks that the engine will reuse next, in the
        order of reuse."""
        raise ContractError("this connector is not given the engine's block pool")

    def whole_blocks(self, block_ids: Sequence[int]) -> list[PoolBlock]:
        """Returns those of the blocks `block_ids` that are whole and have a hash."""
        raise ContractError("this connector is not given the engine's block pool")

    def engine_key(self, block_hash: bytes) -> bytes:
        """Converts the hash that the pool has for a block to the engine's key of the block, for `EngineKeyChain`."""
        return block_hash

    def close(self) -> None:
        """Stops watching all blocks, even if stores are in flight."""


@dataclass(frozen=True, slots=True)
class StoreParts:
    """A planner's inputs: parts of one engine's scheduler, and facts about the engine and the unit.

    Attributes:
        manager: the cache manager to which blocks are offered.
        watch: watches engine blocks for reuse.
        counters: counts pages that are not stored.
        events: notified of planned stores; None if no events are published.
        alignment_tokens: the number of tokens of every hit is a multiple of this number.
        states_handed_over: whether the engine reports which block has which state (`StepBlocks.states`). An engine
            reports this if a request's table may have states that end within a block.
        namespace: namespace of the keys of requests without `has_own_names`, 32 bytes.
        settings: the settings of the section `store`.
        queue_ops: number of entries in a rank's queue (`transfer.queue_ops`).
        slots: number of host slots.
        has_tiers: whether there are tiers behind host memory.
        is_busy: returns whether tiers behind host memory have work.
        step_tokens: maximum number of tokens that the engine computes in one step.
        ends_in_step: whether stores end in the step that computed their blocks.
    """

    manager: CacheManager
    watch: StoreWatch
    counters: Counters
    events: StoreEvents | None
    groups: Sequence[StoreGroup]
    alignment_tokens: int
    states_handed_over: bool
    namespace: bytes
    settings: StoreConfig
    queue_ops: int
    slots: int
    has_tiers: bool
    is_busy: Callable[[], bool]
    step_tokens: int
    ends_in_step: bool = False
