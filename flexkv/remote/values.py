"""The form in which a store holds a page: its name, and its value, which consists of the stripes of all ranks and a
trailer that verifies them.
"""

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
"""The common version of names and values. Names depend on it, so no engine reads a value of a version that it does not
know.
"""

NO_GENERATIONS = np.zeros(1, np.uint64)


@dataclass(frozen=True, slots=True)
class ValueOwner:
    """Identifies the owner of pages. Units with equal owners may use each other's pages.

    Attributes:
        fingerprint: 32-byte digest of everything that must be equal for units to use each other's blocks.
        weights: 32-byte digest of the whole content of the weights; empty if the fingerprint covers it.
        tenant: separates users of one store. Values of other tenants are never found.
    """

    fingerprint: bytes
    tenant: str = ""
    weights: bytes = b""

    def digest(self, encoding: str) -> bytes:
        """Returns 32 bytes that differ if the owner, the pages' encoding or the version of values differs."""
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
    """The format of the values for one KV group's pages. Specified in docs/remote.md.

    A value consists of the stripes of all ranks, without gaps, and a trailer. The trailer has the format of a trailer
    on disk (docs/disk-format.md), except that its field for the slab's id contains bytes of the owner's digest. Because
    one value holds the stripes of all ranks, a single rank's stripe cannot be missing.

    Args:
        group: encoding of the pages. If `host_digests` is set, the host slot contains the run digests, which are copied
            to the trailer.
        number: number of the KV group.

    Attributes:
        value_bytes: bytes of each value.
        trailer_bytes: bytes of each value's trailer.
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
        """The name of the value for the page with this 16-byte key."""
        return self._prefix + key.hex()

    def names(self, keys: Keys) -> list[str]:
        """The names of the values for the pages with these keys."""
        digits, size = keys.tobytes().hex(), 2 * KEY_BYTES
        return [self._prefix + digits[at : at + size] for at in range(0, len(digits), size)]

    def parts(self, slot: Part, trailer: Part) -> list[Part]:
        """The parts of a value in memory: the stripes in a host slot, then the trailer."""
        return [*(slot[stripe] for stripe in self._stripes), trailer]

    def seal(
        self, slot: Part, trailer: Part, key: NDArray[np.uint8], tokens: int, expiry: int, now: int
    ) -> None:
        """Writes the trailer for the page in a host slot.

        Args:
            key: the block's key, uint8 [16].
            tokens: number of valid tokens.
            expiry: Unix time in seconds at which the page becomes a miss; 0 for never.
            now: the time now, in Unix seconds.
        """
        tag = make_tags(key.reshape(1, -1), 0, NO_GENERATIONS, tokens, np.full(1, expiry, np.uint64))
        self._codec.seal_apart(slot, trailer, self._place, 0, tag.tobytes(), now)

    def check(
        self, slot: Part, trailer: Part, key: NDArray[np.uint8], tokens: int, now: int
    ) -> tuple[str, str]:
        """Checks whether the stripes in a host slot and the trailer are the requested page. Returns `("none", "")` if
        they are, else the name of the miss (`c_ext.PageCodec.check`) and the reason.
        """
        tag = make_tags(key.reshape(1, -1), 0, NO_GENERATIONS, tokens)
        return self._codec.check_apart(slot, trailer, self._place, 0, tag.tobytes(), now)
