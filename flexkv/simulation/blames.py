"""Whom ranks and disks of a simulation blame for the pages that failed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from random import Random

import numpy as np

from flexkv.transfer.graph import NO_BLAMES, Blame, OpKind, OpResult, OpStatus, PageBlames

UNSAID = 0.2
"""Share of results that blame nobody page by page."""

ANY = tuple(Blame)
OF_MISSING = (Blame.UNKNOWN, Blame.PAGE)
OF_PLACES = (Blame.UNKNOWN, Blame.PAGE, Blame.NOBODY)
ASTRAY = (Blame.DISK, Blame.WAY)


def blames_of(
    random: Random, kind: OpKind, failed: Sequence[int], missing: Collection[int], astray_rate: float
) -> PageBlames:
    """`Blame` of each page in `failed`; empty where nobody says.

    Args:
        missing: those of them that are not where they were looked for. Of these none but the page itself is blamed.
        astray_rate: see `SimulationConfig`.
    """
    if random.random() < UNSAID:
        return NO_BLAMES

    def blame(page: int) -> Blame:
        if page in missing:
            return random.choice(OF_MISSING)
        if kind is not OpKind.GDS_READ:
            return random.choice(ANY)
        return random.choice(ASTRAY if random.random() < astray_rate else OF_PLACES)

    return np.array([blame(page) for page in failed], np.uint8)


def said_of(result: OpResult) -> dict[int, Blame]:
    """Of a result that failed page by page, whom it blames for each page that failed."""
    if result.status is not OpStatus.FAILED:
        return {}
    blames = result.blames.tolist() or [Blame.UNKNOWN] * len(result.failed)
    return {page: Blame(blame) for page, blame in zip(result.failed.tolist(), blames, strict=True)}
