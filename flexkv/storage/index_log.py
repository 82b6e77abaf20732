"""Finds out whether the write-ahead log of an index's database is damaged.

SQLite reads the log, a file beside the database, up to the first damaged frame and ignores the rest. So a flipped bit
silently undoes the commit to which its frame belongs, and all later ones. A crash may leave a log that merely ends in
the middle of a write. Such a log loses nothing that was committed, so it counts as undamaged.

A power cut during a commit may leave later frames of the commit on the disk without an earlier one. That looks the same
as a flipped bit in a synced commit, so both count as damage. Rebuilding an intact index only costs a read of the
trailers, but an index that lacks a synced commit would lose pages that were reported as durable.
"""

from __future__ import annotations

import struct
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

HEADER = struct.Struct(">IIIIIIII")
"""The log's header: magic, version, page size, checkpoint number, two salts, two checksums."""
FRAME = struct.Struct(">IIIIII")
"""The header of a frame: page number, number of pages of the database if the frame ends a commit (else 0), two salts,
two checksums.
"""
MAGIC = 0x377F0682
"""The magic number without its lowest bit. That bit gives the byte order in which the checksums read the log's words: 1
for big-endian.
"""
SUMMED_HEADER_BYTES, SUMMED_FRAME_BYTES = 24, 8
WORDS = {0: "<u4", 1: ">u4"}


def log_damage(path: Path) -> str:
    """Returns a text about the damage of the log at `path`. The text is empty if the log is undamaged, ends in the
    middle of a write, or does not exist.

    Algorithm: https://www.sqlite.org/fileformat2.html#the_write_ahead_log

    Raises:
        OSError: the log cannot be read.
    """
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return ""
    if len(raw) < HEADER.size:
        return ""
    magic, _, page_bytes, _, *salts_and_sums = HEADER.unpack_from(raw)
    salts, sums = tuple(salts_and_sums[:2]), tuple(salts_and_sums[2:])
    words = WORDS[magic & 1]
    if magic & ~1 != MAGIC or _checksum(raw[:SUMMED_HEADER_BYTES], words, (0, 0)) != sums or not page_bytes:
        return "" if not any(raw) else "the log's header is damaged"
    frame_bytes = FRAME.size + page_bytes
    starts = range(HEADER.size, len(raw) - frame_bytes + 1, frame_bytes)
    for number, at in enumerate(starts):
        head = FRAME.unpack_from(raw, at)
        summed = raw[at : at + SUMMED_FRAME_BYTES] + raw[at + FRAME.size : at + frame_bytes]
        sums = _checksum(summed, words, sums)
        if head[2:4] == salts and head[4:] == sums:
            continue
        # Frames left over from an earlier log have different salts.
        left = [FRAME.unpack_from(raw, later) for later in starts[number:]]
        of_this = [found for found in left if _is_of(found[2:4], salts)]
        if not of_this:
            return ""
        # SQLite syncs a commit before it writes anything after it.
        synced = any(found[1] for found in of_this[:-1])
        or_cut = "" if synced else ", or a power cut ended its last commit"
        return f"the log is damaged at its frame {number} of {len(starts)}{or_cut}"
    return ""


def _is_of(found: tuple[int, ...], salts: tuple[int, ...]) -> bool:
    """Whether a frame with the salts `found` belongs to the log with the salts `salts`. One equal salt is enough,
    because the other one may be damaged.
    """
    return any(one == other for one, other in zip(found, salts, strict=True))


def _checksum(content: bytes, words: str, sums: tuple[int, ...]) -> tuple[int, ...]:
    """Returns SQLite's checksum after `content`, starting from `sums`: two 32-bit sums, updated with two words per
    step.

    With the words a and b, a step changes the sums (s0, s1) to (s0 + a + s1, s1 + b + the new s0). That is linear. So
    the result of all steps is a sum in which each word, and each initial sum, has a constant factor.
    """
    values = np.frombuffer(content, words).astype(np.uint64)
    of_words, of_sums = _factors(len(values) // 2)
    first = of_words @ values + of_sums @ np.array(sums, np.uint64)
    return tuple(int(value) & 0xFFFFFFFF for value in first)


@cache
def _factors(steps: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """The factors in `_checksum`, modulo 2**32: those of the words, uint64 [2, 2 * steps], and of the initial sums,
    uint64 [2, 2].
    """
    step = np.array([[1, 1], [1, 2]], np.uint64)
    taken = np.array([[1, 0], [1, 1]], np.uint64)
    low = np.uint64(0xFFFFFFFF)
    of_words, power = np.zeros((2, 2 * steps), np.uint64), np.eye(2, dtype=np.uint64)
    for number in reversed(range(steps)):
        of_words[:, 2 * number : 2 * number + 2] = (power @ taken) & low
        power = (power @ step) & low
    return of_words, power
