"""The ways between engine blocks and a tier, one for each kind of op: what a manager may ask of them.

Contract with the index that a route's entries are of: an op's entries are pinned from its plan to its end on every
rank, so that nobody is given the slots or places that a rank may still read or write.
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
from flexkv.transfer.graph import BlockIds, OpResult, SlotIds, TransferOp


class LoadRoute(ABC):
    """Loads to engine blocks from one tier: of each promise it serves the part that lies there."""

    @abstractmethod
    def begin_load(self, request_id: str, lease: Lease, targets: Sequence[BlockIds]) -> list[TransferOp]:
        """Plans the load of its part, and enters the ops as in flight.

        The ops take over the lease of what is loaded; what no engine block takes is unpinned.

        Args:
            targets: per group, the engine blocks of the promise's leading pages; NO_BLOCK for pages not wanted.
        """

    @abstractmethod
    def release_share(self, group: GroupLease) -> None:
        """Ends the lease of its part of a promise that is not loaded."""

    @abstractmethod
    def source_failed(self, reason: str) -> None:
        """Pages of a load failed not for what they hold: the tier or the way from it failed them."""

    @abstractmethod
    def end_load(self, op: RankOp, current: bool) -> None:
        """A load has ended on every rank: its pages are unpinned, and suspect pages are forgotten.

        Args:
            current: there was no reset since it was planned.
        """


@dataclass(slots=True)
class StoreOffer:
    """Blocks that a request would have stored; checked.

    Attributes:
        keys, blocks: `keys[i]` is of engine block `blocks[i]`, which is number `first_block + i` of the request.
        tokens: valid tokens in each of the blocks.
        spare: as of `CacheManager.begin_store`.
        chosen: of a part of an offer, the position there of each key, int32 ascending; block i is number
            `first_block + chosen[i]` then.
    """

    request_id: str
    group: int
    keys: Keys
    blocks: BlockIds
    first_block: int
    tokens: int
    spare: bool = False
    chosen: NDArray[np.int32] | None = None

    def part(self, positions: NDArray[np.integer]) -> StoreOffer:
        """Some blocks of a whole offer."""
        return StoreOffer(
            self.request_id,
            self.group,
            np.ascontiguousarray(self.keys[positions]),
            self.blocks[positions],
            self.first_block,
            self.tokens,
            self.spare,
            positions.astype(np.int32),
        )

    def positions(self, found: NDArray[np.uint32]) -> NDArray[np.int32]:
        """Positions in the whole offer of those at `found` in this part of it."""
        return found.view(np.int32) if self.chosen is None else self.chosen[found]


class StraightLoads(LoadRoute):
    """Loads of pages that have no host slot, from where they lie."""

    @property
    @abstractmethod
    def pages(self) -> int:
        """Being loaded now."""

    @abstractmethod
    def wants(self, pages: int, queued_fetches: int) -> bool:
        """Whether `pages` are to go this way rather than behind `queued_fetches` others through host memory."""

    @abstractmethod
    def lease(self, group: int, entries: EntryIds, places: SlotIds) -> StraightPages:
        """What a load needs to know of pages that the lookup has leased."""

    @abstractmethod
    def keeps(self, group: int, keys: Keys, pages: StraightPages) -> bool:
        """Whether leased pages are still those of the keys, one each, and may go this way, whatever has expired."""

    @abstractmethod
    def stop(self, reason: str) -> None:
        """A rank cannot: pages go through host memory from now on."""


class StoreRoute(ABC):
    """Stores of engine blocks to one tier."""

    @abstractmethod
    def begin_store(self, offer: StoreOffer, room: int) -> StorePlan:
        """Plans the store of those of the offer that are not stored, and enters its op as in flight.

        Args:
            room: more pages are dropped.
        """

    @abstractmethod
    def bar(self, op: RankOp, pages: NDArray[np.bool_]) -> None:
        """These pages will not be published: their keys may be stored again at once."""

    @abstractmethod
    def end_store(self, op: RankOp, good: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """A store has ended on every rank.

        Returns:
            Of its pages those that are visible, or will be when they have been sealed, bool [pages].
        """

    def follow_up_ended(self, op: Op, result: OpResult) -> None:
        """An op that `end` planned, of role SEAL, has ended on the tier's plane. Of routes that plan none: never."""
        raise ContractError(f"op {op.op_id}: this route plans no seals")
