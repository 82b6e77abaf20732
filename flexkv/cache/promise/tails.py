"""Looks up partial tails: the tokens after the last whole block, with one key for each possible number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from flexkv.cache.base import TailCandidates
from flexkv.cache.ledger.hub import Hub
from flexkv.cache.ledger.leases import Lease
from flexkv.facts.keys import Keys


def common_tail(
    tail: Sequence[TailCandidates | None],
    end_block: int,
    present: Callable[[int, Keys], NDArray[np.bool_]],
) -> int:
    """Returns the number of tokens of the longest tail that all groups have; 0 if there is none.

    Args:
        tail: per group, the candidates.
        end_block: index in the request of the block that the tail partly fills.
        present: returns which keys of a group count as present, bool [keys].
    """
    lengths: list[set[int]] = []
    for group, candidates in enumerate(tail):
        if candidates is None or candidates.base_block != end_block:
            return 0
        lengths.append(set(candidates.tokens[present(group, candidates.keys)].tolist()))
    return max(set.intersection(*lengths), default=0)


def tail_key_of(candidates: TailCandidates, tokens: int) -> Keys:
    """Returns the key of the candidate with `tokens` tokens, shape [1, KEY_BYTES]."""
    at = np.flatnonzero(candidates.tokens == tokens)[:1]
    return np.ascontiguousarray(candidates.keys[at])


def lease_tail(hub: Hub, lease: Lease, tail: Sequence[TailCandidates | None], end_block: int) -> None:
    """Pins the longest tail that all groups have in host memory, and adds it to the lease. The tail partly fills block
    `end_block` of the request."""
    found = common_tail(tail, end_block, hub.there)
    if not found:
        return
    for group, candidates in enumerate(tail):
        assert candidates is not None
        entries = hub.index.find(group, tail_key_of(candidates, found))
        own = lease.groups[group]
        own.entries = np.concatenate((own.entries, entries))
        own.slots = np.concatenate((own.slots, hub.index.pin(entries)))
    lease.tail_tokens = found
