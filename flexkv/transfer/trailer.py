"""Where the run digests of each rank lie in a slot image without a disk tier; with one, its format says where."""

from __future__ import annotations

from collections.abc import Sequence

DIGEST_BYTES = 8
"""Of one run."""


def digest_areas(runs: Sequence[int]) -> tuple[int, list[int]]:
    """Room in the trailer for the run digests of all ranks of a unit.

    Args:
        runs: of each rank, how many runs its view has (`len(view.runs)`).

    Returns:
        Bytes of the trailer, and where in it each rank's digests start: to be added to `SlotImage.trailer_offset`
        and given to `TransferEngine.attach_view` as `digest_offset`.
    """
    offsets = [DIGEST_BYTES * sum(runs[:rank]) for rank in range(len(runs))]
    return DIGEST_BYTES * sum(runs), offsets
