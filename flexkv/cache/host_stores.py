"""Stores from engine blocks to host slots."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from flexkv.cache.base import GroupSpec, OpRole, StorePlan
from flexkv.cache.disk.flow import DiskFlow
from flexkv.cache.host_tier import HostTier
from flexkv.cache.inflight import InflightOp, InflightTable
from flexkv.cache.leases import NO_ENTRY, EntryIds
from flexkv.cache.planner import Planner
from flexkv.cache.routes import StoreOffer, StoreRoute
from flexkv.cache.trails import TrailTable
from flexkv.transfer.graph import TransferGraph


class HostStores(StoreRoute):
    """D2H: what is stored is visible in host memory when every rank has copied it.

    Args:
        trails: are told which blocks a request stored.
        disk: is offered what became visible; None where there is none.
    """

    def __init__(
        self,
        specs: Sequence[GroupSpec],
        host: HostTier,
        planner: Planner,
        inflight: InflightTable,
        trails: TrailTable,
        disk: DiskFlow | None,
    ) -> None:
        self._specs = specs
        self._host = host
        self._planner = planner
        self._inflight = inflight
        self._trails = trails
        self._disk = disk

    def begin(self, offer: StoreOffer, room: int, epoch: int) -> StorePlan:
        group, blocks = offer.group, offer.blocks
        without_slot = self._take_over(offer, room)
        positions, entries, slots, evicted, known, dropped = self._host.index.insert(group, offer.keys, room)
        self._host.evicted(group, evicted)
        stored = positions.view(np.int32)
        known, dropped = known - without_slot, dropped + without_slot
        if not len(stored):
            return StorePlan(None, stored, known, dropped)
        if self._disk is not None:
            self._host.tokens[group][slots] = offer.tokens
            self._disk.index.any_partial |= offer.tokens != self._specs[group].block_tokens
        all_new = len(stored) == len(blocks)
        plan = self._planner.store(group, blocks if all_new else blocks[positions], slots)
        offer.begun(self._inflight, plan, entries, positions, epoch)
        self._trails.of(offer.request_id)[group].put_at(offer.first_block, positions, entries)
        return StorePlan(TransferGraph((plan,)), stored, known, dropped)

    def _take_over(self, offer: StoreOffer, room: int) -> int:
        """Makes blocks unknown that a read from disk is to bring, so that the offer stores them.

        Until it has been verified nobody knows whether a read brings its page, and the engine offers a block once. Of
        such a block the store's slot becomes the key's own; the read goes on in its slot for the loads that wait for
        it, and is not published. If the store fails, the page is on disk still, unless both have failed.

        Returns:
            How many find no slot, and stay the read's.
        """
        if self._disk is None or not len(self._disk.reads.ops):
            return 0
        index, group = self._host.index, offer.group
        entries = index.find(group, offer.keys, ready_only=False)
        unverified = self._unverified(offer, entries)
        if not len(unverified):
            return 0
        unknown = int(np.count_nonzero(entries == NO_ENTRY))
        missing = min(room, unknown + len(unverified)) - index.free_slots(group)
        if missing > 0:
            there = entries[entries != NO_ENTRY]
            ready = there[index.ready(there).view(np.bool_)]
            # Not what the offer has already, to make room for the rest of it.
            index.pin(ready)
            self._host.evicted(group, index.evict(group, missing))
            index.unpin(ready)
        taken = max(0, min(room, index.free_slots(group)) - unknown)
        self._host.remove(group, entries[unverified[:taken]])
        return max(0, len(unverified) - taken)

    def _unverified(self, offer: StoreOffer, entries: EntryIds) -> NDArray[np.intp]:
        """Positions of offered blocks that are on their way up from disk, and whose content is not from there."""
        assert self._disk is not None
        index, group = self._host.index, offer.group
        there = np.flatnonzero(entries != NO_ENTRY)
        pending = there[~index.ready(entries[there]).view(np.bool_)]
        coming: NDArray[np.intp] = pending[
            self._disk.reads.filling(group, index.slots_of(entries[pending])) != 0
        ]
        loading = [op.blocks for op in self._inflight if op.role is OpRole.LOAD and op.group == group]
        if len(coming) and loading:
            # These engine blocks get what the read brings: where it fails they are computed, and offered again.
            coming = coming[~np.isin(offer.blocks[coming], np.concatenate(loading))]
        return coming

    def bar(self, op: InflightOp, pages: NDArray[np.bool_]) -> None:
        self._host.remove(op.group, op.entries[pages])

    def end(self, op: InflightOp, good: NDArray[np.bool_]) -> NDArray[np.bool_]:
        published = self._host.index.finish(op.entries, good.view(np.uint8)).view(np.bool_)
        if published.any():
            entries = op.entries[published]
            self._host.published(op.group, entries)
            if self._disk is not None:
                self._disk.stored(op.group, self._host.index.keys_of(entries))
        return published
