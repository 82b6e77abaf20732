"""Loads: how much of a request can be loaded, the load that keeps such a promise, and the loads in flight."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from vllm.v1.metrics.cache_hit_source import CacheHitSource

from flexkv.adapters.common.base import LoadJob
from flexkv.adapters.vllm.block_keys import GROUP, tail_extra
from flexkv.adapters.vllm.engine_spec import EngineSpec
from flexkv.adapters.vllm.requests import Promise, RequestTracker
from flexkv.cache.base import MatchResult, TailCandidates
from flexkv.cache.keys import tail_candidates
from flexkv.facts.keys import Keys
from flexkv.observe import Counters, get_logger
from flexkv.transfer.graph import NO_OPS, BlockIds, OpId, TransferGraph
from flexkv.unit.base import EngineUnit

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput

    from flexkv.adapters.vllm.pool_geometry import PoolGeometry

logger = get_logger(__name__)

SOURCES = {"host": CacheHitSource.HOST, "disk": CacheHitSource.DISK, "peers": CacheHitSource.DISK}
"""What vLLM calls the tiers; other units' folders lie on disks of this machine."""


def forward_spares_loads(geometry: PoolGeometry, output: SchedulerOutput) -> bool:
    """Whether nothing that a model runner does in a step, from our first hook to the end of its forward, can touch
    blocks that an async load of the step fills: then the load need not wait for that forward.

    Those blocks were free. Who had them last is in no batch any more, and every forward that had them was given to the
    engine's stream before the step's first hook. Who waits for them is in no batch either, and the rows that pad a
    batch write to the null block. What is left is the copying and clearing of new blocks, which Model Runner V1 does
    after that hook (V2 before it), and blocks of several groups, in which runners move states about.
    """
    return not (geometry.is_hybrid or output.kv_cache_block_copies or output.new_block_ids_to_zero)


class Loads:
    """Lookups and loads of one engine, from its question how much of a request is cached to the load's end on every
    rank.

    `load.mode` decides when they run: async loads between steps, sync ones within the step that needs them, layerwise
    ones too, and there the forward waits for each layer when it comes to it.
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
        # A hit leaves a block to compute where a draft model reads the main model's hidden states (EAGLE, MTP): it
        # needs them for the end of the prompt. The engine does so with its own prefix cache too.
        self._drop_last_block = spec.role.drop_last_block
        self._with_tails = (
            spec.config.store.partial_blocks and not self._drop_last_block and not geometry.is_hybrid
        )
        self._sync = spec.config.load.mode != "async"
        self._by_layer = spec.config.load.mode == "layerwise"
        self._counters = counters
        self._jobs: dict[OpId, LoadJob] = {}

    # --- promises ---

    def match(self, tracker: RequestTracker, computed_tokens: int) -> int | None:
        """Tokens that can be loaded beyond `computed_tokens`; they are leased until they are loaded or released.

        None while more is being read from disk, or waits for room in host memory: the engine asks again with the next
        step.
        """
        manager, request_id = self._manager, tracker.request_id
        if manager.still_waits(request_id):
            return None
        request = tracker.request
        # The engine has to compute at least one token to sample from.
        wanted_end = request.num_tokens - 1
        tracker.promise = None
        if (
            request.skip_reading_prefix_cache
            or tracker.unloadable
            or computed_tokens % self._alignment_tokens
            or computed_tokens >= wanted_end
        ):
            manager.release(request_id)
            return 0
        keys = tracker.keys()
        if self._is_hybrid:
            # A hit cut short afterwards would need other pages.
            keys = self._cut(keys, wanted_end)
        match = manager.match(request_id, keys, computed_tokens)
        tracker.shared_tokens = match.shared_tokens
        if match.reads or match.awaits_room:
            return None
        end_block = (computed_tokens + match.tokens) // self._block_tokens
        tail = self._tail_candidates(tracker, end_block) if self._with_tails else None
        if tail is not None:
            match = manager.match(request_id, [keys[0][: tail.base_block]], computed_tokens, [tail])
            if match.reads or match.awaits_room:
                return None
        tokens = min(match.tokens + match.tail_tokens, wanted_end - computed_tokens)
        if self._drop_last_block:
            tokens = max(0, (tokens - 1) // self._block_tokens * self._block_tokens)
        if not tracker.counted:
            # The engine asks again at every step in which the request finds no room.
            self._counters.add("flexkv_lookup_tokens_total", wanted_end - computed_tokens)
            tracker.counted = True
        if tokens <= 0:
            manager.release(request_id)
            return 0
        tracker.promise = Promise(tokens, match)
        return tokens

    def _cut(self, keys: Sequence[Keys], tokens: int) -> list[Keys]:
        """Of each group, the keys of the first `tokens`."""
        return [of[: tokens // group.block_tokens] for of, group in zip(keys, self._groups, strict=True)]

    def prefetch(self, tracker: RequestTracker, has_cached: Callable[[bytes], bool]) -> int:
        """Begins to fetch what follows the blocks that the engine has itself; how many fetches are under way.

        Args:
            has_cached: whether the engine's own prefix cache has the block of a hash.
        """
        request = tracker.request
        if request.skip_reading_prefix_cache or request.num_computed_tokens or self._is_hybrid:
            return 0
        start = self._own_blocks(request.block_hashes, has_cached)
        return self._manager.prefetch(tracker.request_id, tracker.keys(), start * self._block_tokens)

    def _own_blocks(self, hashes: Sequence[bytes], has_cached: Callable[[bytes], bool]) -> int:
        """Leading blocks that the engine has, found in a few steps: it gives up the last blocks of a request first."""
        if self._hashes_per_block != 1:
            return 0  # the engine knows its blocks by other hashes
        return bisect.bisect_left(hashes, True, key=lambda block_hash: not has_cached(block_hash))

    def _tail_candidates(self, tracker: RequestTracker, base_block: int) -> TailCandidates | None:
        request = tracker.request
        first = base_block * self._block_tokens
        # A tail that ends with the prompt serves all of it but the token that is computed anyway.
        end = min(first + self._block_tokens - 1, request.num_tokens)
        if end <= first:
            return None
        extra = tail_extra(request, first, end)
        keys = tracker.block_keys
        if extra is None or base_block > len(keys.keys()):
            return None
        parent = keys.parent(base_block)
        tokens = request.all_token_ids[first:end]
        return tail_candidates(keys.namespace, GROUP, parent, extra, tokens, self._block_tokens, base_block)

    # --- loads ---

    def begin(self, tracker: RequestTracker, blocks: KVCacheBlocks, external_tokens: int) -> LoadJob | None:
        """The engine has allocated the blocks of a request that was promised something, or takes some: it takes
        `external_tokens` of what was promised.

        Returns:
            What the workers are to load; None where the engine takes nothing.
        """
        promise, tracker.promise = tracker.promise, None
        tracker.supplied = ()
        if promise is None or external_tokens == 0:
            self._manager.release(tracker.request_id)
        if external_tokens == 0:
            return None
        if promise is None:
            # The engine counts on blocks that nobody fills. They are reported as failed.
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
                # The engine asks again, and the same answer would end the same way.
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
            self._jobs[op.op_id] = job
            if not self._sync:
                tracker.loading = op.op_id
        return job

    def _plan(
        self, tracker: RequestTracker, match: MatchResult, external_tokens: int
    ) -> TransferGraph | None:
        """The load that fills the allocated blocks; the engine may take less than it was promised."""
        blocks = match.tokens // self._block_tokens
        # The last block may be needed in part only.
        pages = min(-(-external_tokens // self._block_tokens), blocks + bool(match.tail_tokens))
        start = match.start_tokens // self._block_tokens
        targets = tracker.tables[0].blocks(start, start + pages)
        return self._manager.begin_load(tracker.request_id, [targets], tail=pages > blocks)

    def _targets(
        self, tracker: RequestTracker, promise: Promise, external_tokens: int
    ) -> list[BlockIds] | None:
        """The engine blocks that take what was promised of each group; None where the engine has none for a page that
        the hit needs, or takes another length that the cache has not."""
        match = promise.match
        if external_tokens != promise.tokens:
            end = match.start_tokens + external_tokens
            match = self._manager.match(
                tracker.request_id, self._cut(tracker.keys(), end), match.start_tokens
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
        """A load that fails: the engine counts on what nobody brings."""
        ids = blocks.get_block_ids()
        lost = tuple(block for group in self._groups for block in ids[group.number])
        return LoadJob(tracker.request_id, NO_OPS, self._sync, lost)

    def _supplied(self, match: MatchResult, tokens: int) -> tuple[int, ...]:
        """Of the tokens that the engine takes, those that each tier has supplied: what lies in host memory comes first,
        but for a partial tail, which lies there too."""
        supplied, left = [], tokens
        for of_tier in match.by_tier or (0,):
            supplied.append(min(of_tier, left))
            left -= supplied[-1]
        supplied[0] += left
        return tuple(supplied)

    def sources(self, tracker: RequestTracker, external_tokens: int) -> dict[CacheHitSource, int]:
        """Tokens of the request's last load by where they came from; empty where that load was of another number."""
        if sum(tracker.supplied) != external_tokens:
            return {}
        sources: dict[CacheHitSource, int] = {}
        for name, tokens in zip(self._unit.tier_names, tracker.supplied, strict=False):
            if tokens:
                source = SOURCES.get(name, CacheHitSource.EXTERNAL_UNSPECIFIED)
                sources[source] = sources.get(source, 0) + tokens
        return sources

    # --- in flight ---

    def end(self, op_id: OpId, tracker: RequestTracker | None) -> None:
        """The load's op has ended on every rank; `tracker` is that of its request, if that still lives."""
        job = self._jobs.pop(op_id, None)
        if tracker is not None and tracker.loading == op_id:
            # A load from both tiers has two ops; by either of them all of it is cancelled.
            others = () if job is None else (op.op_id for op in job.graph.ops if op.op_id in self._jobs)
            tracker.loading = next(iter(others), None)

    def __contains__(self, op_id: OpId) -> bool:
        return op_id in self._jobs

    def __iter__(self) -> Iterator[OpId]:
        return iter(self._jobs)

    def __len__(self) -> int:
        return len(self._jobs)
