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
    """The scheduler's record of one request.

    Attributes:
        request_id: the engine's id of the request.
        keys: keys of the request's blocks; None if its KV depends on more than keys can express.
        offer: numbers of the blocks that were last promised, until their load is ordered; otherwise empty.
        wanted: tokens of the offer that the engine has not declined.
        step_loaded: number of leading tokens that are in the request's blocks when the next step's forward pass runs,
            thanks to a load inside that step; 0 if that step has no load for the request.
        computed: number of leading tokens whose KV is certain to be in the engine's blocks when the last ordered
            forward pass has run.
        first_step: number of the first step that computed the request since it last started; 0 before.
        load: ops of a load between steps that have not yet succeeded on all ranks.
        loading: tokens of that load that the engine has not declined.
        spent: whether the request may get no further load between steps. This is so after its load was cancelled or had
            no ops: a rank may still have the order of a load whose id the engine never passes on, or may receive the
            cancellation late. The engine identifies loads only by the request's id, so the rank could confuse a second
            load with the first.
        unsettled: whether the engine was promised a load between steps that was never ordered. The engine may still
            wait for that load, and pass the request's id to the ranks.
        told: number of tokens promised when the engine last asked; None if it has not asked since the request last
            started.
        prompt_tokens: number of tokens that the request had when the engine last asked.
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
        """The request's id in the manager."""
        return str(self.request_id)

    def restarted(self) -> RequestTracker:
        """A new record for this request after it has lost its blocks. It keeps from the former record only whether the
        id is spent or unsettled."""
        keys = None if self.keys is None else self.keys.begun_again()
        return RequestTracker(self.request_id, keys, spent=self.ordered, unsettled=self.unsettled)

    def certain_tokens(self, tokens: int, prompt_only: bool) -> int:
        """The number of leading tokens whose KV is certain, so that it may be stored.

        Args:
            tokens: number of all tokens of the request.
            prompt_only: whether to leave out generated tokens.
        """
        computed = self.computed
        if computed and tokens > self.prompt_tokens:
            # At least one token was sampled, so the complete prompt was computed.
            computed = max(computed, self.prompt_tokens)
        # The last token was sampled but not computed, so it has no KV.
        end = min(computed, tokens - 1)
        if prompt_only and self.prompt_tokens:
            end = min(end, self.prompt_tokens)
        return max(0, end)

    @property
    def ordered(self) -> bool:
        """Whether ranks may still have to handle a load with this request's id."""
        return self.spent or bool(self.load)

    @property
    def may_be_named(self) -> bool:
        """Whether the engine may still wait for a load with this request's id, and pass the id to the ranks."""
        return self.ordered or self.unsettled


def present_runs(blocks: BlockIds) -> list[tuple[int, int]]:
    """The ranges [first, last) of positions that have a block. For a position without one, the engine gives -1."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], (blocks >= 0).astype(np.int8), [0]))))
    return [(int(first), int(last)) for first, last in zip(edges[::2], edges[1::2], strict=True)]


def tokens_of(blocks: range, block_tokens: int) -> range:
    """The range of tokens in a range of blocks."""
    return range(blocks.start * block_tokens, blocks.stop * block_tokens)


def blocks_of(tokens: range, block_tokens: int) -> range:
    """The range of blocks that contain at least one token of a range."""
    if not tokens:
        return NO_BLOCKS
    return range(tokens.start // block_tokens, -(-tokens.stop // block_tokens))


def still_wanted(tokens: range, start: int, end: int) -> range:
    """The tokens of an offer that remain when the engine declines tokens [start, end).

    The engine declines the complete offer or some tokens at either end, possibly in several calls, and counts the
    remaining tokens as loaded. It never declines a range in the middle; such a range would be loaded needlessly.
    """
    if start >= end:
        return tokens
    first, last = tokens.start, tokens.stop
    if start <= first:
        first = max(first, end)
    if end >= last:
        last = min(last, start)
    return range(first, last) if first < last else NO_TOKENS
