"""What of a request that has ended is stored."""

from __future__ import annotations

from typing import Any

import numpy as np

from flexkv.adapters.tensorrt_llm.rank_coordinator import Joined
from flexkv.adapters.tensorrt_llm.requests import GROUP, Tracked
from flexkv.observe import Counters
from flexkv.transfer.graph import TransferGraph, TransferOp


class RequestStores:
    """Plans stores of whole blocks that a forward has certainly computed.

    Args:
        prompt_only: `store.tokens` is "prompt".
    """

    def __init__(self, counters: Counters, prompt_only: bool) -> None:
        self._counters = counters
        self._prompt_only = prompt_only

    def plan(
        self, joined: Joined, tracked: Tracked, request: Any, block_ids: list[int]
    ) -> TransferGraph | None:
        """The stores of a request with these engine blocks; None when there is nothing to store."""
        if tracked.keys is None:
            return None
        tokens = request.get_tokens(0)
        blocks = np.asarray(block_ids[: self._end(tracked, len(tokens)) // joined.block_tokens], np.int32)
        keys = tracked.keys.of(tokens)
        ops: list[TransferOp] = []
        for first, last in present_runs(blocks):
            plan = joined.unit.manager.begin_store(
                str(tracked.request_id), GROUP, keys[first:last], blocks[first:last], first
            )
            self._counters.add("flexkv_dropped_store_pages_total", plan.dropped, reason="busy")
            if plan.graph is not None:
                ops += plan.graph.ops
        return TransferGraph(tuple(ops)) if ops else None

    def _end(self, tracked: Tracked, tokens: int) -> int:
        """How many of the request's tokens have KV that is certain."""
        computed = tracked.computed
        if computed and tokens > tracked.prompt_tokens:
            # A token was sampled, which takes all of the prompt.
            computed = max(computed, tracked.prompt_tokens)
        # The last token was sampled and not fed back, so it has no KV.
        end = min(computed, tokens - 1)
        if self._prompt_only and tracked.prompt_tokens:
            end = min(end, tracked.prompt_tokens)
        return max(0, end)


def present_runs(blocks: np.ndarray[Any, np.dtype[np.int32]]) -> list[tuple[int, int]]:
    """The ranges of positions whose block exists: the engine says -1 where it keeps no page."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], (blocks >= 0).astype(np.int8), [0]))))
    return [(int(first), int(last)) for first, last in zip(edges[::2], edges[1::2], strict=True)]
