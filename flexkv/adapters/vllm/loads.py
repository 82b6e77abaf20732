"""Loads: promises of tokens that can be loaded, the loads that keep them, and the loads in flight."""

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
"""Tier -> vLLM's name for it. Peers count as disk, because other units' folders lie on disks of this machine."""


def forward_spares_loads(geometry: PoolGeometry, output: SchedulerOutput) -> bool:
    """Whether the model runner touches no block that an async load of the step fills, from our first hook to the end of
    its forward pass. Such a load need not wait for that forward pass.

    Those blocks were free. The request that had them last is in no batch any more, and every forward pass that used
    them was enqueued on the engine's stream before the step's first hook. The request that waits for them is in no
    batch either, and the rows that pad a batch write to the null block. There are two exceptions: Model Runner V1
    copies and clears new blocks after that hook (V2 does it before), and in hybrid engines runners move states between
    blocks.
    """
    return not (geometry.is_hybrid or output.kv_cache_block_copies or output.new_block_ids_to_zero)


class Loads:
    """Lookups and loads of one engine, from the engine's lookup of a request to the end of its load on every rank.

    `load.mode` decides when loads run: async loads between steps, sync loads within the step that needs them.
    Layerwise loads run within the step too, and its forward pass waits for each layer just before it reads the layer.

    Attributes:
        jobs: the loads in flight, by their ops.
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
        # If a draft model reads the main model's hidden states (EAGLE, MTP), a hit leaves one block to compute, because
        # the draft needs the states at the end of the prompt. The engine treats hits in its own prefix cache in the
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
        """Leases tokens that can be loaded beyond `computed_tokens`, and returns their number.

        Returns:
            None while more pages are being read from disk, or wait for room in host memory: the engine asks again with
            the next step.
        """
        manager, request_id = self._manager, tracker.request_id
        if manager.still_waits(request_id):
            return None
        request = tracker.request
        # The engine must compute at least one token to sample from.
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
            # Cut before the match, because a shorter hit needs different pages.
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
            # Counted once, because the engine asks again at every step in which the request finds no room.
            self._counters.add("flexkv_lookup_tokens_total", wanted_end - computed_tokens)
            tracker.counted = True
        if tokens <= 0:
            manager.release(request_id)
            return 0
        tracker.promise = Promise(tokens, match)
        return tokens

    def _cut(self, keys: Sequence[Keys], tokens: int) -> list[Keys]:
        """The keys of the first `tokens` tokens, per group."""
        return [of[: tokens // group.block_tokens] for of, group in zip(keys, self._groups, strict=True)]

    def prefetch(self, tracker: RequestTracker, has_cached: Callable[[bytes], bool]) -> int:
        """Starts to fetch the pages that follow the blocks which the engine has itself.

        Args:
            has_cached: whether the engine's own prefix cache has a block with this hash.

        Returns:
            The number of fetches under way.
        """
        request = tracker.request
        if request.skip_reading_prefix_cache or request.num_computed_tokens or self._is_hybrid:
            return 0
        start = self._own_blocks(request.block_hashes, has_cached) * self._block_tokens
        return self._manager.prefetch(tracker.request_id, tracker.keys(), start, tracker.settings)

    def _own_blocks(self, hashes: Sequence[bytes], has_cached: Callable[[bytes], bool]) -> int:
        """Number of leading blocks that the engine has, by binary search: it evicts a request's last blocks first."""
        if self._hashes_per_block != 1:
            return 0  # the engine caches its blocks under other hashes
        return bisect.bisect_left(hashes, True, key=lambda block_hash: not has_cached(block_hash))

    def _tail_candidates(self, tracker: RequestTracker, base_block: int) -> TailCandidates | None:
        request = tracker.request
        first = base_block * self._block_tokens
        # A tail that ends with the prompt serves all its tokens but the one that is computed anyway.
        end = min(first + self._block_tokens - 1, request.num_tokens)
        if end <= first:
            return None
        parts, namespace = tracker.tail_parts(base_block, end), tracker.block_keys.namespace
        return parts and tail_candidates(namespace, GROUP, *parts, self._block_tokens, base_block)

    # --- loads ---

    def begin(self, tracker: RequestTracker, blocks: KVCacheBlocks, external_tokens: int) -> LoadJob | None:
        """Called when the engine has allocated the blocks of a request: plans the load of the `external_tokens` that
        the engine takes from the promise.

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
            # The engine counts on blocks that no load will fill, so they are reported as failed.
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
                # The engine will ask again, and another promise would fail in the same way.
                tracker.unloadable = True
                return self._lost(tracker, blocks)
            graph = self._manager.begin_load(tracker.request_id, targets)
        else:
            graph = self._plan(tracker, promise.match, external_tokens)
        if graph is None:
            return None
        tracker.supplied = self._supplied(promise.match, external_tokens)
        if self._by_layer:
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
        """Plans the load that fills the allocated blocks. The engine may take fewer tokens than it was promised."""
        blocks = match.tokens // self._block_tokens
        # Rounded up, because the engine may need only a part of the last block.
        pages = min(-(-external_tokens // self._block_tokens), blocks + bool(match.tail_tokens))
        start = match.start_tokens // self._block_tokens
        targets = tracker.tables[0].blocks(start, start + pages)
        return self._manager.begin_load(tracker.request_id, [targets], tail=pages > blocks)

    def _targets(
        self, tracker: RequestTracker, promise: Promise, external_tokens: int
    ) -> list[BlockIds] | None:
        """The engine blocks to load the promised pages into, per group. None if the engine has no block for a page that
        the hit needs, or takes another number of tokens, for which the cache has no hit."""
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
        """A load without ops, which reports all its blocks as failed, because the engine waits for KV that never
        comes."""
        ids = blocks.get_block_ids()
        lost = tuple(block for group in self._groups for block in ids[group.number])
        return LoadJob(tracker.request_id, NO_OPS, self._sync, lost)

    def _supplied(self, match: MatchResult, tokens: int) -> tuple[int, ...]:
        """The tokens that the engine takes, by the tier that supplied them."""
        others = of_first_tokens(match.by_tier, tokens)[1:]
        # A partial tail comes last in the hit, and is in host memory.
        return (tokens - sum(others), *others)

    def sources(self, tracker: RequestTracker, external_tokens: int) -> dict[CacheHitSource, int]:
        """Tokens of the request's last load, by source; empty if that load had another number of tokens."""
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
        """The ops of the request's loads in flight."""
        return [op_id for op_id, job in self.jobs.items() if job.request_id == request_id]

    def end(self, op_id: OpId, tracker: RequestTracker | None) -> None:
        """Forgets a load's op that has ended on every rank; `tracker` is that of its request, if that still lives."""
        job = self.jobs.pop(op_id, None)
        if tracker is not None and tracker.loading == op_id:
            # A load from two tiers has two ops. The load can be cancelled as a whole by either of them.
            others = () if job is None else (op.op_id for op in job.graph.ops if op.op_id in self.jobs)
            tracker.loading = next(iter(others), None)
