"""Callbacks by which records and tiers report events, such as evictions, to the parts of a manager that plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flexkv.cache.base import TierId
from flexkv.facts.keys import Keys
from flexkv.facts.request_settings import RequestSettings


def _nothing(*_: object) -> None:
    """The value of each callback until the manager sets it."""


@dataclass(slots=True)
class Reactions:
    """The callbacks of one manager. The ledger and the tiers call them. Because ledger and tiers are made before the
    objects that provide the callbacks, the manager sets all callbacks at the end of its constructor.

    Attributes:
        evicted: called with (group, keys) when blocks were evicted from host memory to free slots.
        forgotten: called with (tier, group, keys) when the tier forgot pages that it turned out not to have.
        reused: called with (tier, group, keys) when pages of host memory were used again and the tier's write mode is
            REUSE.
        answered: called with (request, keys, start in tokens, settings) when a tier has answered a question for which
            the request waited.
        undone: called without arguments after an interrupted plan was undone. The objects that count pages then correct
            their counts.
    """

    evicted: Callable[[int, Keys], object] = _nothing
    forgotten: Callable[[TierId, int, Keys], object] = _nothing
    reused: Callable[[TierId, int, Keys], object] = _nothing
    answered: Callable[[str, Sequence[Keys], int, RequestSettings], object] = _nothing
    undone: Callable[[], object] = _nothing
