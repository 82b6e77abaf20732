"""The basic types of a simulation: its configuration, the symbols that stand for KV, and the check of a rule.

A run (`run.Simulation`) takes the place of an engine and drives a real cache manager. It has one thread and uses no
real KV, no files and no real clock, so that runs with equal configurations take equal steps. The manager is checked in
two ways. A model implements the rules a second time, and every result of the manager is compared with that of the
model. Symbols, which stand for KV, show which page arrived in which slot or block. If a run returns, no rule was
broken.
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
"""Content of a block or slot on one rank: `(epoch, key)` for the key's KV, computed with the weights of that epoch;
`(-1, n)` for garbage."""

Place = tuple[int, int]
"""Group and engine block."""

Key = tuple[int, bytes]
"""Group and block key."""

NO_SLOT = -1
"""The value of a page's host slot if the page moves between engine and disk without a host slot."""

ManagerFactory = Callable[..., LocalCacheManager]
"""Makes the manager of a run. Takes the arguments of `LocalCacheManager`."""


class RuleBroken(ContractError):
    """Raised if the manager did something that the rules forbid, or did not do something that they require."""


def require(holds: bool, what: str) -> None:
    """Checks a rule.

    Args:
        holds: whether the manager kept the rule.
        what: text that says how the manager broke the rule.

    Raises:
        RuleBroken: the rule does not hold.
    """
    if not holds:
        raise RuleBroken(what)


@dataclass(frozen=True)
class SimulationConfig:
    """The configuration of a simulation.

    Attributes:
        seed: seed of all random choices. With the same seed and settings, runs take the same steps.
        steps: number of random actions. After them, everything in flight is drained.
        groups: KV groups of the unit.
        ranks: number of workers that report each op.
        engine_blocks: number of engine blocks of each group.
        requests: maximum number of live requests.
        most_steps: maximum length of a request, in steps of `step_tokens` tokens.
        failure_rate: share of moved pages that fail.
        ordered_reports: whether each rank reports its ops in the order in which they finished, as an engine's workers
            do. Only then do requests share engine blocks whose load has not been verified yet.
        ttl_s: time to live of pages, in seconds; 0 if no page expires. About half of the requests store pages with this
            time to live. They share no keys with the requests whose pages do not expire. Must be 0 with `gds_stores`.
        tier_places: number of slots of each group in a symbolic tier, which is behind the disk tier if there is one; 0
            for no symbolic tier.
        remote: whether the last tier is a remote store, which other machines also use. Must be False with
            `tier_places`.
        source_error_rate: among the failed pages of loads straight from disk, the share whose cause is SOURCE or
            TRANSPORT. After such a failure, loads go through host memory for a minute, which is 6,000 steps.
        integrity_every: number of steps between calls of `check_integrity`; 0 for a call at the end only.
        store_queue_pages: maximum number of pages in stores in flight (`ManagerLimits.inflight_store_pages`).
        load_queue_pages: maximum number of pages promised or being loaded (`ManagerLimits.inflight_load_pages`).
        asks_again: whether requests wait for host slots (`ManagerLimits.asks_again`).
        wait_s: seconds for which a request waits for the disk tier (`TierFacts.wait_s`).
        policy: the eviction policy of every tier.
        disk_places: number of disk slots of each group; 0 for no disk tier.
        disk_mode: when pages are written to the tiers behind host memory.
        disks: number of disks over which the disk slots are striped.
        measured_steps: whether the simulation reports times of the engine's steps to the manager. The engine alternates
            between slow and fast. When it is fast, the manager does not fetch pages from disk, and the engine computes
            them.
        stream: whether blocks are promised while they are being read from disk.
        gds_loads: whether blocks on disk are promised, and loaded straight from disk without a host slot. With
            `measured_steps`, this is done only if it was measured to be faster.
        gds_stores: whether stores go only to disk: the ranks write stripes, then the disk lane writes the trailers.
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
        """Number of tokens by which requests grow: complete blocks of every group. If all blocks have the same size, a
        step is one block."""
        return math.lcm(*(spec.block_tokens for spec in self.groups))

    @property
    def pages_a_step(self) -> list[int]:
        """For each group, the number of pages per step."""
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
    """Totals of a run. If the run found a broken rule, they count only what happened before.

    Attributes:
        steps: number of random actions that were taken.
        verified_pages: number of loaded pages that had the KV of their key on every rank.
        failed_pages: number of pages of loads that were reported as failed.
        streamed_pages: number of pages that were promised while they were being read from disk.
        gds_pages: number of pages that were loaded from disk without a host slot.
        room_waits: number of lookups that had to wait for free host slots.
        room_given: number of lookups that got free host slots after they had waited for them.
        lookups_after_failures: number of lookups of requests that have had a failed load.
        stored_while_read: number of pages that were stored while they were being read from disk.
        actions: name of each action -> number of times that it was taken.
        stats: the manager's own totals.
        disk: totals of the disk tier; zeros if there is none.
        symbolic: totals of the symbolic or remote tier; zeros if there is neither.
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
