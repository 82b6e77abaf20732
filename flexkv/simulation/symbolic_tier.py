"""A tier that only simulations use. It implements the minimum that `flexkv.cache.tiers.contract` requires, with symbols
as pages.

With `SymbolicVolumes`, a simulation tests the real disk tier on simulated disks. With this tier, it tests only that the
manager keeps the contract of tiers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flexkv.c_ext import BlockIndex
from flexkv.cache.base import NO_ENTRY, EntryIds
from flexkv.cache.tiers.contract import Sink, Source, Tier, TierCounts, TierFacts
from flexkv.cache.tiers.tables import TierContext
from flexkv.facts.keys import Keys
from flexkv.simulation.base import Symbol
from flexkv.transfer.graph import NO_BLOCKS, OpId, OpKind, Priority, SlotIds, TransferOp

Content = tuple[int, bytes, list[Symbol]]
"""Content of a slot of the tier: epoch of the tier, key, and one symbol per rank."""


class SymbolicTier(Tier, Source, Sink):
    """A tier that is written from host memory and read back to it. `TierMoves` carries out its ops.

    Args:
        places: number of slots of each group.

    Attributes:
        content: for each group, the contents of slots by slot number.
        keys_of: by id of a planned op that `TierMoves` has not taken yet, the keys of the op's pages.
        epoch: number of resets so far. Content of an older epoch does not count as a page.
    """

    def __init__(self, context: TierContext, places: int, facts: TierFacts) -> None:
        groups = len(context.tables.specs)
        self.facts, self.counts = facts, TierCounts()
        self.source = self.sink = self
        self.presence = BlockIndex([places] * groups, context.policy)
        for group in range(groups):
            self.presence.grow(group, places)
        self.content: list[dict[int, Content]] = [{} for _ in range(groups)]
        self.keys_of: dict[int, list[bytes]] = {}
        self.epoch = 0
        self._places = places

    # --- lookups ---

    def leading(self, group: int, keys: Keys) -> EntryIds:
        return self.presence.match_prefix(group, keys)

    def present(self, group: int, keys: Keys) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = self.presence.find(group, keys) != NO_ENTRY
        return found

    def known(self, group: int, keys: Keys) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = self.presence.find(group, keys, ready_only=False) != NO_ENTRY
        return found

    # --- fetches ---

    def plan_fetch(
        self,
        op_id: OpId,
        group: int,
        keys: Keys,
        entries: EntryIds,
        places: SlotIds,
        slots: SlotIds,
        layerwise: bool,
    ) -> TransferOp:
        self.keys_of[op_id] = [row.tobytes() for row in keys]
        return TransferOp(op_id, OpKind.DISK_READ, group, Priority.LOAD, NO_BLOCKS, slots, places=places)

    def end_fetch(self, plan: TransferOp, entries: EntryIds, suspect: NDArray[np.bool_]) -> None:
        self.presence.remove(entries[suspect])
        self.presence.unpin(entries)

    def tokens_of(self, plan: TransferOp) -> None:
        return None

    # --- writes ---

    def plan_write(
        self, op_id: OpId, group: int, keys: Keys, slots: SlotIds, tokens: NDArray[np.int32]
    ) -> tuple[NDArray[np.integer], EntryIds, TransferOp | None]:
        positions, entries, places, evicted, *_ = self.presence.insert(group, keys, len(keys))
        self.counts.evicted += len(evicted)
        if not len(positions):
            return positions, entries, None
        self.keys_of[op_id] = [row.tobytes() for row in keys[positions]]
        op = TransferOp(
            op_id, OpKind.DISK_WRITE, group, Priority.STORE, NO_BLOCKS, slots[positions], places=places
        )
        return positions, entries, op

    def end_write(self, group: int, entries: EntryIds, good: NDArray[np.bool_]) -> NDArray[np.bool_]:
        return self.presence.finish(entries, good.view(np.uint8)).view(np.bool_)

    def used(self, group: int, keys: Keys) -> None:
        self.presence.touch(self.presence.find(group, keys))

    def room(self, group: int) -> int:
        return self._places

    # --- forget and reset ---

    def forget(self, group: int, keys: Keys) -> int:
        entries = self.presence.find(group, keys, ready_only=False)
        return int(np.count_nonzero(self.presence.remove(entries[entries != NO_ENTRY])))

    def begin_reset(self) -> None:
        self.presence.clear()
        self.epoch += 1

    def finish_reset(self, ends_s: float) -> None:
        """Does nothing, because `begin_reset` has already made all older content invalid."""

    def poll(self, now_s: float) -> None:
        """Does nothing, because the tier notices a lost page only when the page is read."""
