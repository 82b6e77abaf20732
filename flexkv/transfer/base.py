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
"""Number of a graph that `submit` accepted, counted from 1 in each transfer engine."""


@dataclass(frozen=True, slots=True)
class LayerResult:
    """Result of `wait_layer`.

    Attributes:
        in_time: False if the deadline passed before the layer was in place. The ops continue.
        failed: for each load with failed pages, the positions of these pages within the op, int32 ascending. Pages
            that fail in a later layer are missing here; only the op's `OpResult` lists all failed pages.
    """

    in_time: bool
    failed: dict[OpId, NDArray[np.int32]]

    @property
    def ok(self) -> bool:
        """Whether the layer is in place for every page."""
        return self.in_time and not self.failed


@dataclass(frozen=True, slots=True)
class LaneReport:
    """State of the lane that executes one kind of op.

    Attributes:
        up: False while an op of this kind hangs: from the time when it has made no progress for too long until it ends.
        reason: why the lane is down; empty while it is up.
        open_ops: number of ops that have not ended.
        held_places: number of queue entries in use. An op occupies its entry until the op has ended and its result was
            polled.
        stuck: ops whose bytes may still be moving although the lane is down. Their slots and blocks must not be reused
            before their `OpResult` arrives.
        times_down: how often the lane went down.
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
        """Queues either all ops of `graph` or none. Returns None if a queue is full. Never blocks.

        Each op occupies a queue entry until its result has been polled.

        Args:
            stream: the engine's device stream (see `StreamLike`; 0 is torch's default). None if the engine's pool is
                plain memory, or if the data plane itself knows the stream. Copies start after all work that is on the
                stream at the time of the call. So a store reads the blocks as that work leaves them, and a load does
                not overwrite blocks that the work still reads.
            gated: whether to copy each layer only after `open_layers` has opened it. This is for stores of blocks that
                the engine has not written yet. The graph may contain layerwise D2H ops only. The graph keeps its queue
                entries until all layers were copied or `cancel` has ended the graph.
            after: a point that an earlier `record` returned; None for none. Copies then wait only for work before this
                point, not for all work on the stream. Precondition: work that was enqueued since that point does not
                write the graph's blocks and, if the graph is a load, does not read them. Ignored for a gated graph.

        Raises:
            BlockRangeError: a block or slot is out of range, or the slot is not mapped yet. Nothing was queued.
            ContractError: nothing was queued, because the graph has an unknown group, a kind without a lane, an edge
                that does not lead forward, different numbers of blocks and slots, arrays that are not int32
                C-contiguous, an op id that is in flight, a load with two pages for one block, or a store with two pages
                for one slot; because `stream` is not a stream; or because a gated graph has an op other than a
                layerwise D2H.
            ClosedError: the transfer engine or the pool was closed, or this is a forked child of its process.
        """

    @abstractmethod
    def record(self, stream: StreamLike | None = None) -> StreamPoint | None:
        """Records a point after all work enqueued on the engine's stream so far, and returns it. Returns None if the
        engine's pool is plain memory, which has no stream."""

    @abstractmethod
    def order_after(self, ticket: Ticket, deadline_s: float, stream: StreamLike | None = None) -> bool:
        """Makes work that is enqueued on the engine's stream from now on start after the graph's stores have read their
        blocks.

        Returns when the wait is enqueued on the stream, and does not wait for a running forward pass. If the pool is
        plain memory, which has no stream, the call itself waits until the stores have ended. The call also waits for
        stores that bypass host memory (GDS_WRITE), because a stream cannot wait for them.

        Returns:
            False if `deadline_s` seconds passed first. Also False, at once, if a GDS_WRITE waits for a running forward
            pass. If the result is False, the stores continue, and the stream does not wait for them.

        Raises:
            ContractError: the ticket was never issued, or the stream is being captured into a CUDA graph.
        """

    @abstractmethod
    def open_layers(self, tickets: Sequence[Ticket], layers: int, stream: StreamLike | None = None) -> None:
        """Lets the gated graphs of `tickets` copy layers 0 to `layers` - 1. Never blocks.

        Precondition: the engine's work that writes these layers has been enqueued on `stream`. Layers that were opened
        before, and graphs that have ended, are ignored.

        Args:
            stream: the engine's device stream, as for `submit`. The layers are copied after all work that is on the
                stream at the time of the call.

        Raises:
            ContractError: a ticket was never issued, or `stream` is not a stream. No layer was opened.
            BlockRangeError: `layers` is negative, or larger than a graph's number of layers. No layer was opened.
        """

    @abstractmethod
    def poll(self, max_results: int = 1024) -> list[OpResult]:
        """Returns up to `max_results` results of ops, oldest first, and removes them. Each op has exactly one result,
        which appears after the op's last byte has stopped moving.
        """

    @property
    @abstractmethod
    def event_fd(self) -> int:
        """A file descriptor for `select` or `poll`. It is readable if and only if results wait to be polled. Do not
        read or close it.
        """

    @abstractmethod
    def wait(self, ticket: Ticket, deadline_s: float) -> bool:
        """Waits up to `deadline_s` seconds until all ops of the graph have ended. Returns False if an op has not ended;
        the ops then continue. The ops' results stay in the queue for `poll`.

        Raises:
            ContractError: the ticket was never issued.
        """

    @abstractmethod
    def wait_layer(
        self, ticket: Ticket, layer: int, deadline_s: float, stream: StreamLike | None = None
    ) -> LayerResult:
        """Waits up to `deadline_s` seconds until layer `layer` of every load in the graph is in place or has failed.

        In a graph without loads to a device, the DISK_READs count as loads: a layer is in place when it has been read
        into the host slots and verified. All layers of an op that is not layerwise are in place when the op has ended.

        With `stream`, the engine's device stream, the call returns when the layer's copies are enqueued. Work that is
        enqueued on `stream` from then on starts after these copies. If pages have failed already, the result lists
        them, and the stream does not wait. Pages that fail later are only in the op's `OpResult`.

        Raises:
            ContractError: the ticket was never issued, or so many graphs were polled after it that the engine has
                forgotten it. Or `stream` is not a stream, or is being captured into a CUDA graph.
            BlockRangeError: no load of the graph has such a layer.
        """

    @abstractmethod
    def cancel(self, ticket: Ticket) -> int:
        """Cancels the graph's pages that no lane has taken yet, and returns their number. The other pages finish, and
        each op has a result as usual.

        The status of an op is CANCELLED if no lane had taken any of its pages. It is FAILED if some pages were taken
        and some cancelled; the result lists the pages that did not arrive. It is OK if all pages had already arrived.
        """

    @abstractmethod
    def lanes(self) -> list[LaneReport]:
        """Returns one report for each kind of op that this transfer engine can run."""

    @abstractmethod
    def close(self, deadline_s: float) -> bool:
        """Cancels queued pages and waits up to `deadline_s` seconds for pages that are moving. Later calls of `submit`
        raise ClosedError; `poll` still works.

        Returns False if some pages are still moving. The memory that they touch is not freed, and the caller should
        call `close` again.
        """
