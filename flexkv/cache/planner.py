"""Turns pages that have slots into transfer graphs."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count

from flexkv.transfer.graph import BlockIds, OpId, OpKind, Priority, SlotIds, TransferGraph, TransferOp


class Planner:
    """Numbers ops and builds graphs over the host tier."""

    def __init__(self) -> None:
        self._numbers = count(1)

    def load(self, pages: Iterable[tuple[int, BlockIds, SlotIds]]) -> TransferGraph:
        """One H2D op for each `(group, engine blocks, slots)`; they do not wait for each other."""
        return TransferGraph(
            tuple(
                TransferOp(OpId(next(self._numbers)), OpKind.H2D, group, Priority.LOAD, blocks, slots)
                for group, blocks, slots in pages
            )
        )

    def store(self, group: int, blocks: BlockIds, slots: SlotIds) -> TransferGraph:
        """One D2H op."""
        op = TransferOp(OpId(next(self._numbers)), OpKind.D2H, group, Priority.STORE, blocks, slots)
        return TransferGraph((op,))
