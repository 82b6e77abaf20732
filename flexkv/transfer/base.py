"""The data plane's contract: what may be asked of a transfer engine, and what it answers."""

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
    """The answer of `wait_layer`.

    Attributes:
        in_time: False when the deadline passed first; the ops go on.
        failed: of the graph's loads that have any, the positions that will not arrive, int32 ascending. What fails
            in a later layer is not known yet: the op's `OpResult` has the last word.
    """

    in_time: bool
    failed: dict[OpId, NDArray[np.int32]]

    @property
    def ok(self) -> bool:
        """The layer's bytes of every page are in place."""
        return self.in_time and not self.failed


@dataclass(frozen=True, slots=True)
class LaneReport:
    """State of one kind of op.

    Attributes:
        lane: what executes it.
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
        """Queues all of `graph`, or nothing: None means BUSY, a queue is full. Never blocks.

        A queue entry is held from here until the op's result has been polled.

        Args:
            stream: the engine's device stream (see `StreamLike`; 0 is torch's default), where the engine's pool lies on
                a device. Copies start after what it was given until now: a store sees what was written, a
                load overwrites nothing that is still to be read.
            gated: a store of blocks that are not written yet, of layerwise D2H ops only: each layer is copied once
                `open_layers` has named it. Until then the graph keeps its places; `cancel` ends it too.
            after: a point that `record` gave earlier: copies start after it instead of after what the stream was given
                until now, for blocks that nothing which it was given since then reads (a load) or writes. Of no effect
                in a gated graph.

        Raises:
            BlockRangeError: a block or slot is out of range, or the slot's memory is not up yet.
            ContractError: unknown group, a kind without a lane, an edge that does not lead forward, other counts of
                blocks and slots, arrays that are not int32 C-contiguous, a `stream` that is none, an op id in flight,
                a block that two pages of a load are to fill or a slot that two of a store are, another op than a
                layerwise D2H in a gated graph. Nothing was queued.
            ClosedError: the transfer engine or the pool was closed, or this is a forked child of its process.
        """

    @abstractmethod
    def record(self, stream: StreamLike | None = None) -> StreamPoint | None:
        """A point after all that the engine's stream was given until now; None where the pool is plain memory."""

    @abstractmethod
    def order_after(self, ticket: Ticket, deadline_s: float, stream: StreamLike | None = None) -> bool:
        """What the engine's stream is given from now on starts after all that the graph's stores read of its blocks.

        Returns when that much is enqueued, and so does not wait for a forward that runs; on plain memory, which has no
        stream, when the stores have ended. Stores without a page of host memory (GDS_WRITE) must have ended too.

        Returns:
            False when `deadline_s` seconds were over first, and at once where a GDS_WRITE stands behind a forward that
            runs: the stores go on, and nothing waits for them.

        Raises:
            ContractError: the ticket was never given, or the stream is captured into a graph.
        """

    @abstractmethod
    def open_layers(self, tickets: Sequence[Ticket], layers: int, stream: StreamLike | None = None) -> None:
        """Layers 0 to `layers` - 1 of these gated graphs have been written and may be copied. Never blocks.

        Saying so again, or of a graph that has ended, does nothing.

        Args:
            stream: as for `submit`: what it was given until now has written them.

        Raises:
            ContractError: a ticket was never given, or `stream` is none. No layer was opened.
            BlockRangeError: fewer than 0 layers, or more than such a graph has. No layer was opened.
        """

    @abstractmethod
    def poll(self, max_results: int = 1024) -> list[OpResult]:
        """Takes results, oldest first. Each op gives exactly one, after its last byte has stopped moving."""

    @property
    @abstractmethod
    def event_fd(self) -> int:
        """A descriptor for select/poll: readable exactly while results wait. Do not read or close it."""

    @abstractmethod
    def wait(self, ticket: Ticket, deadline_s: float) -> bool:
        """Whether every op of the graph ended within `deadline_s` seconds. On False the ops go on. Takes no result.

        Raises:
            ContractError: the ticket was never given.
        """

    @abstractmethod
    def wait_layer(
        self, ticket: Ticket, layer: int, deadline_s: float, stream: StreamLike | None = None
    ) -> LayerResult:
        """Waits until layer `layer` of all the graph's loads is in place, or has failed.

        Of a graph that loads nothing to a device these are its DISK_READs: in place means verified in the host slot.
        An op that is not layerwise counts when it has ended. With `stream` (the engine's, on a device) it returns when
        the layer's copies are enqueued, and what `stream` is given from then on starts after them; if pages have failed
        it names them and adds no wait. What fails later is in the op's `OpResult`, as always.

        Raises:
            ContractError: the ticket was never given, or its results were polled many graphs ago; `stream` is none, or
                is captured into a graph.
            BlockRangeError: no load of the graph has such a layer.
        """

    @abstractmethod
    def cancel(self, ticket: Ticket) -> int:
        """Drops the pages that no lane has taken, and returns how many. The others end; results come as always.

        An op of which nothing was issued ends CANCELLED; one of which a part was, FAILED with the pages that did not
        arrive; one that was through already, OK.
        """

    @abstractmethod
    def lanes(self) -> list[LaneReport]:
        """One entry for each kind of op that this transfer engine can run."""

    @abstractmethod
    def close(self, deadline_s: float) -> bool:
        """Cancels what is queued and waits for what moves. Then every submit raises ClosedError; poll still works.

        False: after `deadline_s` seconds something still moves; nothing that it touches was freed. Call again.
        """
