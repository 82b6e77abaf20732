"""Reads and formats byte counts as users write them: 42949672960, "40GiB", "1.5 TB"."""

from __future__ import annotations

import re
from fractions import Fraction

UNITS = {
    "": 1,
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", start=1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", start=1)},
}
ALLOWED = (
    "a whole number of bytes, or a number with B, KB, MB, GB, TB (powers of 1000) "
    "or KiB, MiB, GiB, TiB (powers of 1024)"
)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE | re.ASCII)


def parse_size(value: object) -> object:
    """Converts a string with a size to bytes. Returns any other type unchanged, because pydantic checks the type later.

    Refuses a bare "40G", which means 1000**3 to some users and 1024**3 to others.

    Raises:
        ValueError: the string is not a size, or not a whole number of bytes.
    """
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value.strip())
    unit = UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ValueError(f"expected {ALLOWED}")
    size = Fraction(match[1]) * unit
    if size.denominator != 1:
        raise ValueError(f"that is no whole number of bytes; expected {ALLOWED}")
    return int(size)


def format_size(size_bytes: int) -> str:
    """Returns a size for display, such as "40.0 GiB", in the largest of the units B to TiB in which the number is at
    least 1.
    """
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size_bytes} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
