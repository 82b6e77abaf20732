"""Answers the engine's question "how much of this request do you have?", and turns a promise into a load."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flexkv.adapters.vllm.block_keys import GROUP
from flexkv.adapters.vllm.extra_keys import tail_extra
from flexkv.adapters.vllm.geometry import BlockGeometry
from flexkv.adapters.vllm.request import Promise, RequestTracker
from flexkv.cache.base import CacheManager, MatchResult, TailCandidates
from flexkv.cache.keys import tail_candidates
from flexkv.observe import Counters
from flexkv.transfer.graph import TransferGraph

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks


class Lookups:
    """Lookups and loads of one engine.

    Args:
        with_tails: partial tails are stored and may be hit.
        drop_last_block: a hit always leaves a block to compute: a draft model that reads the main model's hidden states
            (EAGLE, MTP) needs them for the end of the prompt. The engine does so with its own prefix cache too.
    """

    def __init__(
        self,
        manager: CacheManager,
        geometry: BlockGeometry,
        with_tails: bool,
        counters: Counters,
        drop_last_block: bool = False,
    ) -> None:
        self._manager = manager
        self._block_tokens = geometry.block_tokens
        self._with_tails = with_tails and not drop_last_block
        self._drop_last_block = drop_last_block
        self._counters = counters

    def match(self, tracker: RequestTracker, computed_tokens: int) -> int | None:
        """Tokens that can be loaded beyond `computed_tokens`; they are leased until they are loaded or released.

        None while more is coming up from disk: ask again with the next step.
        """
        if self._manager.waits(tracker.request_id):
            return None
        request = tracker.request
        # The engine has to compute at least one token to sample from.
        wanted_end = request.num_tokens - 1
        tracker.promise = None
        if (
            request.skip_reading_prefix_cache
            or computed_tokens % self._block_tokens
            or computed_tokens >= wanted_end
        ):
            self._manager.release(tracker.request_id)
            return 0
        start = computed_tokens // self._block_tokens
        keys = tracker.keys()
        match = self._manager.match(tracker.request_id, [keys], start)
        if match.reads:
            return None
        tail = self._tail_candidates(tracker, start + match.blocks) if self._with_tails else None
        if tail is not None:
            match = self._manager.match(tracker.request_id, [keys[: tail.base_block]], start, [tail])
            if match.reads:
                return None
        tokens = min(match.blocks * self._block_tokens + match.tail_tokens, wanted_end - computed_tokens)
        if self._drop_last_block:
            tokens = max(0, (tokens - 1) // self._block_tokens * self._block_tokens)
        if not tracker.counted:
            # The engine asks again at every step in which the request finds no room.
            self._counters.add("flexkv_lookup_tokens_total", wanted_end - computed_tokens)
            tracker.counted = True
        if tokens <= 0:
            self._manager.release(tracker.request_id)
            return 0
        tracker.promise = Promise(start, tokens, match)
        return tokens

    def begin_load(
        self, tracker: RequestTracker, blocks: KVCacheBlocks, external_tokens: int
    ) -> TransferGraph | None:
        """The load that fills the blocks which the engine allocated for `external_tokens` of the last promise."""
        promise, tracker.promise = tracker.promise, None
        tracker.supplied = ()
        if promise is None or external_tokens <= 0:
            self._manager.release(tracker.request_id)
            return None
        # The engine may take less than it was promised; the last block may be needed in part only.
        pages = min(-(-external_tokens // self._block_tokens), _promised_pages(promise.match))
        self._counters.add("flexkv_hit_tokens_total", external_tokens)
        tracker.supplied = self._supplied(promise.match, external_tokens)
        table = blocks.get_block_ids()[GROUP]
        tracker.block_ids[:] = table
        targets = tracker.blocks(promise.start_block, promise.start_block + pages)
        with_tail = pages > promise.match.blocks
        return self._manager.begin_load(tracker.request_id, [targets], tail=with_tail)

    def _supplied(self, match: MatchResult, tokens: int) -> tuple[int, ...]:
        """Of the tokens that the engine takes, those that each tier has supplied: what lies in host memory comes first,
        but for a partial tail, which lies there too."""
        supplied, left = [], tokens
        for blocks in match.by_tier or (0,):
            supplied.append(min(blocks * self._block_tokens, left))
            left -= supplied[-1]
        supplied[0] += left
        return tuple(supplied)

    def _tail_candidates(self, tracker: RequestTracker, base_block: int) -> TailCandidates | None:
        request = tracker.request
        first = base_block * self._block_tokens
        # A tail that ends with the prompt serves all of it but the token that is computed anyway.
        end = min(first + self._block_tokens - 1, request.num_tokens)
        if end <= first:
            return None
        extra = tail_extra(request, first, end)
        if extra is None:
            return None
        if base_block > len(tracker.keys()):
            return None
        parent = tracker.parent_key(base_block)
        tokens = request.all_token_ids[first:end]
        return tail_candidates(
            tracker.namespace, GROUP, parent, extra, tokens, self._block_tokens, base_block
        )


def _promised_pages(match: MatchResult) -> int:
    return match.blocks + (1 if match.tail_tokens else 0)
