"""Broken managers, each of which breaks one rule of the queue in which requests wait for host slots. The simulation
must catch every one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flexkv.cache.ledger.leases import HeldPages
from flexkv.cache.manager import LocalCacheManager
from flexkv.cache.promise.ask import Looked
from flexkv.cache.promise.room_line import Turn


class GivesRoomToHalves(LocalCacheManager):
    """A broken manager that gives the first request in the queue the slots that are available, and lets it wait for the
    rest.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        line, take_turn = self.promises.line, self.promises.line.take_turn

        def taken(request_id: str, need: Any, wait_s: float) -> Turn:
            first = line._is_first(line._places.get(request_id))
            turn = take_turn(request_id, need, wait_s)
            if turn is not Turn.WAIT or not first:
                return turn
            line.leave(request_id)
            return Turn.FETCH_SOME

        line.take_turn = taken  # type: ignore[method-assign]


class KeepsWhatItHasWhileItWaits(LocalCacheManager):
    """A broken manager that lets a request keep the pages that it found in host memory while it waits for host
    slots.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

        def keep(request_id: str, looked: Looked, held: Sequence[HeldPages]) -> None:
            for pages in held:
                self.hub.index.unpin(pages.entries)

        self.promises._give_up = keep  # type: ignore[method-assign]


class LetsOthersPass(LocalCacheManager):
    """A broken manager that gives a request enough host slots even if earlier requests wait for more."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.promises.line._is_first = lambda place: True  # type: ignore[method-assign]


class PassesNobody(LocalCacheManager):
    """A broken manager that keeps all requests waiting behind a request that its engine no longer looks up."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        line = self.promises.line
        line._is_first = (  # type: ignore[method-assign]
            lambda place: next(iter(line._places.values()), None) is place
        )


class SeesNoRoom(LocalCacheManager):
    """A broken manager that counts only free slots as available, although unleased blocks could be evicted."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        index = self.hub.index
        self.promises.line.has_room = (  # type: ignore[method-assign]
            lambda need: all(slots <= index.free_slots(owner) for owner, slots in need.slots.items())
        )


class PrefetchesPastTheLine(LocalCacheManager):
    """A broken manager whose prefetches take host slots that requests are waiting for."""

    def prefetch(self, *args: Any, **kwargs: Any) -> int:
        places, self.promises.line._places = self.promises.line._places, {}
        try:
            return super().prefetch(*args, **kwargs)
        finally:
            self.promises.line._places = places


BROKEN_LINES: list[type[LocalCacheManager]] = [
    GivesRoomToHalves,
    KeepsWhatItHasWhileItWaits,
    LetsOthersPass,
    PassesNobody,
    SeesNoRoom,
    PrefetchesPastTheLine,
]
