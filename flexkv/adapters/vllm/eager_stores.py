"""Eager stores: each block is offered as soon as the step that completes it has been planned, and windows, chunks and
states at the boundaries that the step reaches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from flexkv.adapters.vllm.block_keys import GROUP, tail_extra
from flexkv.adapters.vllm.boundaries import NO_STATES, Boundaries, StateBlocks, pages_at
from flexkv.adapters.vllm.metadata import ConnectorMetadata
from flexkv.adapters.vllm.requests import RequestTracker
from flexkv.adapters.vllm.stores import BlocksByGroup, RequestStores, StoreTables
from flexkv.cache.base import Rule, StorePlan
from flexkv.cache.keys import tail_key
from flexkv.transfer.graph import BlockIds, TransferGraph

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

RETRY_STEPS = 16
"""Steps after which blocks that found no room are offered again. Offering costs microseconds for thousands of blocks,
and what fills queues takes milliseconds to drain: every step would be waste, never would lose the blocks."""


class EagerStores(RequestStores):
    """Offers the certain blocks of every scheduled request.

    With `store.mode` layerwise a step's stores are copied layer by layer, while its forward runs. Where stores end in
    the step (`stores_end_in_step`), what a step did not store is not stored at the request's end either: no hook of
    that connector class names the blocks that the engine hands out again.
    """

    def __init__(self, tables: StoreTables) -> None:
        super().__init__(tables)
        geometry, store = tables.spec.geometry, tables.spec.config.store
        self._with_tails = store.partial_blocks and not geometry.is_hybrid
        self._boundaries = Boundaries(geometry, store.checkpoint_tokens)
        self._full = [at for at, group in enumerate(self._groups) if group.rule is Rule.FULL]
        self._by_layer = store.mode == "layerwise"
        self._within_steps = tables.spec.role.stores_end_in_step

    def plan_step(self, output: SchedulerOutput, step: int, orders: ConnectorMetadata) -> None:
        for request_id, scheduled in output.num_scheduled_tokens.items():
            tracker = self._requests.live.get(request_id)
            if tracker is not None:
                certain = self._certain_after_step(tracker, scheduled)
                if self._boundaries.groups:
                    # First: where there is not room for all, the blocks of full attention are offered again.
                    self._note_end(tracker, tracker.request.num_computed_tokens + scheduled)
                    orders.stores += self._plan_boundaries(tracker, certain, output)
                # Of what was generated the forwards of earlier steps wrote the KV: this one only reads it.
                settled = certain <= tracker.request.num_computed_tokens
                for graph in self._plan(tracker, certain, step):
                    if settled:
                        orders.settled.append(graph)
                    else:
                        orders.stores.append(graph.layerwise() if self._by_layer else graph)

    def preempted(self, tracker: RequestTracker) -> None:
        """What was certain has been offered at every step."""

    def ended(
        self, tracker: RequestTracker, step: int, blocks: BlocksByGroup | None = None
    ) -> list[TransferGraph]:
        """What was generated since the last whole block was stored, and the tail."""
        if self._within_steps:
            return []
        certain = self._certain_at_end(tracker)
        tracker.retry_step = 0
        graphs = self._plan(tracker, certain, step)
        if self._with_tails and (tail := self._plan_tail(tracker, certain)) is not None:
            graphs.append(tail)
        if self._boundaries.groups and blocks is not None:
            boundary = self._boundaries.last_before(certain)
            if not self._boundaries.has_states or boundary == tracker.states_at:
                graphs += self._plan_pages_at(tracker, boundary, blocks)
        return graphs

    def load_failed(self, blocks: Iterable[int]) -> None:
        """Blocks are offered for a request, and their publishing is revoked with it."""

    def unpublished(self, blocks: BlockIds) -> None:
        """A request offers its blocks once; the next request with the same tokens offers them again."""

    def reset(self, stale_hashes: dict[int, bytes]) -> None:
        self._stale_hashes = stale_hashes

    def _plan(self, tracker: RequestTracker, certain_tokens: int, step: int) -> list[TransferGraph]:
        """Stores of whole blocks of full attention that have not been offered yet."""
        if step < tracker.retry_step:
            return []
        graphs = [
            graph for group in self._full for graph in self._plan_runs(tracker, group, certain_tokens, step)
        ]
        return [graph for graph in graphs if graph is not None]

    def _plan_runs(
        self, tracker: RequestTracker, group: int, certain_tokens: int, step: int
    ) -> Iterator[TransferGraph | None]:
        """Of a request without tokens that its caller keeps out, one run of blocks."""
        before = -1
        while tracker.tables[group].cursor > before:
            before = tracker.tables[group].cursor
            yield self._plan_group(tracker, group, certain_tokens, step)
            if not tracker.kept_out.spans:
                return

    def _plan_group(
        self, tracker: RequestTracker, group: int, certain_tokens: int, step: int
    ) -> TransferGraph | None:
        table = tracker.tables[group]
        block = self._groups[group].block_tokens
        first, end = table.cursor, min(certain_tokens // block, len(table.ids))
        if end <= first:
            return None
        if tracker.stale:
            self._taint(tracker, table.ids[first:end])
            table.cursor = end
            return None
        if kept := tracker.kept_out.within(first * block, end * block):
            if kept[0] < (first + 1) * block:
                table.cursor = min(end, -(-kept[1] // block))
                return None
            end = kept[0] // block
        keys = table.keys.keys()
        end = min(end, len(keys))
        room = self._watch.room
        if end - first > room:
            self._counters.add(
                "flexkv_dropped_store_pages_total", end - first - room, reason="reference_limit"
            )
            tracker.retry_step = step + RETRY_STEPS
            end = first + room
        if end <= first:
            return None
        plan = self._manager.begin_store(
            tracker.request_id, group, keys[first:end], table.blocks(first, end), first
        )
        if plan.dropped:
            self._counters.add("flexkv_dropped_store_pages_total", plan.dropped, reason="no_slot")
            tracker.retry_step = step + RETRY_STEPS
        else:
            table.cursor = end
        return self._planned(tracker, group, plan, first)

    def _planned(
        self, tracker: RequestTracker, group: int, plan: StorePlan, first_block: int
    ) -> TransferGraph | None:
        if self._events is not None:
            self._events.planned(tracker, group, plan, first_block)
        if plan.graph is not None:
            self._watch_blocks(plan.graph)
        return plan.graph

    def _note_end(self, tracker: RequestTracker, tokens: int) -> None:
        """Notes that the step's forward ends after so many of the request's tokens, and leaves their states there."""
        if self._boundaries.may_end_at(tokens) and not self._boundaries.handed_over:
            tracker.states_at = tokens

    def _plan_boundaries(
        self, tracker: RequestTracker, certain_tokens: int, output: SchedulerOutput
    ) -> list[TransferGraph]:
        """Stores of the windows, chunks and states that end at the boundaries which this step reaches. Now or never:
        with the next step their first blocks may be another request's."""
        state = output.kv_connector_block_state
        boundaries = list(self._reached(tracker, certain_tokens, output))
        if tracker.stale:
            for group in self._boundaries.groups:
                self._taint(tracker, tracker.tables[group].ids)
        blocks = state.get_block_ids(tracker.request_id) if boundaries and state is not None else None
        if blocks is None:
            return []
        prompt, shared = tracker.request.num_prompt_tokens, shared_tokens(tracker)
        spare = [self._boundaries.is_spare(boundary, prompt, shared) for boundary, _ in boundaries]
        # What is spare comes last: it is what there need not be room for.
        in_turn = sorted(zip(boundaries, spare, strict=True), key=lambda planned: planned[1])
        return [
            graph
            for (boundary, states), is_spare in in_turn
            for graph in self._plan_pages_at(tracker, boundary, blocks, states, is_spare)
        ]

    def _reached(
        self, tracker: RequestTracker, certain_tokens: int, output: SchedulerOutput
    ) -> Iterator[tuple[int, StateBlocks]]:
        """The boundaries that this step reaches, ascending, and where the states at each lie."""
        request, reached = tracker.request, tracker.reached_tokens
        prompt, shared = request.num_prompt_tokens, shared_tokens(tracker)
        if not self._boundaries.has_states:
            tracker.reached_tokens = max(reached, certain_tokens)
            for boundary in self._boundaries.between(reached, certain_tokens, prompt, shared):
                yield boundary, NO_STATES
            return
        for boundary, states in self._with_states(tracker, certain_tokens, output):
            if self._prompt_only and boundary > prompt:
                return
            if self._boundaries.wants_states(boundary, tracker.reached_tokens, prompt, shared):
                tracker.reached_tokens = boundary
                yield boundary, states

    def _with_states(
        self, tracker: RequestTracker, certain_tokens: int, output: SchedulerOutput
    ) -> list[tuple[int, StateBlocks]]:
        """The boundaries whose states the engine has now, ascending, each with the blocks that hold the states; without
        blocks where the engine hands none over, and the request's tables have them."""
        if self._boundaries.handed_over:
            state = output.kv_connector_block_state
            offers = state.boundary_state_offloads if state is not None else {}
            return self._boundaries.among(offers.get(tracker.request_id, ()))
        # A block in the table is no proof of a state: only a step that ended there has written it. A load that failed
        # leaves blocks in the table too.
        return [(tracker.states_at, NO_STATES)] if tracker.states_at <= certain_tokens else []

    def _plan_pages_at(
        self,
        tracker: RequestTracker,
        boundary: int,
        blocks: BlocksByGroup,
        states: StateBlocks = NO_STATES,
        spare: bool = False,
    ) -> list[TransferGraph]:
        """Stores of all windows, chunks and states that a hit of `boundary` tokens needs. None of them is stored where
        the engine has given away a page that one needs: without it no hit could end there."""
        if tracker.stale or not boundary:
            return []
        pages: dict[int, tuple[int, list[int]]] = {}
        for at, group in self._boundaries.groups.items():
            first, end = pages_at(group, boundary)
            # A state is made of all tokens before it.
            oldest = 0 if group.rule is Rule.STATE else first * group.block_tokens
            if tracker.kept_out.within(oldest, boundary):
                return []
            ids = list(blocks[group.number][first:end])
            if group.number in states:
                ids = [states[group.number]]
            if len(ids) < end - first or not all(ids) or len(tracker.tables[at].keys.keys()) < end:
                return []
            pages[at] = first, ids
        if sum(len(ids) for _, ids in pages.values()) > self._watch.room:
            self._counters.add(
                "flexkv_dropped_store_pages_total",
                sum(len(ids) for _, ids in pages.values()),
                reason="reference_limit",
            )
            return []
        graphs = []
        for at, (first, ids) in pages.items():
            keys = tracker.tables[at].keys.keys()[first : first + len(ids)]
            plan = self._manager.begin_store(
                tracker.request_id, at, keys, np.array(ids, dtype=np.int32), first, spare=spare
            )
            self._counters.add("flexkv_dropped_store_pages_total", plan.dropped, reason="no_slot")
            graphs.append(self._planned(tracker, at, plan, first))
        return [graph for graph in graphs if graph is not None]

    def _plan_tail(self, tracker: RequestTracker, certain_tokens: int) -> TransferGraph | None:
        """The store of the tokens after the last whole block, at the request's end."""
        block, tokens = divmod(certain_tokens, self._block_tokens)
        if tracker.stale or tracker.kept_out.within(certain_tokens - tokens, certain_tokens):
            return None
        if tokens == 0 or block >= len(tracker.block_ids) or self._watch.room < 1:
            return None
        request, first = tracker.request, certain_tokens - tokens
        extra = tail_extra(request, first, certain_tokens)
        keys = tracker.block_keys
        if extra is None or block > len(keys.keys()):
            return None
        parent = keys.parent(block)
        tail = request.all_token_ids[first:certain_tokens]
        key = tail_key(keys.namespace, GROUP, parent, extra, tail, block)
        plan = self._manager.begin_store(
            tracker.request_id, GROUP, key, tracker.tables[0].blocks(block, block + 1), block, tokens
        )
        if plan.graph is not None:
            self._watch_blocks(plan.graph)
        return plan.graph

    def _watch_blocks(self, graph: TransferGraph) -> None:
        for op in graph.ops:
            self._watch.add(op.op_id, op.blocks)


def shared_tokens(tracker: RequestTracker) -> int:
    """How many leading tokens of the request others had too, as far as flexkv's lookup and vLLM know."""
    return int(max(tracker.shared_tokens, tracker.request.shared_prefix_boundary))
