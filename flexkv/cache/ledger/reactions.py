"""Callbacks for pages that leave, or turn out not to be where the tables say. They are the only late binding in a
manager.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flexkv.cache.base import TierId
from flexkv.facts.keys import Keys
from flexkv.facts.request_settings import RequestSettings


def _nothing(*_: object) -> None:
    """A placeholder until the manager is fully constructed."""


@dataclass(slots=True)
class Reactions:
    """Callbacks for the ledger and the tiers, which are constructed before the packages that act. The manager sets all
    of them once, at the end of its constructor.

    Attributes:
        evicted: (group, keys) these blocks left host memory to make room.
        forgotten: (tier, group, keys) the tier forgot these pages, because it did not have them.
        reused: (tier, group, keys) these pages of host memory were used again, and the tier writes reused pages.
        answered: (request, keys, start in tokens, settings) a tier has answered a question that the request waited for.
        undone: () an interrupted plan was undone; objects that keep their own counts must recount.
    """

    evicted: Callable[[int, Keys], object] = _nothing
    forgotten: Callable[[TierId, int, Keys], object] = _nothing
    reused: Callable[[TierId, int, Keys], object] = _nothing
    answered: Callable[[str, Sequence[Keys], int, RequestSettings], object] = _nothing
    undone: Callable[[], object] = _nothing
