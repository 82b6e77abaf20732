"""A request's settings for blending: the reuse of cached segments at other positions in a prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MOST_SEGMENTS = 256
"""Maximum number of segments that a request may list: `flexkv.blend.segment_lookup` loads at most this many segments of
one prompt.
"""

FIELDS = ("segments", "ratio", "store")


@dataclass(frozen=True, slots=True)
class BlendAsk:
    """A request's settings for blending. They say which segments of its prompt are reused, or that the prompt itself
    is stored as a segment.

    Attributes:
        segments: token positions [first, end) of each segment of the prompt that may be reused; None to cut the prompt
            into segments at the configured separators.
        ratio: share of the reused rows that is computed again, 0 to 1; None for the configured share.
        store: whether the whole prompt is one segment, which is computed by itself and stored. Excludes the other
            settings.
    """

    segments: tuple[tuple[int, int], ...] | None = None
    ratio: float | None = None
    store: bool = False

    @classmethod
    def read(cls, value: object) -> BlendAsk | None:
        """Parses the value that a request gives for blending; returns None for false.

        Raises:
            ValueError: the value is not allowed; the message says what is allowed.
        """
        if isinstance(value, bool):
            return cls() if value else None
        if not isinstance(value, Mapping) or value.keys() - set(FIELDS):
            raise ValueError(f"true, false, or a mapping with {', '.join(FIELDS)}")
        store = value.get("store", False)
        if not isinstance(store, bool) or (store and len(value) > 1):
            raise ValueError("as `store` true alone, or false")
        return cls(_segments(value.get("segments")), _ratio(value.get("ratio")), store)


def _segments(value: object) -> tuple[tuple[int, int], ...] | None:
    if value is None:
        return None
    allowed = f"as `segments` at most {MOST_SEGMENTS} pairs [first, end) of positions in the prompt"
    if not isinstance(value, (list, tuple)) or len(value) > MOST_SEGMENTS:
        raise ValueError(allowed)
    found = []
    for pair in value:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2 or any(type(end) is not int for end in pair):
            raise ValueError(allowed)
        found.append((pair[0], pair[1]))
    return tuple(found)


def _ratio(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0.0 <= value <= 1.0:
        return float(value)
    raise ValueError("as `ratio` a number from 0 to 1")
