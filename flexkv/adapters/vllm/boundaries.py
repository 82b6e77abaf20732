"""At which lengths a hybrid engine's requests can be resumed later, and which pages of windows and chunks that takes.

A page of such a group is of use near the end of a hit alone, so it is stored only where a hit may end: at the end of a
prompt and of a request, and every `store.checkpoint_tokens` between.
"""

from __future__ import annotations

from collections.abc import Iterator

from flexkv.adapters.vllm.pool_geometry import BlockGeometry, PoolGeometry
from flexkv.cache.base import Rule

LEAST_CHECKPOINT_TOKENS = 4096
CHECKPOINT_WINDOWS = 8
"""By default a window of so many is stored."""


class Boundaries:
    """Of one engine.

    Args:
        checkpoint_tokens: distance of boundaries; None for a default by the largest window. Rounded up to whole blocks
            of every group.

    Attributes:
        groups: those of windows and chunks, by their place among all groups.
        checkpoint_tokens: a multiple of the engine's alignment.
    """

    def __init__(self, geometry: PoolGeometry, checkpoint_tokens: int | None) -> None:
        self._alignment = geometry.alignment_tokens
        self.groups = {
            at: group for at, group in enumerate(geometry.groups) if group.rule in (Rule.WINDOW, Rule.CHUNK)
        }
        if checkpoint_tokens is None:
            window = max((_reach_tokens(group) for group in self.groups.values()), default=0)
            checkpoint_tokens = max(LEAST_CHECKPOINT_TOKENS, CHECKPOINT_WINDOWS * window)
        self.checkpoint_tokens = -(-checkpoint_tokens // self._alignment) * self._alignment

    def between(self, after: int, end: int, prompt_tokens: int) -> Iterator[int]:
        """The boundaries in (after, end] of a request with such a prompt, ascending.

        The last token of a prompt is always computed, so a hit on the same prompt ends before it.
        """
        of_prompt = self.last_before(prompt_tokens - 1)
        first = after // self.checkpoint_tokens + 1
        for boundary in range(first * self.checkpoint_tokens, end + 1, self.checkpoint_tokens):
            if after < of_prompt < boundary:
                yield of_prompt
            after = boundary
            yield boundary
        if after < of_prompt <= end:
            yield of_prompt

    def is_spare(self, boundary: int, prompt_tokens: int) -> bool:
        """Whether pages that end there serve only requests that part from this one: neither the same prompt nor the
        next turn ends a hit there, and the prompt's end needs none of the pages."""
        of_prompt = self.last_before(prompt_tokens - 1)
        if boundary >= of_prompt:
            return boundary > of_prompt
        return all(
            pages_at(group, boundary)[1] <= pages_at(group, of_prompt)[0] for group in self.groups.values()
        )

    def last_before(self, tokens: int) -> int:
        """The longest hit of at most so many tokens."""
        return max(0, tokens) // self._alignment * self._alignment


def pages_at(group: BlockGeometry, boundary: int) -> tuple[int, int]:
    """Which pages a hit of `boundary` tokens needs of a window's or chunk's group: [first, end)."""
    end = boundary // group.block_tokens
    if group.rule is Rule.CHUNK:
        return boundary // group.reach * group.reach // group.block_tokens, end
    return max(0, end - group.reach), end


def _reach_tokens(group: BlockGeometry) -> int:
    return group.reach if group.rule is Rule.CHUNK else group.reach * group.block_tokens
