"""Bytes of a slot of the host pool, and each rank's share of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flexkv.c_ext import SlotImage
from flexkv.cache.tiers.plan import ImageNeeds
from flexkv.errors import GeometryError
from flexkv.transfer.trailer import digest_areas
from flexkv.unit.ranks import RankFacts, RankPlace


@dataclass(frozen=True, slots=True)
class SlotGeometry:
    """One slot holds a block of every rank: stripes, then the trailer.

    Attributes:
        places: of each rank.
    """

    slot_bytes: int
    places: tuple[RankPlace, ...]

    @classmethod
    def of(
        cls, stripes: Sequence[RankFacts], ranks: int, verify: bool, images: Sequence[ImageNeeds]
    ) -> SlotGeometry:
        """
        Args:
            stripes: of each rank that has one of its own; of one where all `ranks` hold the same bytes.
            verify: pages have digests.
            images: what tiers store beside the stripes.

        Raises:
            GeometryError: two tiers want other images.
        """
        if len(set(images)) > 1:
            raise GeometryError(f"the tiers store pages in different images: {images}")
        trailer_bytes, areas = digest_areas([rank.runs for rank in stripes]) if verify else (0, [])
        image = SlotImage([rank.stripe_bytes for rank in stripes], trailer_bytes)
        digests = [image.trailer_offset + area for area in areas]
        slot_bytes = image.total_bytes
        if images:
            slot_bytes = images[0].image_bytes
            digests = list(images[0].digest_offsets)
        shares = range(ranks) if len(stripes) == ranks else [0] * ranks
        return cls(
            slot_bytes,
            tuple(RankPlace(image.stripe_offset(s), digests[s] if digests else None) for s in shares),
        )
