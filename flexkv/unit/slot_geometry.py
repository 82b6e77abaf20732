"""Bytes of a slot of the host pool, and each rank's share of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flexkv.c_ext import SlotImage
from flexkv.cache.tiers.plan import ImageNeeds
from flexkv.errors import GeometryError
from flexkv.facts.ranks import GroupFacts, RankFacts, RankPlace

DIGEST_BYTES = 8
"""Bytes of one run's digest."""


def digest_areas(runs: Sequence[int]) -> tuple[int, list[int]]:
    """Lays out the run digests of all ranks after the stripes, if no tier's format says where they lie.

    Args:
        runs: how many runs each rank's view has (`len(view.runs)`).

    Returns:
        Bytes of all areas, and each rank's offset from `SlotImage.trailer_offset`.
    """
    offsets = [DIGEST_BYTES * sum(runs[:rank]) for rank in range(len(runs))]
    return DIGEST_BYTES * sum(runs), offsets


@dataclass(frozen=True, slots=True)
class SlotGeometry:
    """One slot holds a block of any one group, of every rank: stripes, then the trailer.

    Attributes:
        slot_bytes: bytes of the largest group's image.
        places: each rank's places, one per group.
    """

    slot_bytes: int
    places: tuple[tuple[RankPlace, ...], ...]

    @classmethod
    def of(
        cls,
        stripes: Sequence[RankFacts],
        ranks: int,
        verify: bool,
        images: Sequence[tuple[ImageNeeds, ...]],
    ) -> SlotGeometry:
        """
        Args:
            stripes: facts of the ranks that have their own stripe, which is the first of each row of `ranks` that hold
                the same bytes. All rows are equally long.
            verify: whether pages have digests.
            images: for each tier that stores more than the stripes, its needs by group.

        Raises:
            GeometryError: two tiers need different images.
        """
        if len(set(images)) > 1:
            raise GeometryError(f"the tiers store pages in different images: {images}")
        groups = [
            _places([rank.groups[group] for rank in stripes], verify, images[0][group] if images else None)
            for group in range(len(stripes[0].groups))
        ]
        shares = [rank * len(stripes) // ranks for rank in range(ranks)]
        return cls(
            max(size for size, _ in groups), tuple(tuple(places[s] for _, places in groups) for s in shares)
        )


def _places(
    stripes: Sequence[GroupFacts], verify: bool, needs: ImageNeeds | None
) -> tuple[int, list[RankPlace]]:
    """Bytes of one group's image, and the place of each stripe in it."""
    trailer_bytes, areas = digest_areas([stripe.runs for stripe in stripes]) if verify else (0, [])
    image = SlotImage([stripe.stripe_bytes for stripe in stripes], trailer_bytes)
    digests = [image.trailer_offset + area for area in areas]
    size = image.total_bytes
    if needs is not None:
        size, digests = needs.image_bytes, list(needs.digest_offsets)
    places = [
        RankPlace(image.stripe_offset(stripe), digests[stripe] if digests else None)
        for stripe in range(len(stripes))
    ]
    return size, places
