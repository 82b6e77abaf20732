"""A goal, and whether what was measured reaches it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Goal:
    """What is to be reached.

    Attributes:
        found: what was measured, the worst of its rows; None where nothing was.
        at_most: `reach` is an upper bound.
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
