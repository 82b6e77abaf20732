"""What one manager knows at any time, for the parts that plan from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flexkv.cache.ledger.hub import Hub
from flexkv.cache.ledger.ops import OpTable
from flexkv.cache.ledger.requests import RequestTable
from flexkv.cache.tiers.contract import Tier


@dataclass(frozen=True, slots=True)
class CacheTables:
    """Of one manager: where pages are, which ops are in flight, and which requests have leases or wait.

    In a file of its own, as the parts of the manager that share it import each other.

    Attributes:
        tiers: by number.
        clock: seconds, never running backwards.
    """

    tiers: Sequence[Tier]
    hub: Hub
    ops: OpTable
    requests: RequestTable
    clock: Callable[[], float]
