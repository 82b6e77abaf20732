"""Stores from engine blocks to host slots."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from flexkv.cache.base import GroupSpec, StorePlan
from flexkv.cache.disk.flow import DiskFlow
from flexkv.cache.host_tier import HostTier
from flexkv.cache.inflight import InflightOp, InflightTable
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
        positions, entries, slots, evicted, known, dropped = self._host.index.insert(group, offer.keys, room)
        self._host.evicted(group, evicted)
        stored = positions.view(np.int32)
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
