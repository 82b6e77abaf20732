"""Bytes of a slot of the host pool, and each rank's share of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flexkv.c_ext import SlotImage
from flexkv.cache.tiers.plan import ImageNeeds
from flexkv.errors import GeometryError
from flexkv.unit.ranks import GroupFacts, RankFacts, RankPlace

DIGEST_BYTES = 8
"""Of one run."""


def digest_areas(runs: Sequence[int]) -> tuple[int, list[int]]:
    """Room for the run digests of all ranks behind the stripes, where no tier's format says where they lie.

    Args:
        runs: of each rank, how many runs its view has (`len(view.runs)`).

    Returns:
        Bytes of all areas, and where each rank's starts: to be added to `SlotImage.trailer_offset`.
    """
    offsets = [DIGEST_BYTES * sum(runs[:rank]) for rank in range(len(runs))]
    return DIGEST_BYTES * sum(runs), offsets


@dataclass(frozen=True, slots=True)
class SlotGeometry:
    """One slot holds a block of any one group, of every rank: stripes, then the trailer.

    Attributes:
        slot_bytes: of the largest group's image.
        places: of each rank, one a group.
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
            stripes: of the first of those `ranks` in a row that hold the same bytes, as many everywhere.
            verify: pages have digests.
            images: what each tier that stores anything beside the stripes stores, by group.

        Raises:
            GeometryError: two tiers want other images.
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
    """Bytes of one group's image, and where each stripe lies in it."""
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
