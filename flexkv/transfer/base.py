"""The data plane's contract: the methods of a transfer engine and the records that they return."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NewType

import numpy as np
from numpy.typing import NDArray

from flexkv.transfer.graph import OpId, OpKind, OpResult, TransferGraph
from flexkv.transfer.stream import StreamLike

if TYPE_CHECKING:
    from flexkv.c_ext import StreamPoint

Ticket = NewType("Ticket", int)
"""Number of an accepted graph, counting from 1 within one transfer engine."""


@dataclass(frozen=True, slots=True)
class LayerResult:
    """Result of `wait_layer`.

    Attributes:
        in_time: False if the deadline passed first; the ops continue.
        failed: for each load with failed pages, the positions that will not arrive, int32 ascending. Pages that fail in
            a later layer are not known yet: the op's `OpResult` is final.
    """

    in_time: bool
    failed: dict[OpId, NDArray[np.int32]]

    @property
    def ok(self) -> bool:
        """Whether the layer's bytes of every page are in place."""
        return self.in_time and not self.failed


@dataclass(frozen=True, slots=True)
class LaneReport:
    """State of the lane for one kind of op.

    Attributes:
        lane: name of the lane that executes the ops.
        up: False while an op on it has stopped moving; True again once that op has ended.
        reason: why it is down.
        open_ops: ops that have not ended.
        held_places: queue entries in use: ops that have not ended, or whose result has not been polled.
        stuck: ops whose bytes may still move although the lane is down. Their slots and blocks must not be reused
            before their `OpResult`.
        times_down: how often it went down.
    """

    kind: OpKind
    lane: str
    up: bool
    reason: str
    open_ops: int
    held_places: int
    stuck: tuple[OpId, ...]
    times_down: int


class DataPlane(ABC):
    """Runs transfer graphs. Every method may be called from any thread; only the waits block, each with a deadline."""

    @abstractmethod
    def submit(
        self,
        graph: TransferGraph,
        stream: StreamLike | None = None,
        gated: bool = False,
        after: StreamPoint | None = None,
    ) -> Ticket | None:
        """Queues all of `graph` or none of it. Returns None (BUSY) if a queue is full. Never blocks.

        Each op holds a queue entry from here until its result has been polled.

        Args:
            stream: the engine's device stream (see `StreamLike`; 0 is torch's default) if the engine's pool lies on a
                device. Copies start after the work enqueued on it so far: a store reads what that work wrote, and a
                load overwrites nothing that it still reads.
            gated: for a store of blocks that are not written yet, made of layerwise D2H ops only: each layer is copied
                once `open_layers` has opened it. Until then the graph keeps its queue entries; `cancel` ends it, too.
            after: a point that an earlier `record` returned. Copies start after it instead of after all work enqueued
                so far. Only for blocks that no work enqueued since then writes or, for a load, reads. Ignored in a
                gated graph.

        Raises:
            BlockRangeError: a block or slot is out of range, or the slot's memory is not up yet.
            ContractError: an unknown group, a kind without a lane, an edge that does not lead forward, different
                numbers of blocks and slots, arrays that are not int32 C-contiguous, a `stream` that is not one, an op
                id in flight, two pages of a load for one block or two of a store for one slot, or an op other than a
                layerwise D2H in a gated graph. Nothing was queued.
            ClosedError: the transfer engine or the pool was closed, or this is a forked child of its process.
        """

    @abstractmethod
    def record(self, stream: StreamLike | None = None) -> StreamPoint | None:
        """A point after all work enqueued on the engine's stream so far; None if the pool is plain memory."""

    @abstractmethod
    def order_after(self, ticket: Ticket, deadline_s: float, stream: StreamLike | None = None) -> bool:
        """Makes later work on the engine's stream start after the graph's stores have read their blocks.

        Returns once this is enqueued, without waiting for a running forward pass; on plain memory, which has no stream,
        returns once the stores have ended. Stores that bypass host memory (GDS_WRITE) must have ended, too.

        Returns:
            False if `deadline_s` seconds passed first, and at once if a GDS_WRITE waits for a running forward pass: the
                stores then continue, and the stream does not wait for them.

        Raises:
            ContractError: the ticket was never issued, or the stream is captured into a graph.
        """

    @abstractmethod
    def open_layers(self, tickets: Sequence[Ticket], layers: int, stream: StreamLike | None = None) -> None:
        """Lets these gated graphs copy layers 0 to `layers` - 1, which have been written. Never blocks.

        Opening layers again, or those of a graph that has ended, does nothing.

        Args:
            stream: as for `submit`; the work enqueued on it so far writes the layers.

        Raises:
            ContractError: a ticket was never issued, or `stream` is not a stream. No layer was opened.
            BlockRangeError: fewer than 0 layers, or more than such a graph has. No layer was opened.
        """

    @abstractmethod
    def poll(self, max_results: int = 1024) -> list[OpResult]:
        """Removes and returns results, oldest first. Each op has exactly one, after its last byte
        has stopped moving.
        """

    @property
    @abstractmethod
    def event_fd(self) -> int:
        """A descriptor for select/poll, which is readable if and only if results wait. Do not read or close it."""

    @abstractmethod
    def wait(self, ticket: Ticket, deadline_s: float) -> bool:
        """Waits up to `deadline_s` seconds until all ops of the graph have ended. If it returns False, they continue.
        Does not remove results.

        Raises:
            ContractError: the ticket was never issued.
        """

    @abstractmethod
    def wait_layer(
        self, ticket: Ticket, layer: int, deadline_s: float, stream: StreamLike | None = None
    ) -> LayerResult:
        """Waits until layer `layer` of all the graph's loads is in place, or has failed.

        If a graph loads nothing to a device, its DISK_READs count as loads: in place then means verified in the host
        slot. An op that is not layerwise counts once it has ended. With `stream` (the engine's, on a device) the call
        returns once the layer's copies are enqueued, and work enqueued on `stream` from then on starts after them; if
        pages have failed, it names them and adds no wait. Pages that fail later are in the op's `OpResult`, as always.

        Raises:
            ContractError: the ticket was never issued, or its results were polled many graphs ago; `stream` is not a
                stream, or is captured into a graph.
            BlockRangeError: no load of the graph has such a layer.
        """

    @abstractmethod
    def cancel(self, ticket: Ticket) -> int:
        """Cancels the pages that no lane has taken, and returns their number. The other pages end, and results come as
        usual.

        An op ends CANCELLED if no page of it was issued; FAILED, with the pages that did not arrive, if some were; and
        OK if all had already arrived.
        """

    @abstractmethod
    def lanes(self) -> list[LaneReport]:
        """One entry for each kind of op that this transfer engine can run."""

    @abstractmethod
    def close(self, deadline_s: float) -> bool:
        """Cancels queued pages and waits for those that are moving. Later submits raise ClosedError; poll still works.

        Returns False if some bytes still move after `deadline_s` seconds: no memory that they touch was freed. Call it
        again.
        """
