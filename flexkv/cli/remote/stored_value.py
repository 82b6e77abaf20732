"""Reads a value's trailer and checks the value as far as that is possible without the geometry of the engine's pool."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flexkv.c_ext import run_digest

NAME = re.compile(r"flexkv/(?P<version>[0-9]{1,4})/[0-9a-f]{32}/(?P<group>[0-9]{1,9})/(?P<key>[0-9a-f]{32})")
"""Pattern of a value's name, which `flexkv.remote.values.ValueFormat` makes."""

MAGIC = b"FKVPAGE1"
HEAD = struct.Struct("<8sIIQQ16sQQIIQIIQ")
"""Fields in the first 96 bytes of a trailer (docs/disk-format.md)."""
DIGEST_AT = 88

MOST_RUNS = 1 << 17
"""The maximum number of runs that a value can have. An engine's page has far fewer (layers, times K and V, times
ranks)."""


@dataclass(frozen=True, slots=True)
class StoredValue:
    """The content of a value's trailer, and whether an engine would use the value.

    Attributes:
        bytes: size of the value in bytes, including its trailer.
        fault: why no engine would use the value; empty if no reason was found. Run digests that do not match are not
            such a reason, because the real lengths of the runs are not known here.
        runs: number of runs whose digests the trailer has.
        runs_matching: number of digests that match if the stripes are cut into `runs` parts of equal length; None if
            the stripes cannot be divided evenly, or if the trailer is damaged.
        key: the page's key, 32 hex digits.
        tokens: number of valid tokens.
        written, expiry: Unix seconds. An expiry of 0 means never.
        group: number of the KV group.
    """

    name: str
    bytes: int
    fault: str = ""
    runs: int = 0
    runs_matching: int | None = None
    key: str = ""
    tokens: int = 0
    written: int = 0
    expiry: int = 0
    group: int = 0


def read_value(name: str, value: NDArray[np.uint8], now: int) -> StoredValue:
    """Reads a value's trailer and checks it.

    Args:
        value: uint8 [n], as the store returned it.
        now: Unix seconds, to which the value's expiry is compared.
    """
    size = len(value)
    start = _trailer_start(value)
    if start is None:
        return StoredValue(name, size, "no trailer ends it: it was cut short, or is no value of flexkv")
    trailer = value[start:]
    _, _, runs, _, _, key, _, expiry, _, tokens, written, group, _, digest = HEAD.unpack(
        trailer[: HEAD.size].tobytes()
    )
    head = trailer[: HEAD.size].copy()
    head[DIGEST_AT : DIGEST_AT + 8] = 0
    parts = struct.pack("<QQ", run_digest(head), run_digest(trailer[HEAD.size :]))
    is_whole = run_digest(np.frombuffer(parts, np.uint8)) == digest
    matching = _matching(value[:start], trailer[HEAD.size :].copy().view("<u8")) if is_whole else None
    fault = _fault(name, is_whole, key.hex(), group, expiry, now)
    return StoredValue(name, size, fault, runs, matching, key.hex(), tokens, written, expiry, group)


def _trailer_start(value: NDArray[np.uint8]) -> int | None:
    """Returns the offset of the trailer whose run digests end exactly at the value's end; None if there is none."""
    end = value[-(HEAD.size + 8 * MOST_RUNS) :].tobytes()
    at = len(end) - HEAD.size - 8
    while (at := end.rfind(MAGIC, 0, at + len(MAGIC))) >= 0:
        if HEAD.size + 8 * struct.unpack_from("<I", end, at + 12)[0] == len(end) - at:
            return len(value) - len(end) + at
        at -= 1
    return None


def _matching(stripes: NDArray[np.uint8], digests: NDArray[np.uint64]) -> int | None:
    if len(stripes) % len(digests):
        return None
    parts = stripes.reshape(len(digests), -1)
    return sum(run_digest(part) == int(digest) for part, digest in zip(parts, digests, strict=True))


def _fault(name: str, is_whole: bool, key: str, group: int, expiry: int, now: int) -> str:
    if not is_whole:
        return "its trailer is damaged: its digest does not match"
    named = NAME.fullmatch(name)
    if named is not None and named["key"] != key:
        return f"it is another page's: its trailer names the key {key}"
    if named is not None and int(named["group"]) != group:
        return f"it is another KV group's: its trailer names group {group}"
    return "it has expired" if expiry and now >= expiry else ""
