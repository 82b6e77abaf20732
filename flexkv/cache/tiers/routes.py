"""The contracts of routes between engine blocks and a tier: one class per direction.

Contract with the tier's index: the entries of an op are pinned until the op has ended on every rank, so that no other
page gets a slot that a rank may still read or write.
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
    """How pages of one tier are loaded to engine blocks: plans the load ops and ends them. A route loads the part of
    each promise that is in its tier."""

    @abstractmethod
    def begin_load(self, request_id: str, lease: Lease, targets: Sequence[BlockIds]) -> list[TransferOp]:
        """Plans the load of this tier's part of a promise, and records the ops as in flight.

        The ops take over the leases of the pages that are loaded. All other pages of the part are unpinned.

        Args:
            targets: per group, the engine blocks for the promise's leading pages; NO_BLOCK for a page that is not to be
                loaded.
        """

    @abstractmethod
    def release_share(self, group: GroupLease) -> None:
        """Unpins this tier's part of one group's promise, which will not be loaded."""

    @abstractmethod
    def source_failed(self, reason: str) -> None:
        """Records that pages of a load failed because of the tier or the route from it, not because of their
        content.
        """

    @abstractmethod
    def end_load(self, op: RankOp, current: bool) -> None:
        """Unpins the pages of a load after every rank has reported, and forgets the suspect ones.

        Args:
            current: False if the cache was reset since the load was planned.
        """


@dataclass(slots=True)
class StoreOffer:
    """Blocks that a request offers to store, already validated.

    Attributes:
        keys, blocks: `keys[i]` is the key of engine block `blocks[i]`, which is block `first_block + i` of the request.
        tokens: number of valid tokens in each of the blocks.
        spare: whether the blocks are spare; see `CacheManager.begin_store`.
        expiry: Unix time in seconds at which the pages expire; NEVER if they do not expire.
        chosen: for a part of an offer, the position of each key in the whole offer, int32, ascending. `blocks[i]` is
            then block `first_block + chosen[i]` of the request. None for a whole offer.
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
        """Returns an offer of only the blocks at `positions` of this offer, which may itself be a part."""
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
        """Converts positions in this offer to positions in the whole offer."""
        return found.view(np.int32) if self.chosen is None else self.chosen[found]


class StraightLoads(LoadRoute):
    """How pages of one tier are loaded straight to engine blocks, without a host slot."""

    @property
    @abstractmethod
    def pages(self) -> int:
        """Number of pages in loads in flight on this route."""

    @abstractmethod
    def wants(self, pages: int, queued_fetches: int) -> bool:
        """Whether `pages` pages should be loaded on this route rather than through host memory.

        Args:
            queued_fetches: pages in flight in fetches from the tier, behind which these pages would wait.
        """

    @abstractmethod
    def lease(self, group: int, entries: EntryIds, places: SlotIds) -> StraightPages:
        """Returns a record of pages that a lookup has leased. Their load is planned from this record."""

    @abstractmethod
    def keeps(self, group: int, keys: Keys, pages: StraightPages) -> bool:
        """Whether leased pages, one per key, still belong to the keys and may be loaded on this route. Does not check
        whether they have expired."""

    @abstractmethod
    def stop(self, reason: str) -> None:
        """Closes this route because a rank cannot use it. Pages are loaded through host memory from now on."""


class StoreRoute(ABC):
    """How engine blocks are stored to one tier: plans the store ops and ends them."""

    @abstractmethod
    def begin_store(self, offer: StoreOffer, room: int) -> StorePlan:
        """Plans the store of the offered blocks that are not stored yet, and records its op as in flight.

        Args:
            room: maximum number of pages to store; further pages are dropped.
        """

    @abstractmethod
    def bar(self, op: RankOp, pages: NDArray[np.bool_]) -> None:
        """Keeps pages of a store in flight from being published. Their keys may be stored again at once."""

    @abstractmethod
    def end_store(self, op: RankOp, good: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Ends a store that every rank has reported: makes its good pages visible, or plans their seal (the op that
        makes them visible later), and removes all other pages.

        Returns:
            Which pages are visible, or will be visible when they have been sealed, bool [pages].
        """

    def follow_up_ended(self, op: Op, result: OpResult) -> None:
        """Ends a seal that `end_store` planned and that the tier's plane has carried out: makes its good pages visible.
        Never called on a route that plans no seals."""
        raise ContractError(f"op {op.op_id}: this route plans no seals")
