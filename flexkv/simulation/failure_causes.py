"""Draws the failure causes that a simulation's ranks and disks report for failed pages."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from random import Random

import numpy as np

from flexkv.transfer.graph import NO_CAUSES, FailureCause, OpKind, OpResult, OpStatus, PageCauses

UNSAID = 0.2
"""Share of results that report failed pages without the causes of their failures."""

ANY = tuple(FailureCause)
OF_MISSING = (FailureCause.UNKNOWN, FailureCause.CONTENT)
OF_PLACES = (FailureCause.UNKNOWN, FailureCause.CONTENT, FailureCause.NOT_EXECUTED)
SOURCE_ERRORS = (FailureCause.SOURCE, FailureCause.TRANSPORT)


def causes_of(
    random: Random, kind: OpKind, failed: Sequence[int], missing: Collection[int], source_error_rate: float
) -> PageCauses:
    """Draws the `FailureCause` of each page in `failed`. Returns an empty array for a result that gives no causes.

    Args:
        failed: positions of the op's failed pages.
        missing: positions of the failed pages that were not in the slot from which the op tried to read them. Their
            cause is CONTENT or UNKNOWN.
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
    """Returns the cause of each failed page; UNKNOWN if the result has no causes. Empty if the result's status is not
    FAILED."""
    if result.status is not OpStatus.FAILED:
        return {}
    causes = result.causes.tolist() or [FailureCause.UNKNOWN] * len(result.failed)
    return {page: FailureCause(cause) for page, cause in zip(result.failed.tolist(), causes, strict=True)}
