"""Decides at which lengths a hybrid engine's requests can be resumed later, and which pages of windows, chunks and
recurrent states that needs.

A page of such a group is useful only near the end of a hit, so it is stored only where a hit may end: at the end of a
prompt and of a request, every `store.checkpoint_tokens` before that, and where prompts have diverged before.

A model with recurrent states can be resumed only where a step of the engine has ended: after a step that ends with
block `p`, entry `p` of the request's table holds the state there, until vLLM frees it. In some modes vLLM writes states
of other lengths into the table; the only boundaries are then those that vLLM hands over (`boundary_state_offloads`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from flexkv.cache.stores.base import StoreGroup
from flexkv.facts.keys import Rule

LEAST_CHECKPOINT_TOKENS = 4096
CHECKPOINT_WINDOWS = 8
"""By default two checkpoints are this many times the largest window apart, and at least LEAST_CHECKPOINT_TOKENS. So a
group whose rule is window stores at most an eighth of a long prompt's pages."""

StateBlocks = Mapping[int, int]
"""For one boundary: a group whose rule is state -> the engine block that holds its states. Empty where the engine hands
none over: the blocks are then in the request's own tables."""

NO_STATES: StateBlocks = {}


class Boundaries:
    """The boundaries of one engine: lengths at which hits on its requests may end.

    Args:
        alignment_tokens: every hit is a multiple of this many tokens.
        checkpoint_tokens: distance between checkpoints; None for a default by the largest window. It is rounded up to a
            multiple of the alignment.

    Attributes:
        groups: the groups of windows, chunks and states, by their index among the unit's groups.
        has_states: the model has recurrent states, so a hit ends only where a step of the engine has ended.
        handed_over: the engine names the boundaries of its steps, and the blocks that hold the states there.
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
        """The boundaries in (after, end] of a request without states, ascending: checkpoints, the last boundary of the
        prompt, and the last boundary of the tokens that it shares with others.

        The last token of a prompt is always computed, so a hit on the same prompt ends before it.

        Args:
            shared_tokens: number of leading tokens that other requests had too. Pages that end there serve the next
                request that diverges there.
        """
        first = after // self.checkpoint_tokens + 1
        checkpoints = range(first * self.checkpoint_tokens, end + 1, self.checkpoint_tokens)
        others = (self.last_before(prompt_tokens - 1), self.last_before(shared_tokens))
        yield from sorted({*checkpoints, *(other for other in others if after < other <= end)})

    def among(self, offers: Iterable[tuple[int, int, int]]) -> list[tuple[int, StateBlocks]]:
        """The boundaries at which the engine hands over the states of every group, ascending, with their blocks.

        Args:
            offers: the engine's offers for one request: (group, block, number of tokens that the states cover).
        """
        found: dict[int, dict[int, int]] = {}
        for group, block, tokens in offers:
            if group in self._states and self.may_end_at(tokens):
                found.setdefault(tokens, {})[group] = block
        return [(tokens, found[tokens]) for tokens in sorted(found) if found[tokens].keys() == self._states]

    def wants_states(self, boundary: int, after: int, prompt_tokens: int, shared_tokens: int) -> bool:
        """Whether states at a boundary are worth a store.

        In a prompt, they are at its last boundary, at the end of the tokens that it shares with others, and at others
        `checkpoint_tokens` apart. In an answer they always are, because its last boundary is not known yet.

        Args:
            after: the last boundary whose states were stored.
            shared_tokens: as for `between`.
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
        """Whether pages that end at a boundary serve only a request that diverges at a point where no other has
        diverged yet.

        Neither the same prompt nor the next turn ends a hit there, and a hit on the whole prompt needs no such page.
        """
        of_prompt = self.last_before(prompt_tokens - 1)
        if boundary == self.last_before(shared_tokens):
            return False
        if boundary >= of_prompt:
            # It is not known yet which of an answer's states will be the last.
            return boundary > of_prompt and not self.has_states
        return all(
            pages_at(group, boundary)[1] <= pages_at(group, of_prompt)[0] for group in self.groups.values()
        )

    def last_before(self, tokens: int) -> int:
        """The last boundary of at most `tokens` tokens."""
        return max(0, tokens) // self._alignment * self._alignment


def pages_at(group: StoreGroup, boundary: int) -> tuple[int, int]:
    """The pages [first, end) that a hit of `boundary` tokens needs from a group whose rule is window, chunk or state.

    The rule is that of `GroupRule::first_page` in `csrc/index/group_rule.h`, which lookups use.
    """
    end = boundary // group.block_tokens
    if group.rule is Rule.STATE:
        return max(0, end - 1), end
    if group.rule is Rule.CHUNK:
        return boundary // group.reach * group.reach // group.block_tokens, end
    return max(0, end - group.reach), end


def _reach_tokens(group: StoreGroup) -> int:
    """The most tokens that the pages of a hit hold in this group."""
    if group.rule is Rule.STATE:
        return group.block_tokens
    return group.reach if group.rule is Rule.CHUNK else group.reach * group.block_tokens
