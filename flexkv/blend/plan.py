"""Chooses which reused rows of a blended prompt are computed again (CacheBlend, arXiv:2405.16444)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flexkv.errors import ConfigError

Rows = NDArray[np.int64]
"""Numbers of rows, ascending, int64."""


@dataclass(frozen=True, slots=True)
class BlendPlan:
    """Determines how many of the reused rows are computed again, and which layers select these rows.

    Layers before the first check layer compute every row. A check layer compares each reused row's cached key with the
    freshly computed key, and selects the rows whose keys differ most. From a check layer on, only the selected rows and
    the rows that the cache does not cover are computed.

    Attributes:
        check_layers: numbers of the check layers, ascending. Layer 0 cannot be a check layer, because its keys do not
            depend on the text before the segment.
        ratios: for each check layer, the share of all reused rows that is computed from that layer on; the shares must
            not increase. If the first ratio is 0, nothing is checked, and reused rows are used unchanged in every
            layer.

    Raises:
        ConfigError: a value is not allowed. The message names the value and what is allowed.
    """

    check_layers: tuple[int, ...] = (1,)
    ratios: tuple[float, ...] = (0.15,)

    def __post_init__(self) -> None:
        if not self.check_layers or len(self.check_layers) != len(self.ratios):
            raise ConfigError(
                f"check_layers {self.check_layers} and ratios {self.ratios}: as many of each, at least one"
            )
        if self.check_layers[0] < 1 or any(b <= a for a, b in zip(self.check_layers, self.check_layers[1:])):  # noqa: B905
            raise ConfigError(f"check_layers {self.check_layers}: layers from 1 on, ascending")
        if not all(0.0 <= ratio <= 1.0 for ratio in self.ratios):
            raise ConfigError(f"ratios {self.ratios}: allowed are 0 to 1")
        if any(b > a for a, b in zip(self.ratios, self.ratios[1:])):  # noqa: B905
            raise ConfigError(f"ratios {self.ratios}: a later layer may not compute more rows")

    @classmethod
    def of_ratio(cls, ratio: float) -> BlendPlan:
        """Returns the plan with one check layer, layer 1."""
        return cls((1,), (ratio,))

    def ratio_at(self, layer: int) -> float | None:
        """Returns the ratio of check layer `layer`; None if the layer is not a check layer."""
        return dict(zip(self.check_layers, self.ratios, strict=True)).get(layer)


def rows_to_keep(
    difference: NDArray[np.float64], reused: NDArray[np.bool_], budget: int, run_rows: int = 1
) -> Rows:
    """Returns the rows to keep computing: all rows that are not reused, and about `budget` of the reused rows.

    Each stretch of consecutive reused rows is cut into runs of `run_rows` rows, the last of which may be shorter. The
    runs with the greatest mean difference are kept; of two runs with equal means, the earlier comes first. A run is
    kept completely or not at all, so up to `run_rows` - 1 more reused rows than `budget` may be kept. A NaN counts as
    the greatest difference.

    Args:
        difference: squared distance between the cached and the fresh key of each row, [rows]; ignored for rows that are
            not reused.
        reused: whether each row is reused, bool [rows].
        budget: number of reused rows to keep.
        run_rows: rows per run.
    """
    others, candidates = np.flatnonzero(~reused), np.flatnonzero(reused)
    if budget <= 0 or not len(candidates):
        return others.astype(np.int64)
    measured = np.nan_to_num(difference[candidates], nan=np.inf, posinf=np.inf)
    stretch = np.maximum.accumulate(np.where(np.diff(candidates, prepend=-2) != 1, candidates, 0))
    begins = (candidates - stretch) % run_rows == 0
    first = np.flatnonzero(begins)
    lengths = np.diff(first, append=len(candidates))
    order = np.argsort(-np.add.reduceat(measured, first) / lengths, kind="stable")
    enough = int(np.searchsorted(np.cumsum(lengths[order]), budget)) + 1
    kept = np.isin(np.cumsum(begins) - 1, order[:enough])
    return np.union1d(others, candidates[kept]).astype(np.int64)


def budget_of(ratio: float, reused: int) -> int:
    """Returns the number of rows to compute again out of `reused` reused rows: at least one if `ratio` and `reused` are
    above 0.
    """
    return 0 if ratio == 0.0 or reused == 0 else max(1, round(ratio * reused))


def check_layers_exist(plan: BlendPlan, layers: int) -> None:
    """Checks that a model with `layers` layers has all check layers of the plan.

    Raises:
        ConfigError: the model lacks a check layer.
    """
    missing: Sequence[int] = [layer for layer in plan.check_layers if layer >= layers]
    if missing:
        raise ConfigError(f"check layer {missing[0]}: the model has layers 0 to {layers - 1}")
