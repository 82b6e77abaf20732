"""Looks requests up, promises the engine the tokens that can be loaded, and plans and tracks the loads of these
tokens."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from vllm.v1.metrics.cache_hit_source import CacheHitSource

from flexkv.adapters.common.load_job import LoadJob
from flexkv.adapters.vllm.engine_spec import EngineSpec
from flexkv.adapters.vllm.requests import Promise, RequestTracker
from flexkv.cache.base import MatchResult, TailCandidates, of_first_tokens
from flexkv.cache.keys import tail_candidates
from flexkv.cache.stores.base import GROUP
from flexkv.facts.keys import Keys
from flexkv.observe import Counters, get_logger
from flexkv.transfer.graph import NO_OPS, BlockIds, OpId, TransferGraph
from flexkv.unit.base import EngineUnit

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput

    from flexkv.adapters.vllm.pool_geometry import PoolGeometry

logger = get_logger(__name__)

SOURCES = {
    "host": CacheHitSource.HOST,
    "peer-host": CacheHitSource.HOST,
    "disk": CacheHitSource.DISK,
    "peers": CacheHitSource.DISK,
}
"""vLLM's name for the source of a hit, by tier. The tier `peers` counts as disk, because it consists of other units'
folders on this machine's disks."""


def forward_spares_loads(geometry: PoolGeometry, output: SchedulerOutput) -> bool:
    """Whether the model runner touches none of the blocks that the step's async loads fill, from flexkv's first hook in
    the step to the end of the step's forward pass. These loads then need not wait for the forward pass.

    The blocks were free when the load got them. The request that had them before is no longer in a batch, and every
    forward pass that used them was enqueued on the engine's stream before the step's first hook. The request that waits
    for the load is not in a batch either, and the rows that pad a batch write to the null block. This reasoning fails
    in two cases. Model Runner V1 copies and clears new blocks after that hook (V2 does this before the hook). And in
    hybrid engines, runners move states between blocks.
    """
    return not (geometry.is_hybrid or output.kv_cache_block_copies or output.new_block_ids_to_zero)


class Loads:
    """The lookups and loads of one engine, from the engine's lookup of a request to the end of its load on every rank.

    `load.mode` decides when a load runs. An async load runs between steps while its request waits. A sync load runs
    within the step that needs it, before the forward pass. A layerwise load also runs within that step, and the forward
    pass waits for each layer just before it reads the layer.

    Attributes:
        jobs: the loads in flight, by the ids of their ops.
    """

    def __init__(self, unit: EngineUnit, spec: EngineSpec, counters: Counters) -> None:
        self._unit = unit
        self._manager = unit.manager
        geometry = spec.geometry
        self._groups = geometry.groups
        self._is_hybrid = geometry.is_hybrid
        self._alignment_tokens = geometry.alignment_tokens
        self._block_tokens = geometry.groups[0].block_tokens
        self._hashes_per_block = geometry.groups[0].hashes_per_block
        # If a draft model reads the main model's hidden states (EAGLE, MTP), the last block of a hit is not loaded but
        # computed, because the draft needs the hidden states there. vLLM treats hits in its own prefix cache in the
        # same way.
        self._drop_last_block = spec.role.drop_last_block
        self._with_tails = (
            spec.config.store.partial_blocks and not self._drop_last_block and not geometry.is_hybrid
        )
        self._sync = spec.config.load.mode != "async"
        self._by_layer = spec.config.load.mode == "layerwise"
        self._counters = counters
        self.jobs: dict[OpId, LoadJob] = {}

    # --- promises ---

    def match(self, tracker: RequestTracker, computed_tokens: int) -> int | None:
        """Looks the request up, and leases the pages that it finds beyond `computed_tokens`.

        Returns:
            The number of tokens promised. None while more pages are being read from disk or wait for free slots in host
            memory; the engine then asks again in its next step.
        """
        manager, request_id = self._manager, tracker.request_id
        if manager.still_waits(request_id):
            return None
        request = tracker.request
        # The engine must compute at least the last token, to sample the next one from its output.
        wanted_end = request.num_tokens - 1
        tracker.promise = None
        if (
            request.skip_reading_prefix_cache
            or tracker.settings.skip_load
            or tracker.unloadable
            or tracker.adapter_changed
            or computed_tokens % self._alignment_tokens
            or computed_tokens >= wanted_end
        ):
            manager.release(request_id)
            return 0
        keys = tracker.keys()
        if self._is_hybrid:
            # The keys are cut before the lookup. Cutting the hit after the lookup would be wrong, because a shorter hit
            # needs different pages.
            keys = self._cut(keys, wanted_end)
        settings = tracker.settings
        match = manager.match(request_id, keys, computed_tokens, None, settings)
        tracker.shared_tokens = match.shared_tokens
        if not match.is_final:
            return None
        end_block = (computed_tokens + match.tokens) // self._block_tokens
        tail = self._tail_candidates(tracker, end_block) if self._with_tails else None
        if tail is not None:
            keys = [keys[0][: tail.base_block]]
            match = manager.match(request_id, keys, computed_tokens, [tail], settings)
            if not match.is_final:
                return None
        tokens = min(match.tokens + match.tail_tokens, wanted_end - computed_tokens)
        if self._drop_last_block:
            tokens = max(0, (tokens - 1) // self._block_tokens * self._block_tokens)
        if not tracker.counted:
            # A lookup is counted once per admission, because the engine repeats the lookup in every step in which it
            # has no free blocks for the request.
            self._counters.add("flexkv_lookup_tokens_total", wanted_end - computed_tokens)
            tracker.counted = True
        if tokens <= 0:
            manager.release(request_id)
            return 0
        tracker.promise = Promise(tokens, match)
        return tokens

    def _cut(self, keys: Sequence[Keys], tokens: int) -> list[Keys]:
        """Returns the keys of the first `tokens` tokens, per group."""
        return [of[: tokens // group.block_tokens] for of, group in zip(keys, self._groups, strict=True)]

    def prefetch(self, tracker: RequestTracker, has_cached: Callable[[bytes], bool]) -> int:
        """Starts to fetch the request's pages to host memory, except the pages of leading blocks that the engine's own
        prefix cache has.

        Args:
            has_cached: takes a block's hash, and returns whether the engine's own prefix cache has the block.

        Returns:
            The number of fetches in flight.
        """
        request = tracker.request
        if request.skip_reading_prefix_cache or request.num_computed_tokens or self._is_hybrid:
            return 0
        start = self._own_blocks(request.block_hashes, has_cached) * self._block_tokens
        return self._manager.prefetch(tracker.request_id, tracker.keys(), start, tracker.settings)

    def _own_blocks(self, hashes: Sequence[bytes], has_cached: Callable[[bytes], bool]) -> int:
        """Returns how many leading blocks the engine's own prefix cache has. A binary search finds the number, because
        the engine evicts a request's last blocks first."""
        if self._hashes_per_block != 1:
            return 0  # the engine's cache uses hashes other than `hashes`
        return bisect.bisect_left(hashes, True, key=lambda block_hash: not has_cached(block_hash))

    def _tail_candidates(self, tracker: RequestTracker, base_block: int) -> TailCandidates | None:
        request = tracker.request
        first = base_block * self._block_tokens
        # The tail may include the prompt's last token, although the engine computes that token in any case.
        end = min(first + self._block_tokens - 1, request.num_tokens)
        if end <= first:
            return None
        parts, namespace = tracker.tail_parts(base_block, end), tracker.block_keys.namespace
        return parts and tail_candidates(namespace, GROUP, *parts, self._block_tokens, base_block)

    # --- loads ---

    def begin(self, tracker: RequestTracker, blocks: KVCacheBlocks, external_tokens: int) -> LoadJob | None:
        """Plans the load of those `external_tokens` promised tokens that the engine takes, into the `blocks` that it
        has allocated for the request.

        Returns:
            The load for the workers; None if there is nothing to load.
        """
        promise, tracker.promise = tracker.promise, None
        tracker.supplied = ()
        if promise is None or external_tokens == 0:
            self._manager.release(tracker.request_id)
        if external_tokens == 0:
            return None
        if promise is None:
            # The engine expects KV in blocks that no load will fill, so the blocks are reported as failed.
            logger.error(
                "request %s: %d tokens were taken without a promise", tracker.request_id, external_tokens
            )
            return self._lost(tracker, blocks)
        for table, group in zip(tracker.tables, self._groups, strict=True):
            table.ids[:] = blocks.get_block_ids()[group.number]
        self._counters.add("flexkv_hit_tokens_total", external_tokens)
        if self._is_hybrid:
            targets = self._targets(tracker, promise, external_tokens)
            if targets is None:
                self._manager.release(tracker.request_id)
                # The engine will look the request up again, and another promise would fail in the same way.
                tracker.unloadable = True
                return self._lost(tracker, blocks)
            graph = self._manager.begin_load(tracker.request_id, targets)
        else:
            graph = self._plan(tracker, promise.match, external_tokens)
        if graph is None:
            return None
        tracker.supplied = self._supplied(promise.match, external_tokens)
        # A tail's page is copied as a complete block. vLLM writes the tokens that follow the tail into that block
        # before it waits for the layer, so a load by layer might overwrite them. Therefore such a load must be complete
        # before the forward pass starts.
        if self._by_layer and not self._takes_tail(promise.match, external_tokens):
            graph = graph.layerwise()
        job = LoadJob(tracker.request_id, graph, self._sync)
        for op in graph.ops:
            self.jobs[op.op_id] = job
            if not self._sync:
                tracker.loading = op.op_id
        return job

    def _plan(
        self, tracker: RequestTracker, match: MatchResult, external_tokens: int
    ) -> TransferGraph | None:
        """Plans the load into the allocated blocks. The engine may have taken fewer tokens than were promised."""
        blocks = match.tokens // self._block_tokens
        tail = self._takes_tail(match, external_tokens)
        # The number is rounded up, because the engine may need only a part of the last block.
        pages = min(-(-external_tokens // self._block_tokens), blocks + tail)
        start = match.start_tokens // self._block_tokens
        targets = tracker.tables[0].blocks(start, start + pages)
        return self._manager.begin_load(tracker.request_id, [targets], tail=tail)

    def _takes_tail(self, match: MatchResult, external_tokens: int) -> bool:
        """Whether the engine took tokens of the match's partial tail."""
        return bool(match.tail_tokens) and external_tokens > match.tokens

    def _targets(
        self, tracker: RequestTracker, promise: Promise, external_tokens: int
    ) -> list[BlockIds] | None:
        """Returns the engine blocks into which the promised pages are loaded, per group. Returns None if the engine has
        no block for a page that the hit needs, or if it takes fewer tokens than were promised and there is no hit of
        that length."""
        match = promise.match
        if external_tokens != promise.tokens:
            end = match.start_tokens + external_tokens
            match = self._manager.match(
                tracker.request_id,
                self._cut(tracker.keys(), end),
                match.start_tokens,
                settings=tracker.settings,
            )
            if match.tokens != external_tokens:
                logger.error(
                    "request %s: the engine took %d tokens of %d; a hit of that length is not cached",
                    tracker.request_id,
                    external_tokens,
                    promise.tokens,
                )
                return None
        targets = []
        for table, found in zip(tracker.tables, match.groups, strict=True):
            target = table.blocks(found.first_block, found.first_block + len(found.slots))
            if len(target) < len(found.slots) or not target.all():
                logger.error(
                    "request %s: the engine has no block for some of the %d pages that a hit needs",
                    tracker.request_id,
                    len(found.slots),
                )
                return None
            targets.append(target)
        return targets

    def _lost(self, tracker: RequestTracker, blocks: KVCacheBlocks) -> LoadJob:
        """Makes a load without ops that reports all its blocks as failed, because the engine waits for KV that will
        never arrive."""
        ids = blocks.get_block_ids()
        lost = tuple(block for group in self._groups for block in ids[group.number])
        return LoadJob(tracker.request_id, NO_OPS, self._sync, lost)

    def _supplied(self, match: MatchResult, tokens: int) -> tuple[int, ...]:
        """Returns how many of the first `tokens` tokens of a hit each tier supplies, in the order of the tiers."""
        others = of_first_tokens(match.by_tier, tokens)[1:]
        # `by_tier` does not count a partial tail. The tail is in host memory, the first tier, and comes last in the
        # hit.
        return (tokens - sum(others), *others)

    def sources(self, tracker: RequestTracker, external_tokens: int) -> dict[CacheHitSource, int]:
        """Returns how many tokens of the request's last load came from each source; empty if that load did not have
        `external_tokens` tokens."""
        if sum(tracker.supplied) != external_tokens:
            return {}
        sources: dict[CacheHitSource, int] = {}
        for name, tokens in zip(self._unit.tier_names, tracker.supplied, strict=False):
            if tokens:
                source = SOURCES.get(name, CacheHitSource.EXTERNAL_UNSPECIFIED)
                sources[source] = sources.get(source, 0) + tokens
        return sources

    # --- in flight ---

    def ops_of(self, request_id: str) -> list[OpId]:
        """Returns the ops of the request's loads in flight."""
        return [op_id for op_id, job in self.jobs.items() if job.request_id == request_id]

    def end(self, op_id: OpId, tracker: RequestTracker | None) -> None:
        """Removes a load's op that has ended on every rank. `tracker` is the request's record; None if the request has
        ended."""
        job = self.jobs.pop(op_id, None)
        if tracker is not None and tracker.loading == op_id:
            # A load from two tiers has two ops. If the request ends, cancelling either op cancels the complete load.
            others = () if job is None else (op.op_id for op in job.graph.ops if op.op_id in self.jobs)
            tracker.loading = next(iter(others), None)
