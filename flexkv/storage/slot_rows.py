"""The index's row of each slot, and the chunks of rows that the database keeps, each with a digest of its own."""

from __future__ import annotations

import struct
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from flexkv import c_ext

ROW = np.dtype(
    [
        ("key", "u1", 16),
        ("generation", "<u8"),
        ("expiry", "<u8"),
        ("used", "<u8"),
        ("tokens", "<u4"),
        ("group", "<u4"),
    ]
)
"""The row of one slot. generation: 0 for an empty slot. used: unix milliseconds of the last use, roughly. group: number
of the KV group."""

Rows = NDArray[np.void]
"""dtype ROW, shape [slots of the slab]."""

CHUNK_SLOTS = 80
"""Rows per chunk. With the digest they are 3,848 bytes, which fit a 4 KiB page together with SQLite's own."""

PLACE = struct.Struct("<II")
"""slab, chunk: a chunk's digest covers them, so that a chunk in the wrong place does not pass."""
DIGEST = struct.Struct("<Q")
CHUNK_BYTES = CHUNK_SLOTS * ROW.itemsize + DIGEST.size

MetaValue = int | None


def pack_chunk(rows: Rows, slab: int, chunk: int) -> bytes:
    """The bytes that the database keeps for chunk number `chunk` of the slab's `rows`."""
    content = rows[chunk * CHUNK_SLOTS : (chunk + 1) * CHUNK_SLOTS].tobytes()
    return content + DIGEST.pack(_chunk_digest(content, slab, chunk))


def unpack_chunk(content: object, slab: int, chunk: object) -> Rows:
    """The rows of a chunk as the database kept it.

    Raises:
        ValueError: the chunk is damaged.
    """
    # SQLite stores any type in any column, and with a damaged schema even in the key's.
    if not isinstance(chunk, int):
        raise ValueError(f"a chunk of slab {slab} has the number {chunk!r:.40}")
    if not isinstance(content, bytes) or len(content) != CHUNK_BYTES:
        size = len(content) if isinstance(content, bytes) else f"{content!r:.40}"
        raise ValueError(f"chunk {chunk} of slab {slab} has {size} instead of {CHUNK_BYTES} bytes")
    rows, (digest,) = content[: -DIGEST.size], DIGEST.unpack(content[-DIGEST.size :])
    if digest != _chunk_digest(rows, slab, chunk):
        raise ValueError(f"chunk {chunk} of slab {slab} is damaged")
    return np.frombuffer(rows, ROW)


def _chunk_digest(content: bytes, slab: int, chunk: int) -> int:
    return c_ext.run_digest(PLACE.pack(slab, chunk & 0xFFFFFFFF) + content)


def meta_digest(meta: Mapping[str, MetaValue]) -> int:
    """The digest of everything that the database holds beside the rows; signed, as SQLite's integers are."""
    lines = "".join(f"{name}={value}\n" for name, value in sorted(meta.items()))
    return signed(c_ext.run_digest(lines.encode()))


def signed(number: int) -> int:
    """A 64-bit number as the signed integer that SQLite keeps."""
    return number - (1 << 64) if number >= 1 << 63 else number


def padded(slots: int) -> int:
    """How many rows the chunks for this many slots have, rounded up to whole chunks."""
    return -(-slots // CHUNK_SLOTS) * CHUNK_SLOTS
