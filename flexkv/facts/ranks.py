"""Messages between a rank and its unit: the worker's facts about its KV pool, and the unit's grant of the host pool.

A unit is built in four steps. Every worker sends its `RankFacts`. `build_unit` sizes host memory from all of them. The
unit sends each worker a `PoolGrant`, which says where the pool is and which part of each slot belongs to which rank.
Each worker maps the pool and starts its lanes (`RankWorker.attach`). The records are picklable, because workers may be
separate processes.
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
"""A unit's id: 16 random bytes, drawn when the unit is built. Grants, orders and reports contain the id. A rank carries
out only orders of its own unit, and the scheduler's side accepts only reports for its own unit.
"""

PoolId = NewType("PoolId", bytes)
"""A pool's id: 16 random bytes, drawn when a worker registers an engine's pool. A grant lists the ids of the pools for
which its unit was built.
"""

NO_UNIT = UnitId(b"")
"""Stands for a unit's id before the unit is built, and for a rank that serves no unit."""

NO_POOL = PoolId(b"")
"""Stands for a pool's id if the scheduler's side reaches the rank without messages."""


def random_id() -> bytes:
    """Returns 16 random bytes for the id of a unit or pool."""
    return secrets.token_bytes(16)


@dataclass(frozen=True, slots=True)
class UnitOwner:
    """The unit, engine and model that own the pages on the disks.

    Attributes:
        model: the model's name, for display.
        namespace: 32 bytes. Two units may use each other's KV only if they have the same namespace.
        unit: name of the ownership unit on this node, such as `dp0`.
        weights: the weights that can be identified only by their whole content. The namespace depends only on samples
            of these weights.
    """

    model: str
    namespace: bytes
    unit: str
    weights: WeightsContent = NAMED


@dataclass(frozen=True, slots=True)
class KvGroup:
    """One KV group of a unit, as its adapter describes it.

    Attributes:
        reach: length of the window in pages or of the chunk in tokens; 0 for other rules.
        signature: bytes that the adapter hashes into the keys of the group's blocks, so that no block of another group
            has the same key; empty for a unit with one group.
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
        run_table: the offset in the stripe, the bytes and the layer of each run, int64 [runs, 3], ascending by offset.
        format_id: identifies the encoding of the pages.
        heads: number of KV heads on this rank; 0 if the group's blocks have no heads.
        dtype: name of the pool's element type; empty if it is unknown.
    """

    stripe_bytes: int
    run_table: NDArray[np.int64]
    format_id: str
    heads: int = 0
    dtype: str = ""

    @classmethod
    def of_view(cls, view: Any, format_id: str, heads: int = 0, dtype: str = "") -> GroupFacts:
        """Returns the facts about the blocks that `view`, a `KvView`, describes."""
        runs = view.runs[:, [3, 2, 4]]
        runs = runs[np.argsort(runs[:, 0])].astype(np.int64)
        return cls(view.stripe_bytes, runs, format_id, heads, dtype)

    @property
    def runs(self) -> int:
        """Number of runs of one block. If stored pages are verified, each run has its own digest."""
        return len(self.run_table)


@dataclass(frozen=True, slots=True)
class RankFacts:
    """One worker's facts about its KV pool, sent before the first lookup.

    Attributes:
        pid: process id of the worker.
        num_blocks: number of blocks in the engine's pool on this rank, which all groups share.
        groups: facts about each group, in the order of the unit's groups.
        replicas: number of consecutive ranks, from rank 0 on, that have the same bytes and share one stripe. With MLA
            (one latent vector for all heads), these are all ranks. If there are more ranks than KV heads, they are the
            ranks with the same heads.
        gpudirect: whether GPUDirect Storage reaches the pool's memory. The worker checks this only if `disk.gds` is
            auto; otherwise False.
        pool_id: id of the engine's pool that the worker has registered; NO_POOL if it has registered none.
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
        """Returns the facts about a rank in this process. The unit exchanges no messages with such a rank, so the rank
        has no pool id.
        """
        return cls(rank, os.getpid(), num_blocks, groups)


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where one rank's part of a slot begins, in bytes from the slot's start.

    Attributes:
        stripe: start of the rank's stripe.
        digests: start of the rank's run digests in the trailer; None if pages are not verified.
    """

    stripe: int
    digests: int | None


@dataclass(frozen=True, slots=True)
class PoolGrant:
    """The unit's message to its workers: where the host pool is, and which bytes of each slot belong to which rank.

    Attributes:
        unit: id of the unit that owns the host pool.
        pools: by rank, the id of the engine pool for which the unit was built.
        descriptor: the host pool's `HostPool.descriptor()`.
        places: by rank, then by group, the rank's place in a slot.
        slabs: slabs of the unit's disks, for ranks that copy pages directly to or from the disks; None if no rank does
            this.
    """

    unit: UnitId
    pools: tuple[PoolId, ...]
    descriptor: Any
    places: tuple[tuple[RankPlace, ...], ...]
    slabs: SlabMap | None = None
