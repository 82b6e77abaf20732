"""The contract of the layerwise pipelines: devices, streams and events; what supplies rows and what transforms them.

A *row* is one token's K (or V) of one layer, shape [heads, head_width]. An *array* here is a NumPy array on the host
device and the device's own tensor elsewhere; the pipelines use nothing but indexing with int64 arrays and slices.
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
"""Layers that a pipeline holds at once, each in a buffer of its own."""


class LostRows(TransferError):
    """What a row source raises when its rows will not come; the text says why. Its chunk alone fails."""


class PipelineError(TransferError):
    """A pipeline could not go on, or was still moving at its deadline; nothing that it moved may be relied upon."""


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
    """Changes one layer's keys in place: a rotation from old to new positions, as a rule."""

    def __call__(self, layer: int, keys: Array, positions: RowPositions) -> None:
        """Work on `keys`, shape [rows, heads, head_width], in the pool's dtype; the values are never passed.

        Called once a layer, ascending, in the device's compute stream: on a host device in a thread of its stream, on a
        GPU with that stream current, where it enqueues and returns. Rows that no chunk covers hold what was there
        before; they are zeroed afterwards. What it raises ends the pipeline with every row failed.
        """


class LayerScatter(Protocol):
    """Writes one layer to paged memory in a way of its own: keys turned on their way, as a rule."""

    def __call__(self, layer: int, rows: Array, gaps: Array) -> None:
        """Put `rows`, shape [planes, rows, heads, head_width], where they belong; zeros where those in `gaps` do.

        Called once a layer, ascending, in the device's store stream. What it raises ends the pipeline with every row
        failed.

        Args:
            gaps: numbers of rows that no chunk covers, as `LayerDevice.index` gives them; they hold anything.
        """


class RowSource(Protocol):
    """One chunk's rows of one layer, on their way."""

    def copy_to(self, rows: Array) -> None:
        """Fills `rows`, shape [planes, tokens, heads, head_width], plane 0 the keys. Called once, in the load stream.

        Raises:
            LostRows: they will not come. What was written so far is zeroed.
        """


class RowTarget(Protocol):
    """Where one chunk's rows of one layer go to."""

    def copy_from(self, rows: Array) -> None:
        """Takes `rows`, shape [planes, tokens, heads, head_width]. Called once, in the store stream.

        Raises:
            LostRows: they could not be taken.
        """


class Event(ABC):
    """A point in a stream's work. It is always reached, also when work before it failed."""

    @abstractmethod
    def wait(self, deadline_s: float) -> bool:
        """Blocks the caller until the point is reached; False when `deadline_s` seconds passed first."""

    @property
    @abstractmethod
    def error(self) -> str:
        """What failed before the point in its stream or in one that this waited for; empty if nothing did.

        To be read after `wait` has returned True.
        """


class Stream(ABC):
    """Work that is done in the order in which it was given, beside the caller's own."""

    @abstractmethod
    def run(self, work: Callable[[], None], stage: str, layer: int) -> None:
        """Queues `work`. After a failure in this stream, or one it waited for, it is left out.

        Args:
            stage: for traces: "load", "transform", "scatter", "gather", "store".
        """

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Work given from now on starts after `event` was reached."""

    @abstractmethod
    def record(self) -> Event:
        """The point after all work given so far."""


class LayerDevice(ABC):
    """What pipelines run on, several at once if need be."""

    @abstractmethod
    def stream(self, name: str) -> Stream:
        """A stream of one pipeline: what fails in it is no other's. `name` is "load", "compute" or "store".

        Raises:
            ClosedError: the device was closed.
        """

    @abstractmethod
    def buffer(self, shape: Sequence[int], dtype: Any) -> Array:
        """Memory of the device; its content is undefined."""

    @abstractmethod
    def index(self, numbers: NDArray[Any]) -> Array:
        """Row numbers as the device indexes with them, or any other table as its kernels read it."""

    def current_stream(self) -> int:
        """The stream that work is given to now, as kernels take it (a `cudaStream_t`); 0 where there are none."""
        return 0

    @abstractmethod
    def caller_event(self) -> Event | None:
        """A point after what the calling thread's own stream was given; None where callers work at once."""

    @abstractmethod
    def caller_waits(self, event: Event, deadline_s: float) -> bool:
        """What the caller does next comes after `event`: it blocks on a host device, enqueues a wait on a GPU.

        False: the deadline passed first.
        """
