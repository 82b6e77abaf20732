"""What the scheduler's side remembers of each request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flexkv.adapters.tensorrt_llm.identity import request_namespace
from flexkv.cache.keys import EngineKeyChain, TokenChain
from flexkv.facts.keys import Keys
from flexkv.transfer.graph import BlockIds, OpId

GROUP = 0
"""The one KV group of a cache that this adapter accepts."""

NO_BLOCKS = range(0)
NO_TOKENS = range(0)
NO_OPS: frozenset[OpId] = frozenset()


class RequestKeys:
    """Index keys of one request's blocks, from its tokens. Costs O(new blocks).

    Args:
        namespace: of the request; see `request_namespace`.
    """

    def __init__(self, block_tokens: int, namespace: bytes) -> None:
        self._chain = TokenChain(block_tokens)
        self._keys = EngineKeyChain(namespace, GROUP)

    def of(self, tokens: Sequence[int]) -> Keys:
        """Keys of all whole blocks of `tokens`, which begin with those of the last call."""
        if self._chain.extend(tokens):
            self._keys.extend(self._chain.digests)
        return self._keys.keys

    @property
    def made(self) -> Keys:
        """Those that were made already."""
        return self._keys.keys


@dataclass(slots=True)
class Tracked:
    """One request.

    Attributes:
        keys: None where its KV depends on what no key says.
        offer: blocks of the last promise, until their load is ordered; empty for none.
        wanted: tokens of them that the engine still takes.
        step_loaded: tokens from the start whose KV the next step's forward finds in its blocks, by a load inside it.
        computed: tokens whose KV is certainly in the engine's blocks once the last ordered forward has run.
        load: ops of a load between steps that have not ended well on all ranks.
        loading: tokens that it loads and that the engine still takes.
        spent: of a load between steps ranks may have an order that the engine never names, or learn late that it was
            taken back. The engine names a load by this id alone, so the order of a second one could be mistaken for
            that of the first on a rank that lags: there is no second.
        unsettled: the engine was promised a load between steps that was never ordered. It may wait for its end, and
            name the request to the ranks, all the same.
        told: tokens that it was promised when it last asked; None before it has.
        prompt_tokens: that the request had then.
    """

    request_id: int
    keys: RequestKeys | None
    offer: range = NO_BLOCKS
    wanted: range = NO_TOKENS
    step_loaded: int = 0
    computed: int = 0
    load: frozenset[OpId] = NO_OPS
    loading: range = NO_TOKENS
    spent: bool = False
    unsettled: bool = False
    told: int | None = None
    prompt_tokens: int = 0

    def certain_tokens(self, tokens: int, prompt_only: bool) -> int:
        """How many of its `tokens` have KV that is certain and may be stored."""
        computed = self.computed
        if computed and tokens > self.prompt_tokens:
            # A token was sampled, which takes all of the prompt.
            computed = max(computed, self.prompt_tokens)
        # The last token was sampled and not fed back, so it has no KV.
        end = min(computed, tokens - 1)
        if prompt_only and self.prompt_tokens:
            end = min(end, self.prompt_tokens)
        return max(0, end)

    @property
    def ordered(self) -> bool:
        """Whether ranks may have to do with a load of this id yet."""
        return self.spent or bool(self.load)

    @property
    def may_be_named(self) -> bool:
        """Whether the engine may yet wait for a load of this id."""
        return self.ordered or self.unsettled


def present_runs(blocks: BlockIds) -> list[tuple[int, int]]:
    """The ranges of positions whose block exists: the engine says -1 where it keeps no page."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], (blocks >= 0).astype(np.int8), [0]))))
    return [(int(first), int(last)) for first, last in zip(edges[::2], edges[1::2], strict=True)]


def tokens_of(blocks: range, block_tokens: int) -> range:
    """The tokens of whole blocks."""
    return range(blocks.start * block_tokens, blocks.stop * block_tokens)


def blocks_of(tokens: range, block_tokens: int) -> range:
    """The blocks that hold tokens: also those that hold others beside them."""
    if not tokens:
        return NO_BLOCKS
    return range(tokens.start // block_tokens, -(-tokens.stop // block_tokens))


def still_wanted(tokens: range, start: int, end: int) -> range:
    """Tokens of an offer that are left when the engine hands back [start, end) of it.

    It hands back the whole, or a part at either end, and may do so piece by piece; the rest counts as loaded. A range
    in the middle, which it never hands back, would be loaded for nothing.
    """
    if start >= end:
        return tokens
    first, last = tokens.start, tokens.stop
    if start <= first:
        first = max(first, end)
    if end >= last:
        last = min(last, start)
    return range(first, last) if first < last else NO_TOKENS


class RequestTable:
    """The live requests, and of those that were reset whether their ids are spent or unsettled: until they end.

    Holds no more than the engine does, which says of each request that it has ended.
    """

    def __init__(self, block_tokens: int, namespace: bytes) -> None:
        self._block_tokens = block_tokens
        self._namespace = namespace
        self._tracked: dict[int, Tracked] = {}
        self._spent: set[int] = set()
        self._unsettled: set[int] = set()

    def of(self, request: Any) -> Tracked:
        """The request's entry, made when it is met first."""
        request_id = int(request.request_id)
        tracked = self._tracked.get(request_id)
        if tracked is None:
            namespace = request_namespace(self._namespace, request)
            keys = None if namespace is None else RequestKeys(self._block_tokens, namespace)
            tracked = self._tracked[request_id] = Tracked(
                request_id,
                keys,
                spent=request_id in self._spent,
                unsettled=request_id in self._unsettled,
            )
        return tracked

    def get(self, request_id: int) -> Tracked | None:
        return self._tracked.get(request_id)

    def reset(self, request_id: int) -> None:
        """The request starts again: forgets all but whether its id is spent or unsettled."""
        tracked = self._tracked.pop(request_id, None)
        if tracked is None:
            return
        if tracked.ordered:
            self._spent.add(request_id)
        if tracked.unsettled:
            self._unsettled.add(request_id)
        else:
            self._unsettled.discard(request_id)

    def pop(self, request_id: int) -> None:
        """The request has ended, and its id is not named again."""
        self._tracked.pop(request_id, None)
        self._spent.discard(request_id)
        self._unsettled.discard(request_id)
