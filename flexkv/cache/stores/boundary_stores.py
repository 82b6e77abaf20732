"""Eager stores of windows, chunks and states, at the boundaries that a step reaches. They cannot be stored later,
because in the next step their first blocks may belong to another request.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from flexkv.cache.stores.base import BlocksByGroup, StepBlocks, StoreRequest
from flexkv.cache.stores.boundaries import NO_STATES, Boundaries, StateBlocks, pages_at
from flexkv.cache.stores.planner import RequestStores
from flexkv.facts.keys import Rule
from flexkv.observe import PageLoss
from flexkv.transfer.graph import TransferGraph


class BoundaryStores:
    """Offers the pages of windows, chunks and states for a planner of eager stores.

    Attributes:
        boundaries: where hits on the engine's requests may end.
    """

    def __init__(self, planner: RequestStores) -> None:
        parts = planner.parts
        self._planner = planner
        self._manager = parts.manager
        self._watch = parts.watch
        self._prompt_only = parts.settings.tokens == "prompt"
        self.boundaries = Boundaries(
            parts.groups,
            parts.alignment_tokens,
            parts.settings.checkpoint_tokens,
            handed_over=parts.states_handed_over,
        )

    def plan(self, request: StoreRequest, step: StepBlocks) -> list[TransferGraph]:
        """Plans stores of the pages that end at the boundaries which the step reaches."""
        self._note_end(request)
        reached = list(self._reached(request, step))
        if request.stale:
            for group in self.boundaries.groups:
                self._planner.taint(request, request.tables[group].ids)
        blocks = step.blocks(request.request_id) if reached else None
        if blocks is None:
            return []
        prompt, shared = request.prompt_tokens, request.leading_shared
        spare = [self.boundaries.is_spare(boundary, prompt, shared) for boundary, _ in reached]
        # Spare pages come last, because they may be dropped.
        in_turn = sorted(zip(reached, spare, strict=True), key=lambda planned: planned[1])
        return [
            graph
            for (boundary, states), is_spare in in_turn
            for graph in self._plan_pages_at(request, boundary, blocks, states, is_spare)
        ]

    def plan_end(self, request: StoreRequest, blocks: BlocksByGroup) -> list[TransferGraph]:
        """Plans stores of the pages that end at the last boundary of a request that has ended."""
        boundary = self.boundaries.last_before(request.certain)
        if self.boundaries.has_states and boundary != request.states_at:
            return []
        return self._plan_pages_at(request, boundary, blocks)

    def _note_end(self, request: StoreRequest) -> None:
        """Records that the step's forward pass leaves the states of the tokens up to its end."""
        if self.boundaries.may_end_at(request.step_end) and not self.boundaries.handed_over:
            request.states_at = request.step_end

    def _reached(self, request: StoreRequest, step: StepBlocks) -> Iterator[tuple[int, StateBlocks]]:
        """Records the boundaries that the step reaches; yields them, ascending, each with the blocks of its states."""
        reached, certain = request.reached_tokens, request.certain
        prompt, shared = request.prompt_tokens, request.leading_shared
        if not self.boundaries.has_states:
            request.reached_tokens = max(reached, certain)
            for boundary in self.boundaries.between(reached, certain, prompt, shared):
                yield boundary, NO_STATES
            return
        for boundary, states in self._with_states(request, step):
            if (self._prompt_only and boundary > prompt) or request.storable(boundary) < boundary:
                return
            if self.boundaries.wants_states(boundary, request.reached_tokens, prompt, shared):
                request.reached_tokens = boundary
                yield boundary, states

    def _with_states(self, request: StoreRequest, step: StepBlocks) -> list[tuple[int, StateBlocks]]:
        """The boundaries whose states the engine has now, ascending, each with the blocks that hold the states. The
        blocks are empty if the engine hands none over: they are then in the request's tables.
        """
        if self.boundaries.handed_over:
            return self.boundaries.among(step.states(request.request_id))
        # A block in the table does not prove that it holds a state: only a step that ended there has written one, and a
        # failed load leaves blocks in the table too.
        return [(request.states_at, NO_STATES)] if request.states_at <= request.certain else []

    def _plan_pages_at(
        self,
        request: StoreRequest,
        boundary: int,
        blocks: BlocksByGroup,
        states: StateBlocks = NO_STATES,
        spare: bool = False,
    ) -> list[TransferGraph]:
        """Plans stores of all windows, chunks and states that a hit of `boundary` tokens needs. Plans none if the
        engine has given away one of these pages, without which no hit could end there."""
        if request.stale or not boundary:
            return []
        pages: dict[int, tuple[int, list[int]]] = {}
        for at, group in self.boundaries.groups.items():
            first, end = pages_at(group, boundary)
            # A state depends on all tokens before it.
            oldest = 0 if group.rule is Rule.STATE else first * group.block_tokens
            if request.kept_out.within(oldest, boundary):
                return []
            ids = [states[at]] if at in states else list(blocks[at][first:end])
            if len(ids) < end - first or not all(ids) or len(request.tables[at].keys.keys()) < end:
                return []
            pages[at] = first, ids
        needed = sum(len(ids) for _, ids in pages.values())
        if needed > self._watch.room:
            self._planner.count(needed, PageLoss.REFERENCE_LIMIT)
            return []
        if len(pages) > self._planner.places:
            self._planner.count(needed, PageLoss.BUSY)
            return []
        graphs = []
        for at, (first, ids) in pages.items():
            keys = request.tables[at].keys.keys()[first : first + len(ids)]
            blocks_at, ttl_s = np.array(ids, dtype=np.int32), request.settings.ttl_s
            plan = self._manager.begin_store(
                request.request_id, at, keys, blocks_at, first, spare=spare, ttl_s=ttl_s
            )
            self._planner.count(plan.dropped, PageLoss.NO_SLOT)
            graphs.append(self._planner.note_plan(request, at, plan, first))
        return [graph for graph in graphs if graph is not None]
