"""The contract of a tier that a unit is to have and that is not open yet.

A tier's share of a slot is asked for before host memory is sized, and its folders are opened after: so nothing is ever
half open.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from flexkv.cache.tiers.tables import TierFactory
from flexkv.config import FlexKVConfig
from flexkv.facts.ranks import KvGroup, RankFacts, UnitOwner
from flexkv.transfer.host_pool import HostPool
from flexkv.transfer.slab_map import SlabMap


@dataclass(frozen=True, slots=True)
class UnitFacts:
    """What is known of a unit before it has memory.

    Attributes:
        groups: the unit's KV groups, which share slots.
        ranks: each rank that has a stripe of its own; one where all ranks hold the same bytes.
        recomputes: the engine computes what a load did not bring.
    """

    config: FlexKVConfig
    groups: tuple[KvGroup, ...]
    ranks: tuple[RankFacts, ...]
    owner: UnitOwner
    recomputes: bool


@dataclass(frozen=True, slots=True)
class ImageNeeds:
    """What a tier stores of one group's pages beside their stripes.

    Attributes:
        image_bytes: of a slot with everything that is stored.
        digest_offsets: where in a slot the run digests of each stripe lie; empty where none are kept.
    """

    image_bytes: int
    digest_offsets: tuple[int, ...]


class TierPlan(ABC):
    """One tier of a unit, decided on by the settings.

    Attributes:
        images: what it needs of a slot with a page of each group; empty for nothing.
        shares_pool: another process of its own maps the pool.
    """

    images: tuple[ImageNeeds, ...] = ()
    shares_pool: bool = False

    @abstractmethod
    def open(self, pool: HostPool, on_error: ExitStack) -> TierFactory | None:
        """Opens what the tier works with; None where there is nothing to open.

        Args:
            pool: with slots for all `images`.
            on_error: takes what is to be closed if the unit is not built in the end.

        Raises:
            FlexKVError: it cannot be opened; says which folder and why.
        """

    def slab_map(self) -> SlabMap | None:
        """What ranks need to move pages straight between this tier and their pools; None where they do not."""
        return None


PlanTier = Callable[[UnitFacts], TierPlan | None]
"""None: the settings want no such tier; a setting that cannot be had here is warned of."""
