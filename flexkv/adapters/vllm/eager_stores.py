"""Eager stores: each block is offered as soon as the step that completes it is planned. Windows, chunks and states are
offered at the boundaries that the step reaches.

A block of full attention that finds no room is pending: it is offered again at every step while its request lives, and
then while it is held (`holds.py`). The pending blocks of each block table are a range, so they need no list.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from flexkv.adapters.vllm.block_keys import GROUP, tail_extra
from flexkv.adapters.vllm.boundaries import NO_STATES, Boundaries, StateBlocks, pages_at
from flexkv.adapters.vllm.holds import Hold, Holds
from flexkv.adapters.vllm.metadata import ConnectorMetadata
from flexkv.adapters.vllm.requests import RequestTracker
from flexkv.adapters.vllm.stores import BlocksByGroup, RequestStores, StoreTables
from flexkv.cache.base import StorePlan
from flexkv.cache.keys import tail_key
from flexkv.facts.keys import Rule
from flexkv.observe import PageLoss
from flexkv.transfer.graph import BlockIds, TransferGraph

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

PROBE_PAGES = 64
PROBE_GROWTH = 4
"""A request with pending pages first offers PROBE_PAGES of them, and PROBE_GROWTH times as many each time all found
room. So a step without room makes one small offer, however many pages of however many requests are pending."""


class EagerStores(RequestStores):
    """Offers the certain blocks of every scheduled request.

    With `store.mode` layerwise, a step's stores are copied layer by layer while its forward runs. Where stores end in
    the step (`stores_end_in_step`), blocks that no step stored are not stored at the request's end either, because no
    hook of that connector class names the blocks that the engine hands out again.
    """

    holds: Holds

    def __init__(self, tables: StoreTables) -> None:
        super().__init__(tables)
        geometry, store = tables.spec.geometry, tables.spec.config.store
        self._with_tails = store.partial_blocks and not geometry.is_hybrid
        self._boundaries = Boundaries(geometry, store.checkpoint_tokens)
        self._full_groups = [at for at, group in enumerate(self._groups) if group.rule is Rule.FULL]
        self._tables = range(len(self._groups))
        # With a tier behind host memory, pages that are evicted from host memory are still cached.
        self._most_blocks = sys.maxsize if tables.unit.has_tiers else tables.unit.slots
        self._by_layer = store.mode == "layerwise"
        self._within_steps = tables.spec.role.stores_end_in_step
        self._unit = tables.unit
        self.holds = Holds(tables.unit.manager, tables.watch, store.hold_s, tables.counters)
        self._full: set[int] = set()
        """Groups that had no room for a page since the step began: none of their pages is offered again in the step."""

    def plan_step(self, output: SchedulerOutput, step: int, orders: ConnectorMetadata) -> None:
        self._full.clear()
        if self.holds:
            orders.early += self._plan_holds(idle=not output.total_num_scheduled_tokens)
        for request_id, scheduled in output.num_scheduled_tokens.items():
            tracker = self._requests.live.get(request_id)
            if tracker is not None:
                certain = tracker.certain = self._certain_after_step(tracker, scheduled)
                if self._boundaries.groups:
                    # Windows go first, because they cannot be offered again, while blocks of full attention can.
                    self._note_end(tracker, tracker.request.num_computed_tokens + scheduled)
                    orders.stores += self._plan_boundaries(tracker, certain, output)
                # Forwards of earlier steps wrote the KV of generated tokens. This step's forward only reads it.
                settled = certain <= tracker.request.num_computed_tokens
                for graph in self._plan(tracker, certain, request_id):
                    if settled:
                        orders.settled.append(graph)
                    else:
                        orders.stores.append(graph.layerwise() if self._by_layer else graph)

    def preempted(self, tracker: RequestTracker) -> None:
        """Counts pages that found no room until now: certain blocks were offered at every step, so these are lost."""
        self._watch.release(tracker.request_id)
        self._give_up(tracker, tracker.certain, PageLoss.PREEMPTED)

    def ended(
        self, tracker: RequestTracker, step: int, blocks: BlocksByGroup | None = None
    ) -> list[TransferGraph]:
        """Plans stores of whole blocks that were generated since the last store, and of the tail. Pages of full
        attention that find no room are held."""
        certain = self._certain_at_end(tracker)
        if self._within_steps:
            self._give_up(tracker, certain, PageLoss.ENDED)
            return []
        self._watch.release(tracker.request_id)
        self._full.clear()
        graphs = self._plan(tracker, certain, None)
        if self._with_tails and (tail := self._plan_tail(tracker, certain)) is not None:
            graphs.append(tail)
        if self._boundaries.groups and blocks is not None:
            boundary = self._boundaries.last_before(certain)
            if not self._boundaries.has_states or boundary == tracker.states_at:
                graphs += self._plan_pages_at(tracker, boundary, blocks)
        if any(table.has_pending for table in tracker.tables):
            self.holds.begin(tracker, [self._end_of_hold(tracker, group, certain) for group in self._tables])
        return graphs

    def load_failed(self, blocks: Iterable[int]) -> None:
        """Drops pending blocks of holds from the first of these on. Stores in flight need nothing here: they belong to
        requests, and their publishing is revoked by request."""
        if self.holds:
            bad = set(blocks)
            for hold in self.holds:
                for group in self._full_groups:
                    self.holds.cut(hold, group, bad, None)

    def unpublished(self, blocks: BlockIds) -> None:
        """Does nothing: a request offers its blocks once. The next request with the same tokens offers them again."""

    def reset(self, stale_hashes: dict[int, bytes]) -> None:
        self.holds.end_all(PageLoss.RESET)
        self._stale_hashes = stale_hashes

    # --- whole blocks of full attention ---

    def _plan(self, tracker: RequestTracker, certain_tokens: int, holder: str | None) -> list[TransferGraph]:
        """Plans stores of certain whole blocks that are not stored yet, as far as there is room.

        Args:
            holder: the request while it holds its blocks; None at its end.
        """
        graphs: list[TransferGraph] = []
        for group in self._full_groups:
            table = tracker.tables[group]
            end = min(certain_tokens // self._groups[group].block_tokens, len(table.ids))
            if end <= table.cursor:
                table.has_pending = False
                continue
            if tracker.stale:
                self._taint(tracker, table.ids[table.cursor : end])
                self.holds.count(
                    sum(last - first for first, last in self._runs(tracker, group, end)), PageLoss.RESET
                )
                table.cursor, table.has_pending = end, False
                continue
            end = self._end_of(tracker, group, certain_tokens)
            for first, end_of_run in self._runs(tracker, group, end):
                table.cursor = first
                graphs += self._offer(tracker, group, end_of_run, holder)
                if table.has_pending:
                    break
            else:
                table.cursor, table.has_pending = max(table.cursor, end), False
        return graphs

    def _runs(self, tracker: RequestTracker, group: int, end: int) -> Iterator[tuple[int, int]]:
        """The runs [first, end) of a group's blocks from the cursor to `end` that have no token that the caller keeps
        out."""
        first, block = tracker.tables[group].cursor, self._groups[group].block_tokens
        while first < end:
            kept = tracker.kept_out.within(first * block, end * block)
            end_of_run = end if kept is None else kept[0] // block
            if first < end_of_run:
                yield first, end_of_run
            first = end if kept is None else min(end, -(-kept[1] // block))

    def _end_of(self, tracker: RequestTracker, group: int, certain_tokens: int) -> int:
        """End of a group's blocks that are certain and have a key; 0 for a group that is not of full attention."""
        if group not in self._full_groups:
            return 0
        table = tracker.tables[group]
        end = min(certain_tokens // self._groups[group].block_tokens, len(table.ids))
        return end if end <= table.cursor else min(end, len(table.keys.keys()))

    def _offer(
        self, tracker: RequestTracker, group: int, end: int, holder: str | None, held: bool = False
    ) -> list[TransferGraph]:
        """Offers blocks from the cursor to `end`, and moves the cursor past all that need not be offered again."""
        table = tracker.tables[group]
        graphs: list[TransferGraph] = []
        fits = min(end, self._most_blocks)
        pages = PROBE_PAGES if table.has_pending else fits
        while table.cursor < fits and group not in self._full and self._places > 0:
            first = table.cursor
            last = min(fits, first + pages)
            if holder is None:
                last = min(last, first + max(0, self._watch.room))
            if held:
                last = first + self._watch.still_held(table.ids[first:last])
            if last == first:
                break
            plan = self._manager.begin_store(
                tracker.request_id, group, table.keys.keys()[first:last], table.blocks(first, last), first
            )
            if plan.dropped:
                table.cursor = first + plan.accepted
                self._full.add(group)
            else:
                table.cursor = last
                pages *= PROBE_GROWTH
            if (graph := self._planned(tracker, group, plan, first, holder, held)) is not None:
                graphs.append(graph)
        if fits < end and table.cursor >= fits:
            # The other blocks would evict the request's own blocks before them, without which no hit reaches them.
            self.holds.count(end - table.cursor, PageLoss.NO_SLOT)
            table.cursor = end
        table.has_pending = table.cursor < end
        return graphs

    def _give_up(self, tracker: RequestTracker, certain_tokens: int, reason: PageLoss) -> None:
        """Counts the pending pages of a request whose blocks are lost."""
        for group in self._full_groups:
            for first, end in self._runs(tracker, group, self._end_of(tracker, group, certain_tokens)):
                self.holds.count(end - first, reason)

    def _end_of_hold(self, tracker: RequestTracker, group: int, certain_tokens: int) -> int:
        """End of the pending blocks that are worth a hold. Counts the pending blocks after it as lost: no lookup
        reaches blocks behind one that the caller keeps out."""
        runs = list(self._runs(tracker, group, self._end_of(tracker, group, certain_tokens)))
        for first, end in runs[1:]:
            self.holds.count(end - first, PageLoss.NO_SLOT)
        return runs[0][1] if runs else 0

    # --- ended requests ---

    def _plan_holds(self, idle: bool) -> list[TransferGraph]:
        """Plans stores of the pending pages of ended requests, as far as there is room. Ends holds that have no pages
        left or have expired."""
        graphs: list[TransferGraph] = []
        now_s = time.monotonic()
        for hold in self.holds:
            has_changed = self.holds.drop_lost(hold)
            # Without room, each hold costs a step only a few comparisons.
            if len(self._full) < len(self._full_groups) and self._watch.room > 0 and self._places > 0:
                has_changed = True
                for group in self._full_groups:
                    if hold.pending(group):
                        graphs += self._offer(hold.tracker, group, hold.ends[group], None, held=True)
                        self._drop_unwatched(hold, group)
            if has_changed and not hold.pages:
                self.holds.end(hold)
            elif now_s > hold.until_s:
                self.holds.end(hold, PageLoss.HOLD_EXPIRED)
            elif idle and not graphs and not self._manager.inflight_ops() and not self._unit.busy:
                # No copy is under way that could make room when it ends.
                self.holds.end(hold, PageLoss.NO_SLOT)
        return graphs

    def _drop_unwatched(self, hold: Hold, group: int) -> None:
        """Drops pending blocks whose watcher was replaced, because their reuse would go unnoticed."""
        table = hold.tracker.tables[group]
        if hold.pending(group) and not self._watch.still_held(table.ids[table.cursor : table.cursor + 1]):
            self.holds.cut_at(hold, group, table.cursor, PageLoss.REUSED)

    def _planned(
        self,
        tracker: RequestTracker,
        group: int,
        plan: StorePlan,
        first_block: int,
        holder: str | None = None,
        held: bool = False,
    ) -> TransferGraph | None:
        if self._events is not None:
            self._events.planned(tracker, group, plan, first_block)
        for op in plan.graph.ops if plan.graph is not None else ():
            if held:
                self._watch.add_held(op.op_id, op.blocks)
            else:
                self._watch.add(op.op_id, op.blocks, holder)
        return plan.graph

    # --- windows, chunks and states ---

    def _note_end(self, tracker: RequestTracker, tokens: int) -> None:
        """Notes that the step's forward ends after so many of the request's tokens, and so leaves the states there."""
        if self._boundaries.may_end_at(tokens) and not self._boundaries.handed_over:
            tracker.states_at = tokens

    def _plan_boundaries(
        self, tracker: RequestTracker, certain_tokens: int, output: SchedulerOutput
    ) -> list[TransferGraph]:
        """Plans stores of the windows, chunks and states that end at the boundaries which this step reaches. They
        cannot be stored later: in the next step their first blocks may be another request's."""
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
        # Spare pages come last, because they may be dropped.
        in_turn = sorted(zip(boundaries, spare, strict=True), key=lambda planned: planned[1])
        return [
            graph
            for (boundary, states), is_spare in in_turn
            for graph in self._plan_pages_at(tracker, boundary, blocks, states, is_spare)
        ]

    def _reached(
        self, tracker: RequestTracker, certain_tokens: int, output: SchedulerOutput
    ) -> Iterator[tuple[int, StateBlocks]]:
        """Notes the boundaries that this step reaches; yields them, ascending, each with the blocks of its states."""
        request, reached = tracker.request, tracker.reached_tokens
        prompt, shared = request.num_prompt_tokens, shared_tokens(tracker)
        if not self._boundaries.has_states:
            tracker.reached_tokens = max(reached, certain_tokens)
            for boundary in self._boundaries.between(reached, certain_tokens, prompt, shared):
                yield boundary, NO_STATES
            return
        for boundary, states in self._with_states(tracker, certain_tokens, output):
            if (self._prompt_only and boundary > prompt) or tracker.storable(boundary) < boundary:
                return
            if self._boundaries.wants_states(boundary, tracker.reached_tokens, prompt, shared):
                tracker.reached_tokens = boundary
                yield boundary, states

    def _with_states(
        self, tracker: RequestTracker, certain_tokens: int, output: SchedulerOutput
    ) -> list[tuple[int, StateBlocks]]:
        """The boundaries whose states the engine has now, ascending, each with the blocks that hold the states. The
        blocks are empty where the engine hands none over: they are then in the request's tables."""
        if self._boundaries.handed_over:
            state = output.kv_connector_block_state
            offers = state.boundary_state_offloads if state is not None else {}
            return self._boundaries.among(offers.get(tracker.request_id, ()))
        # A block in the table does not prove that it holds a state: only a step that ended there has written one, and a
        # failed load leaves blocks in the table too.
        return [(tracker.states_at, NO_STATES)] if tracker.states_at <= certain_tokens else []

    def _plan_pages_at(
        self,
        tracker: RequestTracker,
        boundary: int,
        blocks: BlocksByGroup,
        states: StateBlocks = NO_STATES,
        spare: bool = False,
    ) -> list[TransferGraph]:
        """Plans stores of all windows, chunks and states that a hit of `boundary` tokens needs. Plans none if the
        engine has given away one of these pages, without which no hit could end there."""
        if tracker.stale or not boundary:
            return []
        pages: dict[int, tuple[int, list[int]]] = {}
        for at, group in self._boundaries.groups.items():
            first, end = pages_at(group, boundary)
            # A state depends on all tokens before it.
            oldest = 0 if group.rule is Rule.STATE else first * group.block_tokens
            if tracker.kept_out.within(oldest, boundary):
                return []
            ids = list(blocks[group.number][first:end])
            if group.number in states:
                ids = [states[group.number]]
            if len(ids) < end - first or not all(ids) or len(tracker.tables[at].keys.keys()) < end:
                return []
            pages[at] = first, ids
        needed = sum(len(ids) for _, ids in pages.values())
        if needed > self._watch.room:
            self.holds.count(needed, PageLoss.REFERENCE_LIMIT)
            return []
        if len(pages) > self._places:
            self.holds.count(needed, PageLoss.BUSY)
            return []
        graphs = []
        for at, (first, ids) in pages.items():
            keys = tracker.tables[at].keys.keys()[first : first + len(ids)]
            plan = self._manager.begin_store(
                tracker.request_id, at, keys, np.array(ids, dtype=np.int32), first, spare=spare
            )
            self.holds.count(plan.dropped, PageLoss.NO_SLOT)
            graphs.append(self._planned(tracker, at, plan, first))
        return [graph for graph in graphs if graph is not None]

    def _plan_tail(self, tracker: RequestTracker, certain_tokens: int) -> TransferGraph | None:
        """Plans the store of the tokens after the last whole block, at the request's end."""
        block, tokens = divmod(certain_tokens, self._block_tokens)
        if tracker.stale or tracker.kept_out.within(certain_tokens - tokens, certain_tokens):
            return None
        if tokens == 0 or block >= len(tracker.block_ids):
            return None
        request, first = tracker.request, certain_tokens - tokens
        extra = tail_extra(request, first, certain_tokens)
        keys = tracker.block_keys
        if extra is None or block > len(keys.keys()):
            return None
        parent = keys.parent(block)
        tail = request.all_token_ids[first:certain_tokens]
        key = tail_key(keys.namespace, GROUP, parent, extra, tail, block)
        if self._watch.room < 1:
            self.holds.count(1, PageLoss.REFERENCE_LIMIT)
            return None
        if self._places < 1:
            self.holds.count(1, PageLoss.BUSY)
            return None
        plan = self._manager.begin_store(
            tracker.request_id, GROUP, key, tracker.tables[0].blocks(block, block + 1), block, tokens
        )
        self.holds.count(plan.dropped, PageLoss.NO_SLOT)
        for op in plan.graph.ops if plan.graph is not None else ():
            self._watch.add(op.op_id, op.blocks)
        return plan.graph


def shared_tokens(tracker: RequestTracker) -> int:
    """Number of the request's leading tokens that others had too, as far as flexkv's lookup and vLLM know."""
    return int(max(tracker.shared_tokens, tracker.request.shared_prefix_boundary))
