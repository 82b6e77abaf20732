"""The records that the scheduler's side keeps of live requests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flexkv.adapters.common.prompt_keys import TokenKeys
from flexkv.transfer.graph import BlockIds, OpId

NO_BLOCKS = range(0)
NO_TOKENS = range(0)
NO_OPS: frozenset[OpId] = frozenset()


@dataclass(slots=True)
class RequestTracker:
    """One request.

    Attributes:
        keys: None if the request's KV depends on more than the keys express.
        offer: blocks of the last promise, until their load is ordered; empty for none.
        wanted: tokens of the offer that the engine still takes.
        step_loaded: number of leading tokens that the next step's forward pass finds in its blocks, with a load inside
            that step; 0 without one.
        computed: number of leading tokens whose KV is certainly in the engine's blocks once the last ordered forward
            pass has run.
        first_step: number of the first step that computed it since the request started (again); 0 before.
        load: ops of a load between steps that have not ended successfully on all ranks.
        loading: tokens of that load that the engine still takes.
        spent: the request gets no further load between steps. Ranks may have an order of a load that the engine never
            names, or may learn late that it was cancelled. The engine names a load only by the request's id, so a
            lagging rank could mistake the order of a second load for that of the first.
        unsettled: the engine was promised a load between steps that was never ordered. The engine may still wait for
            the load to end, and name the request to the ranks.
        told: tokens promised when the engine last asked; None before it has asked since the request started (again).
        prompt_tokens: tokens that the request had when the engine last asked.
    """

    request_id: int
    keys: TokenKeys | None
    offer: range = NO_BLOCKS
    wanted: range = NO_TOKENS
    step_loaded: int = 0
    computed: int = 0
    first_step: int = 0
    load: frozenset[OpId] = NO_OPS
    loading: range = NO_TOKENS
    spent: bool = False
    unsettled: bool = False
    told: int | None = None
    prompt_tokens: int = 0

    @property
    def name(self) -> str:
        """The manager's name of the request."""
        return str(self.request_id)

    def restarted(self) -> RequestTracker:
        """The entry of this request after it has lost its blocks: only whether its id is spent or unsettled stays."""
        keys = None if self.keys is None else self.keys.begun_again()
        return RequestTracker(self.request_id, keys, spent=self.ordered, unsettled=self.unsettled)

    def certain_tokens(self, tokens: int, prompt_only: bool) -> int:
        """How many of the request's tokens have KV that is certain and may be stored. `tokens` is the number of all its
        tokens.
        """
        computed = self.computed
        if computed and tokens > self.prompt_tokens:
            # A token was sampled, so all of the prompt was computed.
            computed = max(computed, self.prompt_tokens)
        # The last token was sampled but not computed, so it has no KV.
        end = min(computed, tokens - 1)
        if prompt_only and self.prompt_tokens:
            end = min(end, self.prompt_tokens)
        return max(0, end)

    @property
    def ordered(self) -> bool:
        """Whether ranks may still handle a load of this id."""
        return self.spent or bool(self.load)

    @property
    def may_be_named(self) -> bool:
        """Whether the engine may still wait for a load of this id."""
        return self.ordered or self.unsettled


def present_runs(blocks: BlockIds) -> list[tuple[int, int]]:
    """The ranges [first, last) of positions whose block exists: the engine gives -1 for positions without a page."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], (blocks >= 0).astype(np.int8), [0]))))
    return [(int(first), int(last)) for first, last in zip(edges[::2], edges[1::2], strict=True)]


def tokens_of(blocks: range, block_tokens: int) -> range:
    """The tokens of a range of whole blocks."""
    return range(blocks.start * block_tokens, blocks.stop * block_tokens)


def blocks_of(tokens: range, block_tokens: int) -> range:
    """The blocks that hold any of these tokens."""
    if not tokens:
        return NO_BLOCKS
    return range(tokens.start // block_tokens, -(-tokens.stop // block_tokens))


def still_wanted(tokens: range, start: int, end: int) -> range:
    """Tokens of an offer that are left when the engine hands back tokens [start, end).

    The engine hands back the whole offer or a part at either end, perhaps in several pieces, and counts the rest as
    loaded. It never hands back a range in the middle; such a range would be loaded needlessly.
    """
    if start >= end:
        return tokens
    first, last = tokens.start, tokens.stop
    if start <= first:
        first = max(first, end)
    if end >= last:
        last = min(last, start)
    return range(first, last) if first < last else NO_TOKENS
