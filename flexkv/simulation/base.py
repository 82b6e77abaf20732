"""The contract of a simulation: its random choices, the symbols that stand for KV, and how it judges a manager.

A run (`run.Simulation`) takes the place of an engine and drives a real cache manager in one thread, without bytes,
files or the machine's clock, so that equal configurations take equal steps. The manager is checked in two ways: every
answer is compared with a model, which implements the rules a second time; and symbols in place of KV show what arrived
where. If a run returns, no rule was broken.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from flexkv.cache.base import GroupSpec
from flexkv.cache.ledger.stats import ManagerStats
from flexkv.cache.manager import LocalCacheManager
from flexkv.cache.tiers.contract import TierCounts, WriteMode
from flexkv.errors import ContractError
from flexkv.facts.keys import Rule

Symbol = tuple[int, bytes | int]
"""Content of a block or slot on one rank: `(epoch, key)`, the KV of that key under those weights, or `(-1, n)`, which
is garbage."""

Place = tuple[int, int]
"""Group and engine block."""

Key = tuple[int, bytes]
"""Group and block key."""

NO_SLOT = -1
"""Slot of a page that moves between engine and disk without host memory."""

ManagerFactory = Callable[..., LocalCacheManager]
"""Makes the manager of a run, from the arguments of `LocalCacheManager`."""


class RuleBroken(ContractError):
    """The manager did something that the rules forbid, or did not do something that they require."""


def require(holds: bool, what: str) -> None:
    """
    Raises:
        RuleBroken: it does not hold; `what` says what the manager did.
    """
    if not holds:
        raise RuleBroken(what)


@dataclass(frozen=True)
class SimulationConfig:
    """The configuration of a simulation.

    Attributes:
        seed: names the run; the same seed takes the same steps.
        steps: random actions to take, before everything in flight is drained.
        groups: KV groups of the unit.
        ranks: workers that report each op.
        engine_blocks: number of engine blocks of each group.
        requests: number of requests that are live at once.
        most_steps: greatest length of a request, in steps (`step_tokens`).
        failure_rate: share of moved pages that fail.
        ordered_reports: whether each rank reports in the order in which its ops ended, as an engine's workers do. Only
            then do requests share engine blocks whose load has not been verified yet.
        ttl_s: seconds to live of the pages that half of the requests store, which have separate keys; 0 for none. Not
            with `gds_stores`.
        tier_places: places of each group in a symbolic tier, after the disk tier if there is one; 0 for none.
        remote: whether a store that other machines also use lies behind all other tiers; not with `tier_places`.
        source_error_rate: share of failed pages of loads straight from disk whose cause is SOURCE or TRANSPORT. After
            such a failure, loads go through host memory for a minute, which is 6,000 steps.
        integrity_every: steps between calls of `check_integrity`; 0 for only the last call.
        store_queue_pages: `ManagerLimits.inflight_store_pages`.
        load_queue_pages: `ManagerLimits.inflight_load_pages`.
        asks_again: `ManagerLimits.asks_again`.
        wait_s: `TierFacts.wait_s` of the disk tier.
        policy: the eviction policy of every tier.
        disk_places: disk slots of each group; 0 for no disk tier.
        disk_mode: when pages are written to disk.
        disks: the disks over which the places are striped.
        measured_steps: whether the manager learns how fast the engine computes (sometimes slowly, sometimes fast), so
            that it leaves pages on disk for the engine to compute.
        stream: blocks are promised while they are being read from disk.
        gds_loads: blocks on disk are promised where they lie, and loaded without a slot of host memory; with
            `measured_steps` only where that was faster.
        gds_stores: stores go only to disk: the ranks write stripes, then the disks write the trailers.
    """

    seed: int
    steps: int = 2_000
    groups: tuple[GroupSpec, ...] = (GroupSpec(block_tokens=4, slots=40),)
    ranks: int = 2
    engine_blocks: int = 64
    requests: int = 8
    most_steps: int = 8
    failure_rate: float = 0.03
    ordered_reports: bool = True
    integrity_every: int = 10
    store_queue_pages: int = 24
    load_queue_pages: int = 32
    asks_again: bool = False
    wait_s: float = 30.0
    policy: str = "lru"
    disk_places: int = 0
    disk_mode: WriteMode = WriteMode.THROUGH
    disks: int = 2
    measured_steps: bool = False
    stream: bool = False
    gds_loads: bool = False
    gds_stores: bool = False
    source_error_rate: float = 0.0
    ttl_s: int = 0
    tier_places: int = 0
    remote: bool = False

    @property
    def step_tokens(self) -> int:
        """Tokens that requests grow by: whole blocks of every group. With blocks of one size a step is a block."""
        return math.lcm(*(spec.block_tokens for spec in self.groups))

    @property
    def pages_a_step(self) -> list[int]:
        """Pages per step, by group."""
        return [self.step_tokens // spec.block_tokens for spec in self.groups]

    @property
    def takes_tails(self) -> bool:
        """Whether the groups may have partial tails."""
        return all(spec.rule is Rule.FULL and spec.block_tokens == self.step_tokens for spec in self.groups)

    @property
    def has_tiers(self) -> bool:
        """Whether there is a tier behind host memory."""
        return bool(self.disk_places or self.tier_places or self.remote)


@dataclass
class SimulationReport:
    """What a run did, up to the broken rule if it found one.

    Attributes:
        steps: random actions taken.
        verified_pages: loaded pages that had the KV that their key promises on every rank.
        failed_pages: pages of loads that were reported as failed.
        streamed_pages: pages promised while they were being read from disk.
        gds_pages: pages loaded from disk without a slot of host memory.
        room_waits: lookups that had to wait for free slots in host memory.
        room_given: lookups that got free slots after they had waited for them.
        lookups_after_failures: lookups of requests that have had a failed load.
        stored_while_read: pages that were stored while they were being read from disk.
        actions: how often each action was taken, by its name.
        stats: the manager's own totals; `disk` has those of its disk tier, `symbolic` those of its last tier.
    """

    steps: int = 0
    verified_pages: int = 0
    failed_pages: int = 0
    streamed_pages: int = 0
    gds_pages: int = 0
    room_waits: int = 0
    room_given: int = 0
    lookups_after_failures: int = 0
    stored_while_read: int = 0
    actions: dict[str, int] = field(default_factory=dict)
    stats: ManagerStats = field(default_factory=ManagerStats)
    disk: TierCounts = field(default_factory=TierCounts)
    symbolic: TierCounts = field(default_factory=TierCounts)
