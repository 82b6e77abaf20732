"""Computes the size of a slot of the host pool, and where each rank's share of a slot lies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flexkv.c_ext import SlotImage
from flexkv.cache.tiers.plan import ImageNeeds
from flexkv.errors import GeometryError
from flexkv.facts.ranks import GroupFacts, RankFacts, RankPlace

DIGEST_BYTES = 8
"""Size of the digest of one run, in bytes."""


def digest_areas(runs: Sequence[int]) -> tuple[int, list[int]]:
    """Lays out the run digests of all ranks, one rank after another, behind the stripes. Used if no tier has a format
    that fixes the offsets of the digests.

    Args:
        runs: for each rank, the number of runs in its view (`len(view.runs)`).

    Returns:
        The size of all digests in bytes, and for each rank the offset of its digests from `SlotImage.trailer_offset`.
    """
    offsets = [DIGEST_BYTES * sum(runs[:rank]) for rank in range(len(runs))]
    return DIGEST_BYTES * sum(runs), offsets


@dataclass(frozen=True, slots=True)
class SlotGeometry:
    """The layout of a host slot. A slot holds one page of any KV group: a stripe per rank, then the trailer.

    Attributes:
        slot_bytes: size of a slot in bytes: the size of the largest group's slot image.
        places: for each rank and KV group, where the rank's share of a slot lies.
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
        """Computes the layout.

        Args:
            stripes: facts of the ranks that have their own stripe. If consecutive ranks hold the same bytes, only the
                first of them has its own stripe; the number of ranks per stripe is the same for all stripes.
            ranks: number of all ranks.
            verify: whether pages have digests.
            images: for each tier that keeps more than the stripes in a slot, the space that it needs, per group.

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
    """Returns the size of one group's slot image in bytes, and the place of each stripe in it."""
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
