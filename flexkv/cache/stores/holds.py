"""Keeps *holds*: blocks of ended requests that could not be stored yet. The blocks are watched in the engine's free
queue, for at most `store.hold_s` seconds, until slots and queue entries are free for them or the engine reuses them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flexkv.cache.base import CacheManager
from flexkv.cache.stores.base import HeldBlocks, StoreRequest, StoreWatch
from flexkv.observe import Counters, PageLoss


@dataclass(slots=True, eq=False)
class Hold:
    """The pending blocks of one ended request.

    Attributes:
        ends: per KV group, the end of its pending blocks [`cursor`, end). Only FULL groups have pending blocks.
        blocks: per KV group, the watched blocks; None if no block was pending.
        numbers: per KV group, the index within the request of each watched block, by block number.
        until_s: time on the monotonic clock at which the hold expires.
    """

    request: StoreRequest
    ends: list[int]
    blocks: list[HeldBlocks | None]
    numbers: list[dict[int, int]]
    until_s: float

    def pending(self, group: int) -> int:
        """Returns the number of pending pages of a group."""
        return max(0, self.ends[group] - self.request.tables[group].cursor)

    @property
    def pages(self) -> int:
        """Number of pending pages of all groups."""
        return sum(self.pending(group) for group in range(len(self.ends)))


class Holds:
    """The holds of one engine, oldest first. Counts, by reason, the pages that are dropped without being stored.

    If several ended requests had the same block, the block is in the hold of each of these requests. All held blocks
    are in the engine's free queue or are used by other requests. So the size of the engine's pool and `hold_s` limit
    the number of holds.
    """

    def __init__(self, manager: CacheManager, watch: StoreWatch, hold_s: float, counters: Counters) -> None:
        self._manager = manager
        self._watch = watch
        self._hold_s = hold_s
        self._counters = counters
        self._of_request: dict[str, Hold] = {}

    def __len__(self) -> int:
        return len(self._of_request)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._of_request

    def __iter__(self) -> Iterator[Hold]:
        return iter(list(self._of_request.values()))

    def begin(self, request: StoreRequest, ends: Sequence[int]) -> None:
        """Begins the hold of a request that is about to lose its blocks. The pending blocks of each group are those
        from the table's cursor to the group's element in `ends`."""
        blocks = [
            self._watch.hold(table.ids[table.cursor : end]) if end > table.cursor else None
            for table, end in zip(request.tables, ends, strict=True)
        ]
        numbers = [
            {block: number for number, block in enumerate(table.ids[table.cursor : end], table.cursor)}
            for table, end in zip(request.tables, ends, strict=True)
        ]
        self._of_request[request.request_id] = Hold(
            request, list(ends), blocks, numbers, time.monotonic() + self._hold_s
        )

    def drop_lost(self, hold: Hold) -> bool:
        """Drops the blocks that the engine has reused, and all blocks after these, because a hit cannot include a block
        without the blocks before it. Returns whether the engine has reused any block of the hold."""
        has_lost = False
        for group, blocks in enumerate(hold.blocks):
            if blocks is not None and blocks.lost:
                has_lost = True
                self.cut(hold, group, blocks.lost, PageLoss.RESET if blocks.was_reset else PageLoss.REUSED)
                blocks.lost.clear()
        return has_lost

    def cut(self, hold: Hold, group: int, lost: set[int], reason: PageLoss | None) -> None:
        """Drops a group's pending blocks from the first one in `lost` on. Counts them unless `reason` is None."""
        numbers, cursor, end = hold.numbers[group], hold.request.tables[group].cursor, hold.ends[group]
        # Blocks before the cursor are watched too, but they were already offered, so they are not pending.
        first = min(
            (number for block in lost if cursor <= (number := numbers.get(block, -1)) < end), default=end
        )
        if first < end:
            self.cut_at(hold, group, first, reason)

    def cut_at(self, hold: Hold, group: int, number: int, reason: PageLoss | None) -> None:
        """Drops a group's pending blocks from block `number` of the request on. Counts them unless `reason` is None."""
        if reason is not None:
            self.count(hold.ends[group] - number, reason)
        hold.ends[group] = number

    def end(self, hold: Hold, reason: PageLoss | None = None) -> None:
        """Ends a hold, and ends its request in the manager. Counts the pending pages unless `reason` is None."""
        if reason is not None:
            self.count(hold.pages, reason)
        for blocks in hold.blocks:
            if blocks is not None:
                self._watch.end_hold(blocks)
        del self._of_request[hold.request.request_id]
        # The request ends in the manager only now, because its end marks all its blocks as used together. These include
        # the blocks that were stored during the hold.
        self._manager.end_request(hold.request.request_id)

    def end_request(self, request_id: str, reason: PageLoss) -> None:
        """Ends the request's hold, if it has one."""
        if (hold := self._of_request.get(request_id)) is not None:
            self.end(hold, reason)

    def end_all(self, reason: PageLoss) -> None:
        for hold in self:
            self.end(hold, reason)

    def count(self, pages: int, reason: PageLoss) -> None:
        """Counts, under `reason`, pages that were computed and will not be stored."""
        reason.count(self._counters, pages)
