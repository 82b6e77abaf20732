"""The contract of a planned tier: the unit's settings want it, and it is not open yet.

A tier's share of each slot must be known before host memory is sized, and its folders are opened afterwards, so that a
tier is never half open.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from flexkv.cache.tiers.tables import TierFactory
from flexkv.config import FlexKVConfig
from flexkv.facts.ranks import KvGroup, RankFacts, UnitOwner
from flexkv.peers.share import PeerShare
from flexkv.transfer.host_pool import HostPool
from flexkv.transfer.slab_map import SlabMap


@dataclass(frozen=True, slots=True)
class UnitFacts:
    """Facts about a unit before its host memory is allocated.

    Attributes:
        groups: the unit's KV groups, which share slots.
        ranks: the ranks with a stripe of their own; one if all ranks hold the same bytes.
        recomputes: the engine computes the pages that a load did not bring.
        share: the parts that the unit shares with others of its user on this machine; None for none.
    """

    config: FlexKVConfig
    groups: tuple[KvGroup, ...]
    ranks: tuple[RankFacts, ...]
    owner: UnitOwner
    recomputes: bool
    share: PeerShare | None = None


@dataclass(frozen=True, slots=True)
class ImageNeeds:
    """The space that a tier needs in each slot for one group's pages, besides their stripes.

    Attributes:
        image_bytes: bytes of a slot with everything that the tier stores.
        digest_offsets: offset in a slot of each stripe's run digests; empty if none are kept.
    """

    image_bytes: int
    digest_offsets: tuple[int, ...]


class TierPlan(ABC):
    """One tier of a unit that the settings want.

    Attributes:
        images: per group, what the tier needs in each slot; empty for nothing.
        shares_pool: the tier has a separate process that maps the pool.
    """

    images: tuple[ImageNeeds, ...] = ()
    shares_pool: bool = False

    @abstractmethod
    def open(self, pool: HostPool, on_error: ExitStack) -> TierFactory | None:
        """Opens the tier's storage, and returns the factory of the tier; None if there is nothing to open.

        Args:
            pool: host memory with room for all `images` in each slot.
            on_error: `open` adds to this what must be closed if building the unit fails later.

        Raises:
            FlexKVError: the storage cannot be opened; the message says which folder and why.
        """

    def slab_map(self) -> SlabMap | None:
        """Data for ranks that move pages straight between this tier and their pools; None if they do not."""
        return None


PlanTier = Callable[[UnitFacts], TierPlan | None]
"""Plans a tier; None if the settings want no such tier. Warns of settings that cannot be met here."""
