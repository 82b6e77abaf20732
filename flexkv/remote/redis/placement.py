"""Assigns names to servers by rendezvous hashing: if a server comes or goes, only its share of the names moves.

Every machine that names the same servers, in whatever order, asks the same one for a name. A name goes to the server
whose seed, mixed with the name's digest, is largest (Thaler and Ravishankar, "Using name-based mappings to increase hit
rates", 1998).
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]


def spread(names: Sequence[bytes], seeds: Hashes) -> NDArray[np.intp]:
    """The number of each name's server.

    Args:
        seeds: `seeds_of` the servers.
    """
    if len(seeds) == 1:
        return np.zeros(len(names), np.intp)
    # Computes one digest per name, not one per server and name, because a probe asks for hundreds of names
    # within a millisecond.
    return np.asarray(_mix(_digests(names)[:, None] ^ seeds[None, :]).argmax(axis=1), np.intp)


def seeds_of(identities: Sequence[str]) -> Hashes:
    return _digests([identity.encode() for identity in identities])


def _digests(texts: Sequence[bytes]) -> Hashes:
    joined = b"".join(blake2b(text, digest_size=8).digest() for text in texts)
    return np.frombuffer(joined, "<u8").astype(np.uint64)


def _mix(values: Hashes) -> Hashes:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, 2014): each bit of the input changes half of the output's."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Hashes = values ^ (values >> np.uint64(31))
    return mixed
