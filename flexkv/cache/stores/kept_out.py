"""Tokens that a request's caller keeps out of the cache."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

NO_END = sys.maxsize


@dataclass(slots=True)
class KeptOut:
    """The tokens of a request that its caller keeps out of the cache; in a streaming session each piece may request
    this. A page that holds such a token is not stored.

    Attributes:
        spans: ranges [first, end) of tokens, ascending; the last may have no end yet.
    """

    spans: list[list[int]] = field(default_factory=list)

    def ask(self, skip: bool, first: int, end: int) -> None:
        """Begins a piece.

        Args:
            skip: the piece's tokens are kept out.
            first: a position before which the piece has no token.
            end: a position from which on the previous piece has no token.
        """
        if skip == self.asked:
            return
        if skip:
            self.spans.append([first, NO_END])
        else:
            self.spans[-1][1] = end

    @property
    def asked(self) -> bool:
        """Whether the last piece is kept out."""
        return bool(self.spans) and self.spans[-1][1] == NO_END

    def within(self, first: int, end: int) -> tuple[int, int] | None:
        """The first span that overlaps the tokens [first, end); None if all of them may be stored."""
        return next(((low, high) for low, high in self.spans if low < end and high > first), None)
