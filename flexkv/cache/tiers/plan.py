"""The contract of a planned tier: a tier that the unit's settings enable and that is not open yet.

The space that a tier needs in each slot must be known before host memory is sized. The tier's storage is opened only
after that, so that no tier is open if host memory cannot be allocated.
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
        config: the unit's settings.
        groups: the unit's KV groups. They share slots.
        ranks: facts about each rank that has a stripe of its own; one rank if all ranks have the same bytes.
        owner: the unit, engine and model that own the pages.
        recomputes: whether the engine computes the pages that a load did not bring.
        share: the host memory and folders that the unit shares with other units of its user; None if it shares nothing.
    """

    config: FlexKVConfig
    groups: tuple[KvGroup, ...]
    ranks: tuple[RankFacts, ...]
    owner: UnitOwner
    recomputes: bool
    share: PeerShare | None = None


@dataclass(frozen=True, slots=True)
class ImageNeeds:
    """The space that a tier needs in each host slot for a page of one group.

    Attributes:
        image_bytes: size of the slot in bytes: the stripes and everything else that the tier keeps in it.
        digest_offsets: byte offset in the slot of each stripe's run digests; empty if the slot contains no digests.
    """

    image_bytes: int
    digest_offsets: tuple[int, ...]


class TierPlan(ABC):
    """One planned tier of a unit.

    Attributes:
        images: per group, the space that the tier needs in each host slot; empty if it needs none besides the stripes.
        shares_pool: whether another process maps the host pool for this tier.
    """

    images: tuple[ImageNeeds, ...] = ()
    shares_pool: bool = False

    @abstractmethod
    def open(self, pool: HostPool, on_error: ExitStack) -> TierFactory | None:
        """Opens the tier's storage, and returns the factory of the tier; None if there is nothing to open.

        Args:
            pool: the host pool, whose slots are large enough for all `images`.
            on_error: stack to which `open` adds callbacks that close the storage if building the unit fails later.

        Raises:
            FlexKVError: the storage cannot be opened; the message says which folder and why.
        """

    def slab_map(self) -> SlabMap | None:
        """Returns the slabs to and from which ranks move pages without passing through host memory; None if they move
        none."""
        return None


PlanTier = Callable[[UnitFacts], TierPlan | None]
"""A function that plans a tier, and returns None if the settings do not enable it. It logs a warning about settings
that this engine or machine cannot fulfil."""
