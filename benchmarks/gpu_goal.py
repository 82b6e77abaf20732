"""A goal for a measured figure, and the verdict whether a measurement reaches the goal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Goal:
    """A figure that a measurement should reach.

    Attributes:
        found: the measured figure; if several rows have one, the worst of them. None if nothing was measured.
        at_most: whether `reach` is an upper bound; otherwise it is a lower bound.
    """

    what: str
    reach: float
    found: float | None
    at_most: bool = False

    @property
    def verdict(self) -> str:
        if self.found is None:
            return "not measured"
        good = self.found <= self.reach if self.at_most else self.found >= self.reach
        return "reached" if good else "**missed**"


def least(values: Iterable[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)


def most(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
