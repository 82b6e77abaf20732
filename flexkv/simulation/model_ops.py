"""The model's records of ops in flight, and of loads that failed."""

from __future__ import annotations

from dataclasses import dataclass, field

from flexkv.cache.base import OpRole
from flexkv.simulation.base import Key


@dataclass
class ModelOp:
    """An op in flight. Lists have one item per page; sets of pages have positions in these lists.

    Attributes:
        request_id: the request's id; empty for an op that no rank runs.
        slots: host slots of the pages; NO_SLOT for a page without a host slot.
        numbers: index of each page in its request; empty for an op that no rank runs.
        epoch: the manager's epoch when the op was planned.
        waits_for: ids of the request's loads that were in flight when a store was planned.
        revoked: pages of a store that must not be published, because they were computed from a failed load.
        gone: pages that must not become visible, because their keys were forgotten, lost, or taken over by a store.
        failed: pages that failed on some rank.
        suspect: pages of a load that the manager must forget.
        damaged: pages that failed on some rank because of their content, or for an unknown cause.
        reports: number of ranks that have reported the op.
        load: id of the first op of the load to which the op belongs; 0 if it is not part of a load.
        abandoned: whether the request of a load has ended.
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
    """The failed loads of one request.

    Attributes:
        loads: ids of the failed loads.
        first_token: position of the first token whose load from host memory failed; None if no such load has failed.
        from_disk: whether a load straight from disk has failed.
    """

    loads: set[int] = field(default_factory=set)
    first_token: int | None = None
    from_disk: bool = False
