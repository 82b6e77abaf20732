"""The contract of the layerwise pipelines: devices, streams, events, and the sources and transforms of rows.

A *row* is one token's K (or V) of one layer, shape [heads, head_width]. An *array* here is a NumPy array on the host
device, and the device's own tensor type elsewhere; the pipelines only index arrays, with int64 arrays and slices.
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
"""An array of the device: `numpy.ndarray`, or anything that indexes like it (`torch.Tensor`)."""

RowNumbers: TypeAlias = NDArray[np.int64]
"""Positions of tokens, row numbers or slots, int64, shape [rows]."""

PREFETCH_LAYERS = 2
"""How many layers a pipeline holds at once, each in its own buffer."""


class LostRows(TransferError):
    """A row source or target has lost its rows; the text says why. Only its chunk fails."""


class PipelineError(TransferError):
    """A pipeline could not continue, or was still moving at its deadline; none of the bytes it moved may be used."""


@dataclass(frozen=True, slots=True)
class RowPositions:
    """Where in a sequence each row of a buffer was computed, and where it is to be used.

    Attributes:
        old: int64 [rows], 0 for rows that no chunk covers.
        new: int64 [rows].
    """

    old: RowNumbers
    new: RowNumbers


class LayerTransform(Protocol):
    """Changes one layer's keys in place, usually by a rotation from old to new positions."""

    def __call__(self, layer: int, keys: Array, positions: RowPositions) -> None:
        """Changes `keys`, shape [rows, heads, head_width], in the pool's dtype. Values are never passed.

        Called once per layer, in ascending order, in the device's compute stream: on a host device in a thread of that
        stream; on a GPU with that stream current, where it enqueues its work and returns. Rows that no chunk covers
        contain old data, and are zeroed afterwards if paged memory takes them (`takes_gaps`). An exception ends the
        pipeline with every row failed.
        """


class LayerScatter(Protocol):
    """Writes one layer to paged memory in its own way, usually turning keys while it writes them."""

    def __call__(self, layer: int, rows: Array, gaps: Array) -> None:
        """Writes `rows`, shape [planes, rows, heads, head_width], to their slots, but zeros for the rows in `gaps`.

        Called once per layer, in ascending order, in the device's store stream. An exception ends the pipeline with
        every row failed.

        Args:
            gaps: numbers of the rows that no chunk covers, from `LayerDevice.index`; their content is undefined.
        """


class RowSource(Protocol):
    """The source of one chunk's rows of one layer."""

    def copy_to(self, rows: Array) -> None:
        """Fills `rows`, shape [planes, tokens, heads, head_width], plane 0 the keys. Called once, in the load stream.

        Raises:
            LostRows: the rows will not come. Those written so far are rows that no chunk covers.
        """


class RowTarget(Protocol):
    """The target of one chunk's rows of one layer."""

    def copy_from(self, rows: Array) -> None:
        """Takes `rows`, shape [planes, tokens, heads, head_width]. Called once, in the store stream.

        Raises:
            LostRows: the rows could not be taken.
        """


class Event(ABC):
    """A point in a stream's work. It is always reached, even if work before it failed."""

    @abstractmethod
    def wait(self, deadline_s: float) -> bool:
        """Blocks the caller until the point is reached; False when `deadline_s` seconds passed first."""

    @property
    @abstractmethod
    def error(self) -> str:
        """The failure before the point, in its stream or in one that its stream waited for; empty if there was none.

        Read it after `wait` has returned True.
        """


class Stream(ABC):
    """Does work in the order in which it was queued, concurrently with the caller."""

    @abstractmethod
    def run(self, work: Callable[[], None], stage: str, layer: int) -> None:
        """Queues `work`. After a failure in this stream, or in one that it waited for, `work` is skipped.

        Args:
            stage: for traces: "load", "transform", "scatter", "gather", "store".
        """

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Makes work queued from now on start after `event` is reached."""

    @abstractmethod
    def record(self) -> Event:
        """The point after all work queued so far."""


class LayerDevice(ABC):
    """A device that pipelines run on, several at once if need be."""

    @abstractmethod
    def stream(self, name: str) -> Stream:
        """A new stream for one pipeline; failures in it affect no other pipeline. `name` is "load", "compute" or
        "store".

        Raises:
            ClosedError: the device was closed.
        """

    @abstractmethod
    def buffer(self, shape: Sequence[int], dtype: Any) -> Array:
        """Memory of the device; its content is undefined."""

    @abstractmethod
    def index(self, numbers: NDArray[Any]) -> Array:
        """Row numbers in the form with which the device indexes, or another table in the form that its kernels read."""

    def current_stream(self) -> int:
        """The stream on which work is currently enqueued, as kernels take it (a `cudaStream_t`); 0 if the device has no
        streams.
        """
        return 0

    @abstractmethod
    def caller_event(self) -> Event | None:
        """A point after the caller's work so far on its own stream; None if callers' work is synchronous."""

    @abstractmethod
    def caller_waits(self, event: Event, deadline_s: float) -> bool:
        """Makes the caller's next work run after `event`: blocks on a host device, enqueues a wait on a GPU.

        Returns False if the deadline passed first.
        """
