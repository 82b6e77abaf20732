"""Draws why pages fail in a simulation, as its ranks and disks report it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from random import Random

import numpy as np

from flexkv.transfer.graph import NO_CAUSES, FailureCause, OpKind, OpResult, OpStatus, PageCauses

UNSAID = 0.2
"""Share of results that name no cause page by page."""

ANY = tuple(FailureCause)
OF_MISSING = (FailureCause.UNKNOWN, FailureCause.CONTENT)
OF_PLACES = (FailureCause.UNKNOWN, FailureCause.CONTENT, FailureCause.NOT_EXECUTED)
SOURCE_ERRORS = (FailureCause.SOURCE, FailureCause.TRANSPORT)


def causes_of(
    random: Random, kind: OpKind, failed: Sequence[int], missing: Collection[int], source_error_rate: float
) -> PageCauses:
    """`FailureCause` of each page in `failed`; empty if the result names none.

    Args:
        missing: the failed pages that were not at the place where the op looked for them. Their cause is CONTENT or
            unknown.
        source_error_rate: see `SimulationConfig`.
    """
    if random.random() < UNSAID:
        return NO_CAUSES

    def cause(page: int) -> FailureCause:
        if page in missing:
            return random.choice(OF_MISSING)
        if kind is not OpKind.GDS_READ:
            return random.choice(ANY)
        return random.choice(SOURCE_ERRORS if random.random() < source_error_rate else OF_PLACES)

    return np.array([cause(page) for page in failed], np.uint8)


def causes_by_page(result: OpResult) -> dict[int, FailureCause]:
    """Why each page failed, if the result says so page by page; else empty."""
    if result.status is not OpStatus.FAILED:
        return {}
    causes = result.causes.tolist() or [FailureCause.UNKNOWN] * len(result.failed)
    return {page: FailureCause(cause) for page, cause in zip(result.failed.tolist(), causes, strict=True)}
