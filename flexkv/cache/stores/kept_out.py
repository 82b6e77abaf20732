"""Tokens that a request's caller keeps out of the cache."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

NO_END = sys.maxsize


@dataclass(slots=True)
class KeptOut:
    """The tokens of a request that its caller keeps out of the cache. A page with such a token is not stored. In a
    streaming session, the caller decides for each input whether its tokens are kept out.

    Attributes:
        spans: ranges [first, end) of tokens, ascending; the end of the last range may be NO_END.
    """

    spans: list[list[int]] = field(default_factory=list)

    def ask(self, skip: bool, first: int, end: int) -> None:
        """Records whether the caller keeps the tokens of an input out of the cache. Called when an input of a streaming
        session begins.

        Args:
            skip: whether the input's tokens are kept out.
            first: position at or before the input's first token.
            end: position after the last token of the previous input.
        """
        if skip == self.asked:
            return
        if skip:
            self.spans.append([first, NO_END])
        else:
            self.spans[-1][1] = end

    @property
    def asked(self) -> bool:
        """Whether the tokens of the last input are kept out."""
        return bool(self.spans) and self.spans[-1][1] == NO_END

    def within(self, first: int, end: int) -> tuple[int, int] | None:
        """Returns the first span that overlaps the tokens [first, end); None if all of them may be stored."""
        return next(((low, high) for low, high in self.spans if low < end and high > first), None)
