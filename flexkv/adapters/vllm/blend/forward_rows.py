"""Rows that one forward pass reads from the cache, and rows that it passes on, on one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from flexkv.adapters.vllm.blend.rows import Numbers
from flexkv.errors import TransferError

Planes = tuple[Any, Any]


class RowLayers(Protocol):
    """Cached keys and values of rows, layer by layer. The next layers are loaded while the caller computes.

    Call order:
        `take` for each layer, ascending, as far as the caller wants; `close`.
    """

    def choose(self, chosen: Numbers) -> None:
        """From now on takes only the chosen ones of the rows."""

    def take(self, layer: int) -> Planes:
        """The rows' keys and values, in separate tensors [rows, heads, head_dim] on the pool's device.

        Raises:
            LostStretches: pages that hold some rows were lost; without these rows the forward pass can begin again.
        """

    def close(self, wait: bool = True) -> None:
        """Ends all work that was begun.

        Args:
            wait: False if another close has missed its deadline: this one then does not wait.
        """


class RowSource(Protocol):
    """Cached keys and values of rows."""

    def open(self, first: int) -> RowLayers:
        """Begins with layer `first`."""


@dataclass(frozen=True, slots=True)
class ReusedRows:
    """Rows of one request for which there are cached rows.

    Attributes:
        rows: their numbers in the batch.
        ratio: share of them that is computed again.
    """

    rows: Numbers
    source: RowSource
    ratio: float


@dataclass(frozen=True, slots=True)
class TakenRows:
    """Rows whose fresh keys and values a callback takes.

    Attributes:
        rows: their numbers in the batch; none of them is reused.
        take: called once per layer with the layer's number and the rows' keys and values; not after a failure.
        lose: called with a failure of `take` or of the work before it; the forward pass continues. None: the forward
            pass fails on all ranks.
    """

    rows: Numbers
    take: Callable[[int, Planes], None]
    lose: Callable[[Exception], None] | None = None


class CachedRowsError(TransferError):
    """On some rank, the work on rows that a forward pass reads from the cache or passes on failed, and the step cannot
    continue. Every rank raises this.
    """


class RowsLost(TransferError):
    """Some rank lost pages that hold cached rows of a forward pass, and nothing else has failed, so the forward pass
    can begin again without them. Every rank raises this.
    """


class OwnWork:
    """flexkv's work on this rank between the collectives of a forward pass. After a failure the rest is skipped.

    Args:
        stops: whether to raise a failure at once, because no other rank waits.

    Attributes:
        failure: the first failure.
    """

    def __init__(self, stops: bool = False) -> None:
        self.failure: Exception | None = None
        self._stops = stops

    def do(self, work: Callable[..., None], *given: Any) -> None:
        if self.failure is not None:
            return
        try:
            work(*given)
        except Exception as error:  # torch's and the device's own, too
            self.failure = error
            if self._stops:
                raise


class CachedRows:
    """The cached rows of one forward pass on this rank.

    Call order:
        `open`, `compare`, `skipped`, `close`.

    Attributes:
        failure: why the cached rows cannot be used; known after `compare`.
    """

    def __init__(self, reused: Sequence[ReusedRows]) -> None:
        self._reused = reused
        self._opened: list[RowLayers] = []
        self._work = OwnWork()

    @property
    def failure(self) -> Exception | None:
        return self._work.failure

    def open(self, first: int) -> None:
        """Begins with layer `first`."""
        for each in self._reused:
            self._work.do(lambda source=each.source: self._opened.append(source.open(first)))

    def compare(self, layer: int, fresh: Any, difference: Any) -> None:
        """Adds up the squared distances of each reused row's cached keys from the fresh ones.

        Args:
            fresh: keys of all rows.
            difference: float32, by row.
        """
        for number, each in enumerate(self._reused):
            self._work.do(self._compare_one, number, each.rows, layer, fresh, difference)

    def _compare_one(self, number: int, numbers: Numbers, layer: int, fresh: Any, difference: Any) -> None:
        keys, _ = self._opened[number].take(layer)
        rows = torch.from_numpy(numbers).to(fresh.device)
        apart = fresh[rows].reshape(len(rows), -1).float() - keys.reshape(len(rows), -1).float()
        difference[rows] = apart.square().sum(1)

    def skipped(self, keep: NDArray[np.bool_], slots: Any) -> list[tuple[RowLayers, Any]]:
        """The reused rows that no later layer computes, and their slots.

        Args:
            slots: slot of each row of the batch.
        """
        found = []
        for each, layers in zip(self._reused, self._opened, strict=False):  # none is open after a failure
            chosen = np.flatnonzero(~keep[each.rows])
            if len(chosen):
                layers.choose(chosen)
                found.append((layers, slots[torch.from_numpy(each.rows[chosen]).to(slots.device)]))
        return found

    def close(self) -> Exception | None:
        """Closes the rows of all sources, even if one fails. Returns the first failure. Idempotent."""
        opened, self._opened = self._opened, []
        failure: Exception | None = None
        for each in opened:
            try:
                each.close(wait=failure is None)
            except Exception as error:  # torch's and the device's own, too
                failure = failure or error
        return failure
