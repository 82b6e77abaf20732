"""Decides at which lengths (boundaries) later requests can resume a hybrid model's prompt, and which pages of windows,
chunks and recurrent states must be stored for that.

A page of a window, chunk or state is useful only near the end of a hit. So it is stored only where a hit may end: at
the end of a prompt, at the end of a request, every `store.checkpoint_tokens` tokens before that, and where earlier
prompts have diverged.

With recurrent states, a hit can end only where a step of the engine has ended. After a step that ends with block `p`,
entry `p` of the request's table is the block with the state, until vLLM frees it. In some modes of vLLM, the table also
has states that cover other numbers of tokens. Then the only boundaries are those that vLLM hands over
(`boundary_state_offloads`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from flexkv.cache.stores.base import StoreGroup
from flexkv.facts.keys import Rule

LEAST_CHECKPOINT_TOKENS = 4096
CHECKPOINT_WINDOWS = 8
"""The default distance between two checkpoints is this many times the largest window, and at least
LEAST_CHECKPOINT_TOKENS. So a group of windows stores at most about an eighth of a long prompt's pages."""

StateBlocks = Mapping[int, int]
"""For one boundary, the engine block with the states of each STATE group, by group. Empty if the engine hands over no
states; their blocks are then in the request's own tables."""

NO_STATES: StateBlocks = {}


class Boundaries:
    """The boundaries of one engine: lengths at which hits on its requests may end.

    Args:
        alignment_tokens: the number of tokens of every hit is a multiple of this number.
        checkpoint_tokens: tokens from one checkpoint to the next, rounded up to a multiple of the alignment; None for
            the default.

    Attributes:
        groups: the groups of windows, chunks and states, by number.
        has_states: whether the model has recurrent states, so that hits end only where a step of the engine has ended.
        handed_over: whether the engine hands over the boundaries at which it has states, with the states' blocks.
        checkpoint_tokens: tokens from one checkpoint to the next.
    """

    def __init__(
        self,
        groups: Sequence[StoreGroup],
        alignment_tokens: int,
        checkpoint_tokens: int | None,
        handed_over: bool = False,
    ) -> None:
        self._alignment = alignment_tokens
        self.groups = {at: group for at, group in enumerate(groups) if group.rule is not Rule.FULL}
        self._states = {at for at, group in self.groups.items() if group.rule is Rule.STATE}
        self.has_states = bool(self._states)
        self.handed_over = handed_over
        if checkpoint_tokens is None:
            window = max((_reach_tokens(group) for group in self.groups.values()), default=0)
            checkpoint_tokens = max(LEAST_CHECKPOINT_TOKENS, CHECKPOINT_WINDOWS * window)
        self.checkpoint_tokens = -(-checkpoint_tokens // self._alignment) * self._alignment

    def between(self, after: int, end: int, prompt_tokens: int, shared_tokens: int = 0) -> Iterator[int]:
        """Yields the boundaries in (after, end] of a request without states, ascending: the checkpoints, the last
        boundary in the prompt, and the last boundary in the tokens that the request shares with earlier requests.

        The engine always computes the last token of a prompt, so a hit on the same prompt ends before that token.

        Args:
            shared_tokens: number of leading tokens that the request shares with earlier requests. The next request that
                diverges after these tokens can use the pages that end there.
        """
        first = after // self.checkpoint_tokens + 1
        checkpoints = range(first * self.checkpoint_tokens, end + 1, self.checkpoint_tokens)
        others = (self.last_before(prompt_tokens - 1), self.last_before(shared_tokens))
        yield from sorted({*checkpoints, *(other for other in others if after < other <= end)})

    def among(self, offers: Iterable[tuple[int, int, int]]) -> list[tuple[int, StateBlocks]]:
        """Returns the boundaries at which the engine hands over the states of all STATE groups, ascending, each with
        the blocks of the states.

        Args:
            offers: states that the engine hands over for one request: (group, block, number of tokens that they cover).
        """
        found: dict[int, dict[int, int]] = {}
        for group, block, tokens in offers:
            if group in self._states and self.may_end_at(tokens):
                found.setdefault(tokens, {})[group] = block
        return [(tokens, found[tokens]) for tokens in sorted(found) if found[tokens].keys() == self._states]

    def wants_states(self, boundary: int, after: int, prompt_tokens: int, shared_tokens: int) -> bool:
        """Whether the states at a boundary should be stored.

        In a prompt, states are stored at its last boundary, at the last boundary in the tokens shared with earlier
        requests, and at boundaries at least `checkpoint_tokens` apart. In generated tokens, states are stored at every
        boundary, because any of them may be the last.

        Args:
            after: the last boundary whose states were stored.
            shared_tokens: number of leading tokens that the request shares with earlier requests.
        """
        if boundary <= after:
            return False
        ends_a_hit = boundary >= self.last_before(prompt_tokens - 1) or boundary == self.last_before(
            shared_tokens
        )
        return ends_a_hit or boundary >= after + self.checkpoint_tokens

    def may_end_at(self, tokens: int) -> bool:
        """Whether a hit may end after `tokens` tokens."""
        return tokens % self._alignment == 0

    def is_spare(self, boundary: int, prompt_tokens: int, shared_tokens: int = 0) -> bool:
        """Whether pages that end at a boundary are useful only to a request that diverges where no request has diverged
        before.

        The pages are spare if no hit of the same prompt or of the conversation's next turn ends at the boundary, and a
        hit on the whole prompt needs none of the pages.
        """
        of_prompt = self.last_before(prompt_tokens - 1)
        if boundary == self.last_before(shared_tokens):
            return False
        if boundary >= of_prompt:
            # Any state in the generated tokens may turn out to be the last, at which the next turn's hit ends.
            return boundary > of_prompt and not self.has_states
        return all(
            pages_at(group, boundary)[1] <= pages_at(group, of_prompt)[0] for group in self.groups.values()
        )

    def last_before(self, tokens: int) -> int:
        """Returns the last boundary within the first `tokens` tokens."""
        return max(0, tokens) // self._alignment * self._alignment


def pages_at(group: StoreGroup, boundary: int) -> tuple[int, int]:
    """Returns the pages [first, end) that a hit of `boundary` tokens needs from a group of windows, chunks or states.

    Lookups use `GroupRule::first_page` in `csrc/index/group_rule.h`, which must give the same pages.
    """
    end = boundary // group.block_tokens
    if group.rule is Rule.STATE:
        return max(0, end - 1), end
    if group.rule is Rule.CHUNK:
        return boundary // group.reach * group.reach // group.block_tokens, end
    return max(0, end - group.reach), end


def _reach_tokens(group: StoreGroup) -> int:
    """Returns the maximum number of tokens in the pages that a hit needs from this group."""
    if group.rule is Rule.STATE:
        return group.block_tokens
    return group.reach if group.rule is Rule.CHUNK else group.reach * group.block_tokens
