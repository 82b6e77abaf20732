"""How a store holds a page: under a name, as a value with the stripes of all ranks and a trailer that verifies them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flexkv.facts.keys import KEY_BYTES, Keys
from flexkv.remote.base import Part
from flexkv.storage.base import DiskGroup
from flexkv.storage.group_tables import codec_of, format_text
from flexkv.storage.tags import make_tags

VALUE_VERSION = 1
"""Version of names and values together. Other versions have other names, so no engine reads a value that it does not
know.
"""

NO_GENERATIONS = np.zeros(1, np.uint64)


@dataclass(frozen=True, slots=True)
class ValueOwner:
    """Names the owner of pages. Pages of equal owners may be exchanged.

    Attributes:
        fingerprint: 32 bytes; everything that must be equal before two blocks' KV may be exchanged.
        weights: 32 bytes that name all content of the weights; empty if the fingerprint does so.
        tenant: separates users of one store; values of other tenants are never found.
    """

    fingerprint: bytes
    tenant: str = ""
    weights: bytes = b""

    def digest(self, encoding: str) -> bytes:
        """32 bytes that differ between any two owners, encodings of pages, or versions of values."""
        parts = (
            b"flexkv value",
            str(VALUE_VERSION).encode(),
            self.fingerprint,
            self.tenant.encode(),
            encoding.encode(),
            *([self.weights] if self.weights else ()),
        )
        framed = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
        return hashlib.sha256(framed).digest()


class ValueFormat:
    """The values of one KV group's pages. Specified in docs/remote.md.

    A value consists of the stripes of all ranks, without gaps, and the trailer of a page on disk (docs/disk-format.md),
    whose place is filled with bytes of the owner's digest. One value holds all ranks' stripes, so a single rank's share
    cannot be missing.

    Args:
        group: the pages' geometry and encoding; with `host_digests` a slot has its own run digests, which go into the
            trailer.
        number: number of the KV group.

    Attributes:
        value_bytes: bytes of every value.
        trailer_bytes: bytes of its trailer.
    """

    def __init__(self, owner: ValueOwner, group: DiskGroup, number: int) -> None:
        self._codec = codec_of(group, number)
        digest = owner.digest(format_text(group, str(VALUE_VERSION)))
        self._prefix = f"flexkv/{VALUE_VERSION}/{digest[:16].hex()}/{number}/"
        self._place = int.from_bytes(digest[16:24], "little")
        self._stripes = [
            slice(start, start + size)
            for rank, size in enumerate(group.stripe_bytes)
            for start in (self._codec.stripe_offset(rank),)
        ]
        self.trailer_bytes = self._codec.trailer_bytes
        self.value_bytes = sum(group.stripe_bytes) + self.trailer_bytes

    def name(self, key: bytes) -> str:
        """The name of a page's value; `key` has 16 bytes."""
        return self._prefix + key.hex()

    def names(self, keys: Keys) -> list[str]:
        """The names of several pages' values."""
        digits, size = keys.tobytes().hex(), 2 * KEY_BYTES
        return [self._prefix + digits[at : at + size] for at in range(0, len(digits), size)]

    def parts(self, slot: Part, trailer: Part) -> list[Part]:
        """A value in memory: its stripes in a slot of the host pool, and its trailer elsewhere."""
        return [*(slot[stripe] for stripe in self._stripes), trailer]

    def seal(
        self, slot: Part, trailer: Part, key: NDArray[np.uint8], tokens: int, expiry: int, now: int
    ) -> None:
        """Makes the trailer of a page in a slot.

        Args:
            key: uint8 [16].
            tokens: valid tokens.
            expiry: unix seconds from which on the page is a miss; 0 for never.
            now: unix seconds.
        """
        tag = make_tags(key.reshape(1, -1), 0, NO_GENERATIONS, tokens, np.full(1, expiry, np.uint64))
        self._codec.seal_apart(slot, trailer, self._place, 0, tag.tobytes(), now)

    def check(
        self, slot: Part, trailer: Part, key: NDArray[np.uint8], tokens: int, now: int
    ) -> tuple[str, str]:
        """Checks that the value in a slot is the page that was asked for; returns `("none", "")`, or the name of the
        miss (`c_ext.PageCodec.check`) and the reason."""
        tag = make_tags(key.reshape(1, -1), 0, NO_GENERATIONS, tokens)
        return self._codec.check_apart(slot, trailer, self._place, 0, tag.tobytes(), now)
