"""Cuts prompts into segments."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flexkv.blend.base import Segment, Tokens
from flexkv.errors import ConfigError, TokenError


def as_tokens(tokens: Sequence[int] | Tokens) -> Tokens:
    """Converts tokens to int64 [tokens].

    Raises:
        TokenError: the tokens are not integers in [0, 2**32), or not in one dimension.
    """
    found = np.asarray(tokens)
    if found.size == 0:
        found = found.astype(np.int64)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise TokenError(f"tokens of shape {found.shape} and dtype {found.dtype}: integers in one dimension")
    bad = np.flatnonzero((found < 0) | (found >= 2**32))
    if len(bad):
        raise TokenError(f"token {bad[0]} is {found[bad[0]]}: allowed are 0 to {2**32 - 1}")
    return found.astype(np.int64)


def split_at_separators(tokens: Sequence[int] | Tokens, separator: Sequence[int] | Tokens) -> list[Segment]:
    """Cuts a prompt into segments at every occurrence of a separator, searching from left to right; occurrences do not
    overlap. Each occurrence becomes a segment that is not reusable. The segments together are the prompt, without gaps.

    Args:
        separator: tokens of the separator's text as they appear *inside* a text, without the token that a tokenizer may
            put at the beginning of a text.

    Raises:
        ConfigError: the separator is empty.
        TokenError: see `as_tokens`.
    """
    prompt, mark = as_tokens(tokens), as_tokens(separator)
    if not len(mark):
        raise ConfigError("separator: it must have at least one token")
    starts: list[int] = []
    if len(prompt) >= len(mark):
        windows = np.lib.stride_tricks.sliding_window_view(prompt, len(mark))
        for at in np.flatnonzero((windows == mark).all(axis=1)).tolist():
            if not starts or at >= starts[-1] + len(mark):
                starts.append(at)
    segments, done = [], 0
    for start in starts:
        if start > done:
            segments.append(Segment(prompt[done:start]))
        done = start + len(mark)
        segments.append(Segment(prompt[start:done], reusable=False))
    if done < len(prompt):
        segments.append(Segment(prompt[done:]))
    return segments
