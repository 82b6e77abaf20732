"""What the scheduler's side remembers of each request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flexkv.adapters.tensorrt_llm.identity import request_namespace
from flexkv.cache.base import Keys
from flexkv.cache.keys import EngineKeyChain, TokenChain
from flexkv.transfer.graph import OpId

GROUP = 0
"""The one KV group of a cache that this adapter accepts."""

NO_BLOCKS = range(0)


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


@dataclass(slots=True)
class Tracked:
    """One request.

    Attributes:
        keys: None where its KV depends on what no key says.
        offer: blocks of the last promise, until their load is ordered; empty for none.
        wanted: those of them that the engine still takes.
        step_loaded: tokens from the start whose KV the next step's forward finds in its blocks, by a load inside it.
        computed: tokens whose KV is certainly in the engine's blocks once the last ordered forward has run.
        load: op of a load between steps that has not ended well on all ranks.
        loading: blocks that it loads.
        excused: the engine took back all of a promise whose load was to run between steps. The ranks were told to
            return the id should it be named all the same.
        prompt_tokens: that the request had when the engine last asked for it.
    """

    request_id: int
    keys: RequestKeys | None
    offer: range = NO_BLOCKS
    wanted: range = NO_BLOCKS
    step_loaded: int = 0
    computed: int = 0
    load: OpId | None = None
    loading: range = NO_BLOCKS
    excused: bool = False
    prompt_tokens: int = 0


def still_wanted(blocks: range, start: int, end: int, block_tokens: int) -> range:
    """Blocks of an offer that are left when the engine hands back tokens [start, end) of it.

    It hands back the whole, or a part at either end; the rest counts as loaded, so a block of which a part is left is
    loaded too. A range in the middle, which it never hands back, would be loaded for nothing.
    """
    first, last = blocks.start * block_tokens, blocks.stop * block_tokens
    if start >= end:
        return blocks
    if start <= first and end >= last:
        return NO_BLOCKS
    if start <= first:
        return range(max(blocks.start, end // block_tokens), blocks.stop)
    if end >= last:
        return range(blocks.start, min(blocks.stop, -(-start // block_tokens)))
    return blocks


class RequestTable:
    """The live requests."""

    def __init__(self, block_tokens: int, namespace: bytes) -> None:
        self._block_tokens = block_tokens
        self._namespace = namespace
        self._tracked: dict[int, Tracked] = {}

    def of(self, request: Any) -> Tracked:
        """The request's entry, made when it is met first."""
        request_id = int(request.request_id)
        tracked = self._tracked.get(request_id)
        if tracked is None:
            namespace = request_namespace(self._namespace, request)
            keys = None if namespace is None else RequestKeys(self._block_tokens, namespace)
            tracked = self._tracked[request_id] = Tracked(request_id, keys)
        return tracked

    def get(self, request_id: int) -> Tracked | None:
        return self._tracked.get(request_id)

    def pop(self, request_id: int) -> None:
        self._tracked.pop(request_id, None)
