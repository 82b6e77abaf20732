"""Contracts of store planning: what an adapter reports about its requests, a step and the engine's pool, and a store
planner's answers.

An adapter says which tokens of a request are certain, which blocks the engine is about to take back, and what a step
computes. A planner (`planner.py`) decides which blocks are offered to the cache manager, and when.
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
"""The group number in all keys. Groups are told apart by their namespaces instead."""

BlocksByGroup = Sequence[Sequence[int]]
"""The engine's blocks of one request, by KV group in the order of the unit's groups."""


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
        """Keys of all whole blocks whose tokens are known, shape [blocks, KEY_BYTES]. Costs O(new blocks)."""


@dataclass(slots=True, eq=False)
class BlockTable:
    """A request's blocks of one KV group.

    Attributes:
        keys: makes the keys of the blocks.
        ids: the engine's blocks, in order, as the engine gave them; 0 if it gave none. A block that has left the window
            stays in the list, although the engine has taken it back.
        cursor: all blocks before this index are stored, being stored, or not to be stored.
        has_pending: blocks from the cursor on are certain (see `StoreRequest.certain`), but there was no room for them
            yet.
    """

    keys: BlockKeySource
    ids: list[int] = field(default_factory=list)
    cursor: int = 0
    has_pending: bool = False

    def blocks(self, first: int, end: int) -> BlockIds:
        """Engine block ids of blocks [first, end), int32."""
        return np.array(self.ids[first:end], dtype=np.int32)


@dataclass(slots=True, eq=False)
class StoreRequest(ABC):
    """A planner's record of one live request.

    The tokens of a request in one step, from its first on, and who owns their KV:

        0            computed             step_end
        |  earlier    |  this step's       |  later
        |  forwards   |  forward           |  forwards
        |.............................|
                                   certain: before it, KV is computed and accepted. Drafts of the step, and the token
                                   that it samples, come after it.

    Attributes:
        tables: one block table per KV group, in the order of the unit's groups.
        kept_out: tokens that the caller keeps out of the cache.
        settings: the settings that the caller gave.
        stale: the request's KV was computed with weights that have been replaced, or from a failed load that the engine
            did not take back; none of it may be stored.
        suspect_from: index of the first group's first block that was computed from a failed load and not recomputed
            yet.
        own_from: index of the first group's first block that did not come from the engine's own prefix cache.
        computed: number of tokens before those that the step computes.
        step_end: number of tokens up to the last one that the step computes.
        certain: number of tokens whose KV is computed and accepted once the step has run, as far as `settings` allow
            them to be stored.
        reached_tokens: boundaries up to here have been stored or skipped; see `Boundaries`. With states, the last
            boundary that was stored.
        states_at: the last boundary at which a step of the engine ended: the request's table has its state.
        next_offer: a number recorded by the planner: while `certain` is smaller, there is no block to offer. Code that
            sets a cursor back or changes the prompt must set it to 0.
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
        """Number of the request's leading tokens that other requests had too, as far as is known."""

    @abstractmethod
    def tail_key(self, tokens: int) -> Keys | None:
        """The key of the block that the first `tokens` tokens begin but do not fill, shape [1, KEY_BYTES]; None if such
        a block has no key.
        """

    @property
    @abstractmethod
    def has_own_names(self) -> bool:
        """Whether the engine's hash of a block fails to identify the block's content, so that `key_part` is needed."""

    @abstractmethod
    def key_part(self, block: int, block_hash: bytes) -> tuple[bytes, bytes]:
        """The namespace and the engine's key from which the key of a block of the first group is made.

        Args:
            block: index of the block in the request.
            block_hash: the pool's hash of the block.
        """

    def storable(self, tokens: int) -> int:
        """How many of the request's first `tokens` tokens its settings allow to be stored."""
        most = self.settings.max_store_tokens
        return tokens if most is None else min(tokens, most)

    @property
    def block_ids(self) -> list[int]:
        """The engine's blocks of the first group, in order."""
        return self.tables[0].ids


class StepBlocks(Protocol):
    """The engine's data on its blocks in one step; needed only if a group's rule is window, chunk or
    state."""

    def blocks(self, request_id: str) -> BlocksByGroup | None:
        """The request's present blocks; None if the engine does not give them."""

    def states(self, request_id: str) -> Iterable[tuple[int, int, int]]:
        """The states that the engine hands over: (group, block, number of tokens that the states cover)."""


class StoreOrders(Protocol):
    """Stores that a step carries out.

    Attributes:
        early: stores of blocks that were complete before the step; submitted before its forward pass.
        stores: stores of blocks that the step's forward pass completes; submitted after it.
        settled: stores of blocks that the forward pass only reads; submitted with `stores`.
    """

    early: list[TransferGraph]
    stores: list[TransferGraph]
    settled: list[TransferGraph]


class StoreEvents(Protocol):
    """Is notified of planned stores, to publish events when their blocks become visible."""

    def planned(self, request: StoreRequest, group: int, plan: StorePlan, first_block: int) -> None: ...
    def planned_by_hash(self, plan: StorePlan, keys: Keys, hashes: Sequence[bytes]) -> None: ...


class PoolBlock(NamedTuple):
    """A whole block of the engine's pool, and the pool's hash of it."""

    number: int
    block_hash: bytes


class HeldBlocks:
    """Blocks of an ended request that wait for a copy.

    Attributes:
        lost: blocks that the engine has reused since, or dropped in a reset.
        was_reset: the engine has reset its pool since.
    """

    __slots__ = ("block_ids", "lost", "was_reset")

    def __init__(self, block_ids: Sequence[int]) -> None:
        self.block_ids = block_ids
        self.lost: set[int] = set()
        self.was_reset = False


class StoreWatch:
    """A planner's calls to the engine's pool.

    An adapter overrides this if the engine reports which blocks it reuses. This class itself serves an engine that does
    not report it: its stores end inside the step that computed their blocks, so no block is reused meanwhile.

    Attributes:
        ops: stores in flight, and their blocks.
    """

    def __init__(self) -> None:
        self.ops: dict[OpId, BlockIds] = {}

    # --- stores in flight ---

    @property
    def room(self) -> int:
        """Number of further blocks that may have a store in flight although no request holds them."""
        return 1 << 31

    def add(self, op_id: OpId, blocks: BlockIds, holder: str | None = None) -> None:
        """Watches blocks that a live request holds.

        Args:
            holder: the request if it holds the blocks until `release`; None if the engine may take them back before.
        """
        self.ops[op_id] = blocks

    def add_free(self, op_id: OpId, blocks: BlockIds) -> None:
        """Watches blocks that no request holds, and that keep their hash until the engine reuses them."""
        self.ops[op_id] = blocks

    def add_held(self, op_id: OpId, blocks: BlockIds) -> None:
        """Watches blocks of a hold that are `still_held`."""
        self.ops[op_id] = blocks

    def release(self, holder: str) -> None:
        """Called when a request no longer holds its blocks, or is about to lose them: they count towards `room`."""

    def end(self, op_id: OpId) -> None:
        """Stops watching the blocks of a store that has ended on every rank."""
        self.ops.pop(op_id, None)

    def take_reused(self) -> dict[OpId, list[int]]:
        """Takes the blocks reused since the last call: op -> positions in the op."""
        return {}

    # --- blocks that wait for a store ---

    def hold(self, block_ids: Sequence[int]) -> HeldBlocks:
        """Watches blocks that a request is about to lose, until `end_hold`. The engine may take them at any time."""
        raise ContractError("this connector does not hear which blocks the engine hands out")

    def end_hold(self, held: HeldBlocks) -> None:
        """Stops watching held blocks."""

    def still_held(self, block_ids: Sequence[int]) -> int:
        """Number of leading blocks that are still watched."""
        return 0

    # --- the pool ---

    def has_cached(self, block_hash: bytes) -> bool:
        """Whether the engine's own prefix cache has a block with this hash, as far as is known."""
        return False

    def hash_of(self, block: int) -> bytes | None:
        """The pool's hash of a block; None if it has none, or none is known."""
        return None

    def hashes(self) -> dict[int, bytes]:
        """Blocks in the engine's own prefix cache, and their hashes, as far as is known."""
        return {}

    @property
    def free_head(self) -> tuple[int, int]:
        """The block that the engine will reuse next (-1: none), and the number of free blocks: they show whether the
        free blocks have changed.
        """
        raise ContractError("this connector is not given the engine's block pool")

    def free_blocks(self, count: int) -> list[PoolBlock]:
        """Those of the next `count` blocks to be reused that are whole and have a hash, in that order."""
        raise ContractError("this connector is not given the engine's block pool")

    def whole_blocks(self, block_ids: Sequence[int]) -> list[PoolBlock]:
        """Those of these blocks that are whole and have a hash."""
        raise ContractError("this connector is not given the engine's block pool")

    def engine_key(self, block_hash: bytes) -> bytes:
        """The engine's key of a block, as in `EngineKeyChain`, from the pool's hash of it."""
        return block_hash

    def close(self) -> None:
        """Ends the watch, even if stores are under way."""


@dataclass(frozen=True, slots=True)
class StoreParts:
    """A planner's inputs: the parts of one engine's scheduler, and its facts.

    Attributes:
        alignment_tokens: every hit is a multiple of this many tokens.
        states_handed_over: a request's table may hold states that end within a block, so only the engine knows which
            block holds which state; see `StepBlocks.states`.
        namespace: namespace of the keys of requests without `has_own_names`, 32 bytes.
        queue_ops: `transfer.queue_ops`.
        slots: slots of host memory.
        has_tiers: there are tiers behind host memory.
        is_busy: whether these tiers have work.
        step_tokens: most tokens that the engine computes in one step.
        ends_in_step: stores end in the step that computed their blocks.
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
