"""Stores one segment: copies its pages from the staging pool to the host pool."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from flexkv.blend.keys import GROUP, SegmentKeys
from flexkv.blend.segment_moves import LateBlocks, SegmentMoves
from flexkv.cache.manager import LocalCacheManager
from flexkv.transfer.base import Ticket

LOOK_EVERY_S = 0.001
"""Seconds between two checks of whether another store operation has finished writing blocks of the segment."""


class SegmentStore:
    """An operation that stores one segment, whose rows are in blocks of the staging pool. The segment's full blocks are
    stored first; the tokens after them follow when the full blocks are stored and their staging blocks are free.

    Call order:
        `advance` until it returns True or raises; or `leave`.

    Args:
        blocks: the staging blocks with the segment's rows, which this object frees; int32 [blocks].
        block_tokens: tokens per block.
        name: returns a new id for a request to the manager.
        deadline_s: how long the operation may take, in seconds.

    Attributes:
        keys: the segment's keys.
        failure: why pages were not copied; empty if all pages for which host memory had slots were copied.
    """

    def __init__(
        self,
        moves: SegmentMoves,
        manager: LocalCacheManager,
        keys: SegmentKeys,
        blocks: NDArray[np.int32],
        block_tokens: int,
        name: Callable[[], str],
        deadline_s: float,
    ) -> None:
        self._moves, self._manager, self._name = moves, manager, name
        self.keys, self._blocks, self._block_tokens = keys, blocks, block_tokens
        self._ends_s = time.monotonic() + deadline_s
        self._parts = [self._begin_whole, self._begin_tail]
        self._request = self.failure = ""
        self._ticket: Ticket | None = None
        self._moving = blocks[:0]

    @property
    def is_late(self) -> bool:
        """Whether the operation's deadline has passed."""
        return time.monotonic() >= self._ends_s

    def advance(self, wait: bool = False, until_s: float = math.inf) -> bool:
        """Continues the store operation. Returns whether it has finished.

        Args:
            wait: whether to wait for the operation to finish, until its deadline at most. If False, this never waits.
            until_s: an earlier end of the wait (`time.monotonic`).
        """
        until_s = min(until_s, self._ends_s)
        try:
            while self._request or self._parts:
                if not self._request:
                    if self._parts[0]():
                        self._parts.pop(0)
                    elif not wait or time.monotonic() >= until_s:
                        return False
                    else:
                        time.sleep(LOOK_EVERY_S)
                    continue
                wait_s = max(0.0, until_s - time.monotonic()) if wait else 0.0
                if self._ticket is not None and not self._moves.engine.wait(self._ticket, wait_s):
                    return False
                self._end_part()
        except BaseException:
            self.leave()  # copies may still be in flight
            raise
        self._free()
        return True

    def leave(self) -> None:
        """Abandons the store operation. Its staging blocks are freed when no copy is in flight any more. Idempotent."""
        self._parts.clear()
        if self._request:
            tickets = () if self._ticket is None else (self._ticket,)
            self._moves.leave(LateBlocks(tickets, self._moving, (self._request,)))
            self._request, self._blocks = "", np.setdiff1d(self._blocks, self._moving)
        self._free()

    def _begin_whole(self) -> bool:
        whole = len(self.keys.whole)
        if whole:
            self._begin(self.keys.whole, self._blocks[:whole], 0, self._block_tokens)
        return True

    def _begin_tail(self) -> bool:
        """Starts storing the tokens after the last full block, if all full blocks are stored. Returns False if this
        must be called again, because another store operation is still writing some of the full blocks.
        """
        tail, whole = self.keys.tail, self.keys.whole
        if tail is None:
            return True
        self._moves.take_results()
        if self._manager.present(GROUP, whole).all():
            self._begin(tail.keys, self._blocks[-1:], len(whole), int(tail.tokens[0]))
            return True
        return not self._manager.known(GROUP, whole).all()

    def _begin(self, keys: NDArray[np.uint8], blocks: NDArray[np.int32], first: int, tokens: int) -> None:
        request = self._name()
        plan = self._manager.begin_store(request, GROUP, keys, blocks, first, tokens)
        if plan.graph is not None:
            try:
                self._ticket = self._moves.submit(plan.graph)
            except Exception:
                self._manager.release(request)
                raise
            if self._ticket is None:
                self.failure = "the transfer queue was full"
        self._request, self._moving = request, blocks

    def _end_part(self) -> None:
        if self._ticket is not None:
            self._ticket = None
            self._moves.take_results()
        request, self._request = self._request, ""
        self.failure = self.failure or self._moves.take_reason(request)
        moved, self._moving = self._moving, self._moving[:0]
        self._blocks = np.setdiff1d(self._blocks, moved)
        self._moves.staging.give(moved.tolist())
        self._manager.release(request)
        self._moves.begin_reads()

    def _free(self) -> None:
        blocks, self._blocks = self._blocks, self._blocks[:0]
        self._moves.staging.give(blocks.tolist())
