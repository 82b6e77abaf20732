"""Assigns names to servers by rendezvous hashing. If a server is added or removed, only its share of the names moves.

A name belongs to the server whose seed, mixed with the name's digest, is largest (Thaler and Ravishankar, "Using
name-based mappings to increase hit rates", 1998). So all machines that use the same servers assign a name to the same
server, whatever order they list the servers in.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]


def spread(names: Sequence[bytes], seeds: Hashes) -> NDArray[np.intp]:
    """Returns the number of each name's server.

    Args:
        seeds: the servers' seeds, from `seeds_of`.
    """
    if len(seeds) == 1:
        return np.zeros(len(names), np.intp)
    # One digest is computed per name, not one per server and name, because a probe asks for hundreds of names within a
    # millisecond.
    return np.asarray(_mix(_digests(names)[:, None] ^ seeds[None, :]).argmax(axis=1), np.intp)


def seeds_of(identities: Sequence[str]) -> Hashes:
    return _digests([identity.encode() for identity in identities])


def _digests(texts: Sequence[bytes]) -> Hashes:
    joined = b"".join(blake2b(text, digest_size=8).digest() for text in texts)
    return np.frombuffer(joined, "<u8").astype(np.uint64)


def _mix(values: Hashes) -> Hashes:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, 2014): a change of any input bit changes about half of the
    output bits.
    """
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Hashes = values ^ (values >> np.uint64(31))
    return mixed
