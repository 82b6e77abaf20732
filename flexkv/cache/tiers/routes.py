"""The contracts of routes between engine blocks and a tier: one class per direction.

Contract with the index that a route's entries belong to: an op's entries are pinned from its plan to its end on every
rank, so that no other page gets the slots or places that a rank may still read or write.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flexkv.cache.base import EntryIds, StorePlan
from flexkv.cache.ledger.leases import GroupLease, Lease, StraightPages
from flexkv.cache.ledger.ops import Op, RankOp
from flexkv.errors import ContractError
from flexkv.facts.keys import Keys
from flexkv.transfer.graph import NEVER, BlockIds, OpResult, SlotIds, TransferOp


class LoadRoute(ABC):
    """Loads from one tier to engine blocks. Serves the part of each promise that is in its tier."""

    @abstractmethod
    def begin_load(self, request_id: str, lease: Lease, targets: Sequence[BlockIds]) -> list[TransferOp]:
        """Plans the load of this tier's part of a promise, and records the ops as in flight.

        The ops take over the leases of the pages that are loaded; pages without an engine block are unpinned.

        Args:
            targets: per group, the engine blocks of the promise's leading pages; NO_BLOCK for pages not wanted.
        """

    @abstractmethod
    def release_share(self, group: GroupLease) -> None:
        """Unpins this tier's part of a promise that is not loaded."""

    @abstractmethod
    def source_failed(self, reason: str) -> None:
        """Records that pages of a load failed because of the tier or the route from it, not because of their
        content.
        """

    @abstractmethod
    def end_load(self, op: RankOp, current: bool) -> None:
        """Unpins the pages of a load after every rank has reported, and forgets the suspect ones.

        Args:
            current: there was no reset since it was planned.
        """


@dataclass(slots=True)
class StoreOffer:
    """Blocks that a request offers to store, already validated.

    Attributes:
        keys, blocks: `keys[i]` is the key of engine block `blocks[i]`, which is block `first_block + i` of the request.
        tokens: valid tokens in each of the blocks.
        spare: see `CacheManager.begin_store`.
        expiry: when the pages expire, in Unix seconds; NEVER if they do not.
        chosen: for a part of an offer, the position of each key in the whole offer, int32, ascending; block i is then
            block `first_block + chosen[i]` of the request. None for a whole offer. A part may be taken of a part.
    """

    request_id: str
    group: int
    keys: Keys
    blocks: BlockIds
    first_block: int
    tokens: int
    spare: bool = False
    expiry: int = NEVER
    chosen: NDArray[np.int32] | None = None

    def part(self, positions: NDArray[np.integer]) -> StoreOffer:
        """An offer of only this one's blocks at `positions`."""
        return StoreOffer(
            self.request_id,
            self.group,
            np.ascontiguousarray(self.keys[positions]),
            self.blocks[positions],
            self.first_block,
            self.tokens,
            self.spare,
            self.expiry,
            positions.astype(np.int32) if self.chosen is None else self.chosen[positions],
        )

    def positions(self, found: NDArray[np.uint32]) -> NDArray[np.int32]:
        """Positions in the whole offer of the keys at `found` in this one."""
        return found.view(np.int32) if self.chosen is None else self.chosen[found]


class StraightLoads(LoadRoute):
    """Loads from a tier straight to engine blocks, without a host slot."""

    @property
    @abstractmethod
    def pages(self) -> int:
        """Number of pages being loaded now."""

    @abstractmethod
    def wants(self, pages: int, queued_fetches: int) -> bool:
        """Whether `pages` should take this route rather than go through host memory behind `queued_fetches` others."""

    @abstractmethod
    def lease(self, group: int, entries: EntryIds, places: SlotIds) -> StraightPages:
        """Describes pages that the lookup has leased, for the load."""

    @abstractmethod
    def keeps(self, group: int, keys: Keys, pages: StraightPages) -> bool:
        """Whether leased pages, one per key, still belong to the keys and may take this route. Ignores expiry."""

    @abstractmethod
    def stop(self, reason: str) -> None:
        """Closes this route, because a rank cannot use it: pages go through host memory from now on."""


class StoreRoute(ABC):
    """Stores of engine blocks to one tier."""

    @abstractmethod
    def begin_store(self, offer: StoreOffer, room: int) -> StorePlan:
        """Plans the store of the offered blocks that are not stored yet, and records its op as in flight.

        Args:
            room: most pages to store; further ones are dropped.
        """

    @abstractmethod
    def bar(self, op: RankOp, pages: NDArray[np.bool_]) -> None:
        """Keeps these pages from being published; their keys may be stored again at once."""

    @abstractmethod
    def end_store(self, op: RankOp, good: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Publishes the good pages of a store that has ended on every rank, or plans their seal, and gives up the
        others.

        Returns:
            Which pages are visible, or will be when they have been sealed, bool [pages].
        """

    def follow_up_ended(self, op: Op, result: OpResult) -> None:
        """Publishes the good pages of a seal that `end_store` planned and that has ended on the tier's plane. Never
        called on routes that plan no seals."""
        raise ContractError(f"op {op.op_id}: this route plans no seals")
