"""Looks keys up in the index of a tier that keeps expired entries. Such entries are misses, but are not removed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from flexkv.c_ext import BlockIndex
from flexkv.cache.base import NO_ENTRY, EntryIds
from flexkv.facts.keys import Keys

Expired = Callable[[EntryIds], NDArray[np.bool_]]
"""A function that returns which entries have expired, bool [entries]."""


def unexpired_leading(presence: BlockIndex, group: int, keys: Keys, expired: Expired) -> EntryIds:
    """Implements `Tier.leading` without removing expired entries."""
    entries = presence.match_prefix(group, keys)
    past = expired(entries)
    return entries[: int(np.argmax(past))] if past.any() else entries


def unexpired_present(presence: BlockIndex, group: int, keys: Keys, expired: Expired) -> NDArray[np.bool_]:
    """Implements `Tier.present` without removing expired entries."""
    entries = presence.find(group, keys)
    there: NDArray[np.bool_] = entries != NO_ENTRY
    there[there] = ~expired(entries[there])
    return there
