"""The contract of the layerwise pipelines: devices, streams, events, and the sources and transforms of rows.

A *row* is one token's K (or V) of one layer, shape [heads, head_width]. A *plane* is K or V. An *array* is a NumPy
array on the host device, and the device's own tensor type elsewhere. The pipelines only index arrays, with int64 arrays
and slices.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from flexkv.errors import TransferError

Array: TypeAlias = Any
"""An array of the device: `numpy.ndarray`, or another type that is indexed like it, such as `torch.Tensor`."""

RowNumbers: TypeAlias = NDArray[np.int64]
"""One number per row: a token's position, a row number or a slot. int64, shape [rows]."""

PREFETCH_LAYERS = 2
"""The default number of layers that a pipeline holds at the same time, each in its own buffer."""


class LostRows(TransferError):
    """A row source cannot deliver a chunk's rows, or a row target cannot take them. The message says why. Only this
    chunk fails."""


class PipelineError(TransferError):
    """A pipeline failed, or had not finished at its deadline. None of the bytes that it moved may be used."""


@dataclass(frozen=True, slots=True)
class RowPositions:
    """For each row of a buffer, the position in a sequence at which it was computed, and the position at which it will
    be used.

    Attributes:
        old: the positions at which the rows were computed, int64 [rows]; 0 for rows that no chunk covers.
        new: the positions at which the rows will be used, int64 [rows].
    """

    old: RowNumbers
    new: RowNumbers


class LayerTransform(Protocol):
    """Changes one layer's keys in place, usually by a rotation from old to new positions."""

    def __call__(self, layer: int, keys: Array, positions: RowPositions) -> None:
        """Changes `keys`, shape [rows, heads, head_width], in the pool's dtype. V is never passed.

        The pipeline calls this once per layer, in ascending order, as work of the compute stream. On the host device
        the call runs in that stream's thread. On a GPU the compute stream is the current stream, and the call enqueues
        its work and returns. Rows that no chunk covers contain old data. If these rows will be written to paged memory
        (`takes_gaps`), the pipeline zeros them after the call. If the call raises, the pipeline ends, and all chunks
        fail.
        """


class LayerScatter(Protocol):
    """Writes one layer to paged memory in place of the pipeline. Usually rotates the keys in the same pass."""

    def __call__(self, layer: int, rows: Array, gaps: Array) -> None:
        """Writes `rows`, shape [planes, rows, heads, head_width], to their slots. Writes zeros for the rows in `gaps`.

        The pipeline calls this once per layer, in ascending order, as work of the store stream. If the call raises, the
        pipeline ends, and all chunks fail.

        Args:
            gaps: numbers of the rows that no chunk covers, from `LayerDevice.index`. The content of these rows in
                `rows` is undefined.
        """


class RowSource(Protocol):
    """The source of one chunk's rows of one layer."""

    def copy_to(self, rows: Array) -> None:
        """Fills `rows`, shape [planes, tokens, heads, head_width]; plane 0 has the keys. The pipeline calls this once,
        as work of the load stream.

        Raises:
            LostRows: the source cannot deliver the rows. The pipeline then treats all rows of the chunk as rows that no
                chunk covers, even those that `copy_to` has written.
        """


class RowTarget(Protocol):
    """The target of one chunk's rows of one layer."""

    def copy_from(self, rows: Array) -> None:
        """Copies `rows`, shape [planes, tokens, heads, head_width], to the target. The pipeline calls this once, as
        work of the store stream.

        Raises:
            LostRows: the target could not take the rows.
        """


class Event(ABC):
    """A point in a stream's work. Every event is reached, even if work before it failed."""

    @abstractmethod
    def wait(self, deadline_s: float) -> bool:
        """Blocks the caller until the event is reached. Returns False if `deadline_s` seconds passed first."""

    @property
    @abstractmethod
    def error(self) -> str:
        """The first failure of work before the event, in the event's stream or in another stream for which the event's
        stream waited. Empty if nothing failed.

        Call order:
            After `wait` has returned True.
        """


class Stream(ABC):
    """Executes work in the order in which it was queued, concurrently with the caller."""

    @abstractmethod
    def run(self, work: Callable[[], None], stage: str, layer: int) -> None:
        """Queues `work`. The work is skipped if earlier work has failed in this stream, or in another stream for which
        this stream waited.

        Args:
            stage: the pipeline's stage, for traces and errors: "load", "transform", "scatter", "gather" or "store".
            layer: the layer that `work` processes, for errors.
        """

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Makes work that is queued from now on start after `event` is reached."""

    @abstractmethod
    def record(self) -> Event:
        """Returns an event that is reached when all work queued so far has ended."""


class LayerDevice(ABC):
    """A device on which pipelines run. Several pipelines may run at the same time."""

    @abstractmethod
    def stream(self, name: str) -> Stream:
        """Makes a stream for one pipeline. A failure in the stream affects no other pipeline. `name` is "load",
        "compute" or "store".

        Raises:
            ClosedError: the device was closed.
        """

    @abstractmethod
    def buffer(self, shape: Sequence[int], dtype: Any) -> Array:
        """Returns an array in the device's memory. Its content is undefined."""

    @abstractmethod
    def index(self, numbers: NDArray[Any]) -> Array:
        """Converts row numbers to an array with which the device's arrays can be indexed. Also converts other tables
        that the device's kernels read."""

    def current_stream(self) -> int:
        """Returns the stream on which the calling thread currently enqueues work, as a `cudaStream_t`; 0 if the device
        has no streams.
        """
        return 0

    @abstractmethod
    def caller_event(self) -> Event | None:
        """Returns an event that is reached when the work that the caller has enqueued on its own stream so far has
        ended. Returns None if the device has no streams, so that the caller's work is already done.
        """

    @abstractmethod
    def caller_waits(self, event: Event, deadline_s: float) -> bool:
        """Makes the caller's next work run after `event`. On the host device the call blocks; on a GPU it makes the
        caller's stream wait, and returns.

        Returns False if the deadline passed first.
        """
