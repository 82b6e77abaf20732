"""Plans eager stores: each block of a prompt is offered as soon as the step that completes it is planned. Generated
blocks are offered several at a time. Windows, chunks and states are offered at the boundaries that a step reaches
(`boundary_stores.py`).

If there is no slot or queue entry for a block of full attention, the block is pending. It is offered again at every
step while its request lives, and then while it is held (`holds.py`). The pending blocks of a table are consecutive.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator

from flexkv.cache.stores.base import (
    GROUP,
    BlocksByGroup,
    StepBlocks,
    StoreOrders,
    StoreParts,
    StoreRequest,
)
from flexkv.cache.stores.boundary_stores import BoundaryStores
from flexkv.cache.stores.holds import Hold, Holds
from flexkv.cache.stores.planner import RequestStores
from flexkv.facts.keys import Rule
from flexkv.observe import PageLoss
from flexkv.transfer.graph import BlockIds, TransferGraph

PROBE_PAGES = 64
PROBE_GROWTH = 4
"""If a request has pending pages, the first offer of a step has PROBE_PAGES of them. If all of these get slots, the
next offer has PROBE_GROWTH times as many. So if no slots are free, a step makes only one small offer, however many
pages are pending."""


class EagerStores(RequestStores):
    """Offers the certain blocks of every scheduled request.

    With `store.mode` layerwise, a step's blocks are copied layer by layer while its forward pass runs. If stores end in
    their step (`StoreParts.ends_in_step`), blocks that no step has stored are not stored at the request's end either,
    because the engine does not report which blocks it reuses.
    """

    holds: Holds

    def __init__(self, parts: StoreParts) -> None:
        super().__init__(parts)
        store = parts.settings
        self._boundary_stores = BoundaryStores(self)
        self._has_boundaries = bool(self._boundary_stores.boundaries.groups)
        # Tails have keys only in a unit with one group of full attention.
        self._with_tails = store.partial_blocks and len(parts.groups) == 1 and not self._has_boundaries
        self._full_groups = [at for at, group in enumerate(self._groups) if group.rule is Rule.FULL]
        # With tiers behind host memory, a request may store more pages than host memory has slots, because evicted
        # pages are still cached.
        self._most_blocks = sys.maxsize if parts.has_tiers else parts.slots
        self._by_layer = store.mode == "layerwise"
        # If stores end in their step, nothing is stored at a request's end. So a generated block is offered at once: if
        # it waited for further blocks, it could be lost.
        self._generated_blocks = 1 if parts.ends_in_step else store.generated_blocks
        self.holds = Holds(parts.manager, parts.watch, store.hold_s, parts.counters)
        self._full: set[int] = set()
        """Groups for which a page got no slot in this step; no more of their pages are offered in this step."""

    def plan_step(
        self, requests: Iterable[StoreRequest], step: StepBlocks, orders: StoreOrders, idle: bool
    ) -> None:
        self._full.clear()
        if self.holds:
            orders.early += self._plan_holds(idle)
        for request in requests:
            if self._has_boundaries:
                # Windows, chunks and states are offered first, because they cannot be offered again later, while blocks
                # of full attention can.
                orders.stores += self._boundary_stores.plan(request, step)
            if request.certain < request.next_offer:
                continue
            # True if earlier steps have computed all certain tokens, so that this step's forward pass only reads them.
            settled = request.certain <= request.computed
            for graph in self._plan(request, request.request_id):
                if settled:
                    orders.settled.append(graph)
                else:
                    orders.stores.append(graph.layerwise() if self._by_layer else graph)
            request.next_offer = self._next_offer(request)

    def preempted(self, request: StoreRequest) -> None:
        """Counts the request's pending pages as lost, because the engine takes their blocks."""
        self._watch.release(request.request_id)
        self._give_up(request, PageLoss.PREEMPTED)

    def ended(self, request: StoreRequest, blocks: BlocksByGroup | None = None) -> list[TransferGraph]:
        """Plans stores of the blocks that are not stored yet, of the tail, and of the pages at the last boundary.
        Blocks of full attention that cannot be stored now are held.
        """
        if self.parts.ends_in_step:
            self._give_up(request, PageLoss.ENDED)
            return []
        self._watch.release(request.request_id)
        self._full.clear()
        graphs = self._plan(request, None)
        if self._with_tails and (tail := self._plan_tail(request)) is not None:
            graphs.append(tail)
        if self._has_boundaries and blocks is not None:
            graphs += self._boundary_stores.plan_end(request, blocks)
        if any(table.has_pending for table in request.tables):
            self.holds.begin(request, [self._end_of_hold(request, at) for at in range(len(self._groups))])
        return graphs

    def load_failed(self, blocks: Iterable[int]) -> None:
        """In each hold (see `holds.py`), drops the pending blocks from the first one that is in `blocks` on. Stores in
        flight are not affected: the caller revokes them by request.
        """
        if self.holds:
            bad = set(blocks)
            for hold in self.holds:
                for group in self._full_groups:
                    self.holds.cut(hold, group, bad, None)

    def unpublished(self, blocks: BlockIds) -> None:
        """Does nothing, because a request does not offer a block again. The next request with the same tokens offers
        it."""

    def reset(self, stale_hashes: dict[int, bytes]) -> None:
        self.holds.end_all(PageLoss.RESET)
        self._stale_hashes = stale_hashes

    # --- whole blocks of full attention ---

    def _plan(self, request: StoreRequest, holder: str | None) -> list[TransferGraph]:
        """Plans stores of certain whole blocks that were not offered yet, as many as slots and queue entries allow.

        Args:
            holder: id of the request while it holds its blocks; None at its end.
        """
        graphs: list[TransferGraph] = []
        for group in self._full_groups:
            table = request.tables[group]
            end = self._certain_end(request, group)
            fewest = 1 if holder is None or table.has_pending else self._fewest(request, group)
            if end - table.cursor < fewest:
                table.has_pending = table.has_pending and end > table.cursor
                continue
            if request.stale:
                self.taint(request, table.ids[table.cursor : end])
                self.count(
                    sum(last - first for first, last in self._runs(request, group, end)), PageLoss.RESET
                )
                table.cursor, table.has_pending = end, False
                continue
            end = min(end, len(table.keys.keys()))
            for first, end_of_run in self._runs(request, group, end):
                table.cursor = first
                graphs += self._offer(request, group, end_of_run, holder)
                if table.has_pending:
                    break
            else:
                table.cursor, table.has_pending = max(table.cursor, end), False
        return graphs

    def _next_offer(self, request: StoreRequest) -> int:
        """Returns the new value of `StoreRequest.next_offer`, with which steps skip most requests without examining
        their tables."""
        least = sys.maxsize
        for group in self._full_groups:
            table = request.tables[group]
            if table.has_pending:
                return 0
            end = table.cursor + self._fewest(request, group)
            least = min(least, end * self._groups[group].block_tokens)
        return least

    def _fewest(self, request: StoreRequest, group: int) -> int:
        """Returns the minimum number of blocks from the cursor on that are offered together: one in a prompt, several
        in generated tokens, because a store of one block costs a step as much time as a store of many.
        """
        generated = request.tables[group].cursor >= request.prompt_tokens // self._groups[group].block_tokens
        return self._generated_blocks if generated else 1

    def _runs(self, request: StoreRequest, group: int, end: int) -> Iterator[tuple[int, int]]:
        """Yields the ranges [first, end) of a group's blocks between the cursor and `end`, that have no token that the
        caller keeps out of the cache."""
        first, block = request.tables[group].cursor, self._groups[group].block_tokens
        while first < end:
            kept = request.kept_out.within(first * block, end * block)
            end_of_run = end if kept is None else kept[0] // block
            if first < end_of_run:
                yield first, end_of_run
            first = end if kept is None else min(end, -(-kept[1] // block))

    def _certain_end(self, request: StoreRequest, group: int) -> int:
        """Returns the number of a group's leading whole blocks that are certain."""
        return min(request.certain // self._groups[group].block_tokens, len(request.tables[group].ids))

    def _end_of(self, request: StoreRequest, group: int) -> int:
        """Returns the number of a FULL group's leading blocks that are certain and have a key; 0 for other groups."""
        if group not in self._full_groups:
            return 0
        table = request.tables[group]
        end = self._certain_end(request, group)
        return end if end <= table.cursor else min(end, len(table.keys.keys()))

    def _offer(
        self, request: StoreRequest, group: int, end: int, holder: str | None, held: bool = False
    ) -> list[TransferGraph]:
        """Offers blocks from the cursor to `end`, and moves the cursor past those that need not be offered again.

        Args:
            holder: id of the request while it holds its blocks; None at its end.
            held: whether the blocks belong to a hold (see `holds.py`).
        """
        table = request.tables[group]
        graphs: list[TransferGraph] = []
        fits = min(end, self._most_blocks)
        pages = PROBE_PAGES if table.has_pending else fits
        while table.cursor < fits and group not in self._full and self.places > 0:
            first = table.cursor
            last = min(fits, first + pages)
            if holder is None:
                last = min(last, first + max(0, self._watch.room))
            if held:
                last = first + self._watch.still_held(table.ids[first:last])
            if last == first:
                break
            plan = self._manager.begin_store(
                request.request_id,
                group,
                table.keys.keys()[first:last],
                table.blocks(first, last),
                first,
                ttl_s=request.settings.ttl_s,
            )
            if plan.dropped:
                table.cursor = first + plan.accepted
                self._full.add(group)
            else:
                table.cursor = last
                pages *= PROBE_GROWTH
            if (graph := self.note_plan(request, group, plan, first, holder, held)) is not None:
                graphs.append(graph)
        if fits < end and table.cursor >= fits:
            # Host memory is full of this request's own blocks. Further blocks would evict earlier ones, and a hit
            # cannot include a block without the blocks before it.
            self.count(end - table.cursor, PageLoss.NO_SLOT)
            table.cursor = end
        table.has_pending = table.cursor < end
        return graphs

    def _give_up(self, request: StoreRequest, reason: PageLoss) -> None:
        """Counts, under `reason`, the pages of a request that are not stored and whose blocks are lost."""
        for group in self._full_groups:
            for first, end in self._runs(request, group, self._end_of(request, group)):
                self.count(end - first, reason)

    def _end_of_hold(self, request: StoreRequest, group: int) -> int:
        """Returns the end of the pending blocks that are held. Blocks after the first block that the caller keeps out
        of the cache are not held but counted as lost, because no lookup reaches them.
        """
        runs = list(self._runs(request, group, self._end_of(request, group)))
        for first, end in runs[1:]:
            self.count(end - first, PageLoss.NO_SLOT)
        return runs[0][1] if runs else 0

    # --- ended requests ---

    def _plan_holds(self, idle: bool) -> list[TransferGraph]:
        """Plans stores of the pending pages of ended requests, as many as slots and queue entries allow. Ends holds
        that have no pages left or have expired."""
        graphs: list[TransferGraph] = []
        now_s = time.monotonic()
        for hold in self.holds:
            has_changed = self.holds.drop_lost(hold)
            # If no slot or queue entry is free, a step makes only a few comparisons per hold.
            if len(self._full) < len(self._full_groups) and self._watch.room > 0 and self.places > 0:
                has_changed = True
                for group in self._full_groups:
                    if hold.pending(group):
                        graphs += self._offer(hold.request, group, hold.ends[group], None, held=True)
                        self._drop_unwatched(hold, group)
            if has_changed and not hold.pages:
                self.holds.end(hold)
            elif now_s > hold.until_s:
                self.holds.end(hold, PageLoss.HOLD_EXPIRED)
            elif idle and not graphs and not self._manager.inflight_ops() and not self.parts.is_busy():
                # No op is in flight whose end could free a slot or queue entry.
                self.holds.end(hold, PageLoss.NO_SLOT)
        return graphs

    def _drop_unwatched(self, hold: Hold, group: int) -> None:
        """Drops the group's pending blocks of a hold if they are no longer watched, because the engine could reuse them
        unnoticed."""
        table = hold.request.tables[group]
        if hold.pending(group) and not self._watch.still_held(table.ids[table.cursor : table.cursor + 1]):
            self.holds.cut_at(hold, group, table.cursor, PageLoss.REUSED)

    def _plan_tail(self, request: StoreRequest) -> TransferGraph | None:
        """Plans the store of the tokens after the last whole block, at the request's end."""
        block, tokens = divmod(request.certain, self._block_tokens)
        if request.stale or request.kept_out.within(request.certain - tokens, request.certain):
            return None
        if tokens == 0 or block >= len(request.block_ids):
            return None
        if request.certain == request.settings.max_store_tokens:
            return None  # The block may contain tokens beyond the limit.
        key = request.tail_key(request.certain)
        if key is None:
            return None
        if self._watch.room < 1:
            self.count(1, PageLoss.REFERENCE_LIMIT)
            return None
        if self.places < 1:
            self.count(1, PageLoss.BUSY)
            return None
        plan = self._manager.begin_store(
            request.request_id,
            GROUP,
            key,
            request.tables[0].blocks(block, block + 1),
            block,
            tokens,
            ttl_s=request.settings.ttl_s,
        )
        self.count(plan.dropped, PageLoss.NO_SLOT)
        for op in plan.graph.ops if plan.graph is not None else ():
            self._watch.add(op.op_id, op.blocks)
        return plan.graph
