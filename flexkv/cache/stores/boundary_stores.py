"""Plans the eager stores (`eager.py`) of windows, chunks and states at the boundaries that a step reaches. The pages
cannot be stored later, because in the next step the engine may give some of their blocks to another request.
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
    """Plans the stores of windows, chunks and states for `EagerStores`.

    Attributes:
        boundaries: the lengths at which hits on the engine's requests may end.
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
        """Plans stores of the pages that end at the boundaries that the request reaches in this step."""
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
        # Spare pages come last, so that they are dropped first if there are not enough slots.
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
        """Records the end of the step if a hit may end there: after the step, the request's table has the states at
        this boundary."""
        if self.boundaries.may_end_at(request.step_end) and not self.boundaries.handed_over:
            request.states_at = request.step_end

    def _reached(self, request: StoreRequest, step: StepBlocks) -> Iterator[tuple[int, StateBlocks]]:
        """Records and yields the boundaries that the step reaches, ascending, each with the blocks of its states."""
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
        """Returns the boundaries whose states the engine has now, ascending, each with the blocks of the states. If the
        engine does not hand over states, their blocks are in the request's tables and not returned.
        """
        if self.boundaries.handed_over:
            return self.boundaries.among(step.states(request.request_id))
        # A block in the table contains a state only if a step ended at that block. A failed load leaves blocks without
        # a state in the table.
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
        request no longer has the block of one of these pages, because a hit needs them all."""
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
