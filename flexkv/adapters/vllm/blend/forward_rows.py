"""Describes, for one rank, the rows that a forward pass reads from the cache and those that it passes to callbacks."""

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
    """The cached keys and values of some rows, which are read layer by layer. The next layers are loaded while the
    caller computes.

    Call order:
        `take` for consecutive layers, ascending, until the caller needs no more; then `close`. `choose` may be called
        in between.
    """

    def choose(self, chosen: Numbers) -> None:
        """Makes later calls of `take` return only some of the rows: those at the positions `chosen`."""

    def take(self, layer: int) -> Planes:
        """Returns the rows' keys and values of a layer, in two tensors [rows, heads, head_dim] on the pool's device.

        Raises:
            LostStretches: pages of some rows were lost. The forward pass can begin again without these rows.
        """

    def close(self, wait: bool = True) -> None:
        """Ends all work that was begun.

        Args:
            wait: whether to wait for the work. False if another call of `close` in this forward pass has missed its
                deadline.
        """


class RowSource(Protocol):
    """A source of the cached keys and values of some rows."""

    def open(self, first: int) -> RowLayers:
        """Starts loading the rows from layer `first` on."""


@dataclass(frozen=True, slots=True)
class ReusedRows:
    """Rows of one request in a batch for which there are cached rows.

    Attributes:
        rows: the rows' numbers in the batch.
        source: the source of the cached rows.
        ratio: share of the rows that is computed again.
    """

    rows: Numbers
    source: RowSource
    ratio: float


@dataclass(frozen=True, slots=True)
class TakenRows:
    """Rows in a batch whose fresh keys and values are passed to a callback.

    Attributes:
        rows: the rows' numbers in the batch. None of them is reused.
        take: called once per layer with the layer's number and the rows' keys and values. Not called after a failure.
        lose: called at the end with the failure if `take` or the selection of its rows failed; the forward pass
            continues. If `lose` is None, the forward pass fails on all ranks instead.
    """

    rows: Numbers
    take: Callable[[int, Planes], None]
    lose: Callable[[Exception], None] | None = None


class CachedRowsError(TransferError):
    """Some rank failed to read cached rows or to pass rows on, and the forward pass cannot continue. All ranks raise
    this.
    """


class RowsLost(TransferError):
    """Some rank has lost pages of a forward pass's cached rows, and nothing else has failed. The forward pass can begin
    again without these rows. All ranks raise this.
    """


class OwnWork:
    """Runs flexkv's own work in a forward pass, and catches its exceptions, so that this rank still takes part in the
    ranks' next collective. After a failure, further work is skipped.

    Args:
        stops: whether to raise a failure at once instead of catching it, which is possible if no other rank waits.

    Attributes:
        failure: the first failure; None if there was none.
    """

    def __init__(self, stops: bool = False) -> None:
        self.failure: Exception | None = None
        self._stops = stops

    def do(self, work: Callable[..., None], *given: Any) -> None:
        if self.failure is not None:
            return
        try:
            work(*given)
        except Exception as error:  # catches errors of torch and the device, too
            self.failure = error
            if self._stops:
                raise


class CachedRows:
    """The cached rows of one forward pass on this rank.

    Call order:
        `open`, `compare`, `skipped`, `close`.

    Attributes:
        failure: why the cached rows cannot be used; None if they can be used. Does not change after `compare`.
    """

    def __init__(self, reused: Sequence[ReusedRows]) -> None:
        self._reused = reused
        self._opened: list[RowLayers] = []
        self._work = OwnWork()

    @property
    def failure(self) -> Exception | None:
        return self._work.failure

    def open(self, first: int) -> None:
        """Starts loading the cached rows from layer `first` on."""
        for each in self._reused:
            self._work.do(lambda source=each.source: self._opened.append(source.open(first)))

    def compare(self, layer: int, fresh: Any, difference: Any) -> None:
        """Writes to `difference`, for each reused row, the squared distance between its cached and its fresh keys.

        Args:
            fresh: the fresh keys of all rows of the batch.
            difference: float32, one element per row of the batch; elements of other rows do not change.
        """
        for number, each in enumerate(self._reused):
            self._work.do(self._compare_one, number, each.rows, layer, fresh, difference)

    def _compare_one(self, number: int, numbers: Numbers, layer: int, fresh: Any, difference: Any) -> None:
        keys, _ = self._opened[number].take(layer)
        rows = torch.from_numpy(numbers).to(fresh.device)
        apart = fresh[rows].reshape(len(rows), -1).float() - keys.reshape(len(rows), -1).float()
        difference[rows] = apart.square().sum(1)

    def skipped(self, keep: NDArray[np.bool_], slots: Any) -> list[tuple[RowLayers, Any]]:
        """Returns the cached rows of those reused rows that later layers do not compute, with the rows' slots.

        Args:
            keep: for each row of the batch, whether later layers compute it.
            slots: the slot of each row of the batch.
        """
        found = []
        for each, layers in zip(
            self._reused, self._opened, strict=False
        ):  # after a failure, `_opened` is empty
            chosen = np.flatnonzero(~keep[each.rows])
            if len(chosen):
                layers.choose(chosen)
                found.append((layers, slots[torch.from_numpy(each.rows[chosen]).to(slots.device)]))
        return found

    def close(self) -> Exception | None:
        """Closes all opened rows, even if closing some of them fails. Returns the first failure; None if there was
        none. Idempotent."""
        opened, self._opened = self._opened, []
        failure: Exception | None = None
        for each in opened:
            try:
                each.close(wait=failure is None)
            except Exception as error:  # catches errors of torch and the device, too
                failure = failure or error
        return failure
