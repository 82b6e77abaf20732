"""The model's records of ops in flight, and of loads that failed."""

from __future__ import annotations

from dataclasses import dataclass, field

from flexkv.cache.base import OpRole
from flexkv.simulation.base import Key


@dataclass
class ModelOp:
    """An op in flight; lists have one element per page, and sets hold positions of pages.

    Attributes:
        slots: slots in host memory, or NO_SLOT.
        numbers: numbers of the blocks in their request; empty for an op of the disks themselves.
        gone: pages that must not become visible, because their key was forgotten, lost or passed to a store.
        load: number of the load that it is a part of.
    """

    request_id: str
    role: OpRole
    keys: list[Key]
    slots: list[int]
    numbers: list[int]
    epoch: int
    waits_for: set[int]
    revoked: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    suspect: set[int] = field(default_factory=set)
    damaged: set[int] = field(default_factory=set)
    reports: int = 0
    load: int = 0
    abandoned: bool = False


@dataclass
class ModelFailure:
    """Blocks that the loads of one request did not bring."""

    loads: set[int] = field(default_factory=set)
    first_token: int | None = None
    from_disk: bool = False
