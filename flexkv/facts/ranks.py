"""Messages between a rank and its unit: the worker's facts about its KV pool, and the unit's grant of the host pool.

A unit is built in this order: every worker sends its `RankFacts`; `build_unit` sizes host memory from all of them; the
unit's `PoolGrant` says where the pool is and which part of each slot belongs to which rank; a worker that has mapped it
starts its lanes (`RankWorker.attach`). The records are plain and picklable, because workers may be separate processes.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from typing import Any, NewType

import numpy as np
from numpy.typing import NDArray

from flexkv.facts.keys import Rule
from flexkv.transfer.slab_map import SlabMap
from flexkv.weights.files import NAMED, WeightsContent

UnitId = NewType("UnitId", bytes)
"""16 random bytes, made with a unit. Grants, orders and reports carry it: a rank carries out only the orders of its own
unit, and a scheduler's side accepts only the reports of its own unit.
"""

PoolId = NewType("PoolId", bytes)
"""16 random bytes, made when a worker takes an engine's pool. A grant names the pools that its unit was made for."""

NO_UNIT = UnitId(b"")
"""Stands for no unit: before one is built, and for a rank that serves none."""

NO_POOL = PoolId(b"")
"""Stands for no pool: for a rank that the scheduler's side reaches without messages."""


def random_id() -> bytes:
    """16 random bytes, different for every unit and pool of every process."""
    return secrets.token_bytes(16)


@dataclass(frozen=True, slots=True)
class UnitOwner:
    """The engine that owns the pages on the disks.

    Attributes:
        model: the model's name, for display.
        namespace: 32 bytes that must be equal before two blocks' KV may be exchanged.
        unit: name of the ownership unit on this node, such as `dp0`.
        weights: the weights that the namespace names only by samples.
    """

    model: str
    namespace: bytes
    unit: str
    weights: WeightsContent = NAMED


@dataclass(frozen=True, slots=True)
class KvGroup:
    """One KV group of a unit, as its adapter describes it.

    Attributes:
        reach: see `GroupSpec`.
        signature: what the adapter hashes into the keys of the group's blocks, so that no block of another group has
            the same key; empty for a unit with one group.
    """

    block_tokens: int
    rule: Rule = Rule.FULL
    reach: int = 0
    signature: bytes = b""


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """One worker's facts about the blocks of one KV group.

    Attributes:
        stripe_bytes: bytes of one block on this rank.
        run_table: each run's offset in the stripe, bytes and layer, int64 [runs, 3], ascending by offset.
        format_id: encoding of the pages.
        heads: heads of K and V on this rank; 0 if a block has no heads.
        dtype: name of the pool's element type.
    """

    stripe_bytes: int
    run_table: NDArray[np.int64]
    format_id: str
    heads: int = 0
    dtype: str = ""

    @classmethod
    def of_view(cls, view: Any, format_id: str, heads: int = 0, dtype: str = "") -> GroupFacts:
        """The facts of the blocks that `view` (a `KvView`) describes."""
        runs = view.runs[:, [3, 2, 4]]
        runs = runs[np.argsort(runs[:, 0])].astype(np.int64)
        return cls(view.stripe_bytes, runs, format_id, heads, dtype)

    @property
    def runs(self) -> int:
        """The contiguous pieces of one block; each has its own digest if stored pages are verified."""
        return len(self.run_table)


@dataclass(frozen=True, slots=True)
class RankFacts:
    """One worker's facts about its KV pool, sent before the first lookup.

    Attributes:
        pid: the worker's process.
        num_blocks: blocks of the engine's pool on this rank, which all groups share.
        groups: in the order of the unit's groups.
        replicas: how many consecutive ranks, counted from rank 0, hold the same bytes and share one stripe: all ranks
            with MLA (one latent for all heads), some of them if there are more ranks than KV heads.
        gpudirect: whether GPUDirect Storage reaches the pool's memory; the worker checks only if `disk.gds` is auto.
        pool_id: the engine's pool that the worker currently has.
    """

    rank: int
    pid: int
    num_blocks: int
    groups: tuple[GroupFacts, ...]
    replicas: int = 1
    gpudirect: bool = False
    pool_id: PoolId = NO_POOL

    @classmethod
    def here(cls, rank: int, num_blocks: int, *groups: GroupFacts) -> RankFacts:
        """The facts of a rank in this process, which needs no messages."""
        return cls(rank, os.getpid(), num_blocks, groups)


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where one rank's share of a slot lies, in bytes from the slot's start.

    Attributes:
        digests: start of the rank's run digests in the trailer; None if pages are not verified.
    """

    stripe: int
    digests: int | None


@dataclass(frozen=True, slots=True)
class PoolGrant:
    """Where a worker finds the unit's host pool, and which bytes of each slot are its own.

    Attributes:
        descriptor: `HostPool.descriptor()`.
        places: each rank's places, one per group.
        slabs: slabs of the unit's disks, for ranks with gds loads; None if there are none.
        unit: the unit that owns the pool.
        pools: the engine pool of each rank, for which the unit was made.
    """

    unit: UnitId
    pools: tuple[PoolId, ...]
    descriptor: Any
    places: tuple[tuple[RankPlace, ...], ...]
    slabs: SlabMap | None = None
