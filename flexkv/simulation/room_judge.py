"""Checks how lookups take room for their reads (`line_model` defines "room"). A lookup may take room only when it is
the request's turn. It takes either all the room that it needs or none.
"""

from __future__ import annotations

import numpy as np

from flexkv.cache.base import NO_ENTRY, MatchResult, Outcome
from flexkv.facts.keys import Rule
from flexkv.simulation.base import Key, require
from flexkv.simulation.line_model import ReadRoom
from flexkv.simulation.request import SimRequest
from flexkv.simulation.world import FETCH_OPS, FETCH_PAGES, World

MOST = ReadRoom(FETCH_PAGES, FETCH_OPS)


class RoomJudge:
    """Checks one lookup. The object must be made before the lookup.

    Args:
        tails: whether the lookup also asks for a partial tail.
    """

    def __init__(self, world: World, request: SimRequest, tails: bool) -> None:
        self._world, self._request = world, request
        self._waited = request.request_id in world.line
        self._was_first = world.line.first(request.request_id)
        self._ops = set(world.model.disk_ops)
        # Pages that were fetched for the request may be held although its lookup no longer needs them. These pages may
        # make the request wait once.
        self._in_its_way = world.manager.held_pages(request.request_id) > 0
        self._wanted = None if tails or not self._can_tell else self._all_there_is()

    @property
    def _can_tell(self) -> bool:
        """Whether this class can predict the lookup's reads: if there is room, the lookup reads all wanted pages that
        are on disk."""
        config = self._world.config
        others = config.measured_steps or config.gds_loads or config.tier_places or config.remote
        prefixes = all(spec.rule is Rule.FULL for spec in config.groups)
        return bool(config.disk_places) and prefixes and not others

    def _all_there_is(self) -> list[Key] | None:
        """Returns the request's pages from its start up to the first page that is neither in host memory, nor being
        copied to it, nor on disk. None if the pages exceed the limit of load pages. Also None if one of the pages is
        being stored, because the lookup may find that page on disk.
        """
        world, request = self._world, self._request
        room = world.model.limits.inflight_load_pages - world.model.load_pages()
        wanted: list[Key] = []
        steps = world.model.reach(request.request_id, request.keys, request.start)
        for step in range(request.start, request.start + steps):
            pages = [
                (group, request.keys[group][number])
                for group, count in enumerate(world.config.pages_a_step)
                for number in range(step * count, (step + 1) * count)
            ]
            if any(map(self._is_being_stored, pages)):
                return None
            if not all(map(self._is_somewhere, pages)):
                break
            wanted += pages
        return wanted if len(wanted) <= room else None

    def _is_being_stored(self, key: Key) -> bool:
        return self._world.model.pending.get(key) in self._world.model.ops

    def _is_somewhere(self, key: Key) -> bool:
        if key in self._world.model.visible or key in self._world.model.pending:
            return True
        array = np.frombuffer(key[1], np.uint8).reshape(1, 16)
        return bool(self._world.disk_tier.presence.find(key[0], array)[0] != NO_ENTRY)

    def judge(self, result: MatchResult, evicted: list[Key]) -> None:
        """Checks the result of the lookup.

        Args:
            evicted: keys that the lookup evicted from host memory.

        Raises:
            RuleBroken: the lookup took room out of turn, took only part of the room that it needs, or took none
                although there is room.
        """
        world, request = self._world, self._request
        if not world.config.asks_again:
            require(
                result.outcome is not Outcome.ASK_AGAIN,
                "a request is to wait whose engine does not ask again",
            )
            return
        if result.outcome is Outcome.ASK_AGAIN:
            self._judge_wait(result, evicted)
            return
        if world.line.reads_begun(self._ops, request.keys):
            world.report.room_given += self._waited
            world.line.check_given(self._was_first, self._wanted or (), MOST)
        world.line.leave(request.request_id)

    def _judge_wait(self, result: MatchResult, evicted: list[Key]) -> None:
        world, request = self._world, self._request
        world.report.room_waits += 1
        require(
            not result.tokens and not result.tail_tokens, "a request that waits for room is promised some"
        )
        held = world.manager.leased_pages(request.request_id) + world.manager.held_pages(request.request_id)
        require(not held, "a request that waits for room holds some")
        require(not evicted, "a lookup that has to wait evicted something")
        require(set(world.model.disk_ops) <= self._ops, "a lookup that has to wait began a read")
        if self._wanted is not None and not self._in_its_way:
            world.line.check_told_to_wait(self._was_first, self._wanted, MOST)
        world.line.ask(request.request_id)
