"""Formats of the index: the row of a slot in memory, and the chunks of rows in the database, each with its own
digest.
"""

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
"""The row of one slot.

key: the page's key. generation: the page's generation; 0 if the slot is empty. expiry: Unix time in seconds at which
the page becomes a miss; 0 for never. used: roughly when the page was last used, in Unix milliseconds. tokens: number of
valid tokens in the page. group: number of the page's KV group.
"""

Rows = NDArray[np.void]
"""Rows of consecutive slots, dtype ROW, shape [slots]."""

CHUNK_SLOTS = 80
"""Rows per chunk. With the chunk's digest they take 3,848 bytes, so that a chunk and SQLite's own data fit into a 4 KiB
page.
"""

PLACE = struct.Struct("<II")
"""Slab number and chunk number. A chunk's digest covers both numbers, so that a chunk in the place of another chunk
counts as damaged."""
DIGEST = struct.Struct("<Q")
CHUNK_BYTES = CHUNK_SLOTS * ROW.itemsize + DIGEST.size

MetaValue = int | None


def pack_chunk(rows: Rows, slab: int, chunk: int) -> bytes:
    """The bytes of chunk number `chunk` of a slab's `rows` in the database."""
    content = rows[chunk * CHUNK_SLOTS : (chunk + 1) * CHUNK_SLOTS].tobytes()
    return content + DIGEST.pack(_chunk_digest(content, slab, chunk))


def unpack_chunk(content: object, slab: int, chunk: object) -> Rows:
    """The rows of a chunk, from its bytes in the database.

    Raises:
        ValueError: the chunk is damaged.
    """
    # SQLite stores values of any type in any column; if the schema is damaged, even in the column of the key.
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
    """The digest of the database's meta values, as a signed integer, because SQLite's integers are signed."""
    lines = "".join(f"{name}={value}\n" for name, value in sorted(meta.items()))
    return signed(c_ext.run_digest(lines.encode()))


def signed(number: int) -> int:
    """The signed integer with the same 64 bits as `number`, for SQLite."""
    return number - (1 << 64) if number >= 1 << 63 else number


def padded(slots: int) -> int:
    """The number of slots, rounded up to a multiple of CHUNK_SLOTS."""
    return -(-slots // CHUNK_SLOTS) * CHUNK_SLOTS
