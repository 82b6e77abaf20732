"""Supplies the cached rows that a blended forward pass reads. The rows are loaded, rotated on the device of the
engine's pool, and passed on as torch tensors.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch

from flexkv.adapters.torch_tensors.device import TorchDevice
from flexkv.adapters.torch_tensors.pinned_rooms import PinnedMemory, PinnedRooms
from flexkv.adapters.vllm.blend.rows import Numbers
from flexkv.blend.registry import NotBlendable
from flexkv.blend.turned_rows import RowDevice, TurnedLayers, TurnedRows
from flexkv.transfer.layerwise.host_device import HostDevice

Planes = tuple[Any, Any]
"""The keys and the values of some rows, each a tensor [rows, heads, head_dim]."""


def device_of(pool: torch.device, dtype: torch.dtype) -> RowDevice:
    """Returns the device on which cached rows are rotated, which is that of the engine's pool.

    Args:
        pool: the pool's device.
        dtype: the dtype of the engine's KV cache.

    Raises:
        NotBlendable: torch has no streams on that device.
    """
    if pool.type == "cpu":
        return RowDevice(HostDevice(), np.dtype(f"u{dtype.itemsize}"))
    try:
        device = TorchDevice(pool)
    except RuntimeError as error:
        raise NotBlendable(f"cached rows cannot be turned on {pool}: {error}") from error
    return RowDevice(device, dtype, partial(PinnedRooms, PinnedMemory(pool)))


class LoadedRows:
    """A `RowSource` for the forward pass: the loaded rows of one request in a batch.

    Args:
        rows: the loaded rows, which are rotated when they are read.
        on: the device on which the rows are rotated.
        dtype: the dtype of the engine's KV cache.
        pool: the device of the engine's pool.
    """

    def __init__(self, rows: TurnedRows, on: RowDevice, dtype: Any, pool: Any) -> None:
        self._rows, self._on, self._dtype, self._pool = rows, on, dtype, pool

    def open(self, first: int) -> LoadedLayers:
        at = torch.from_numpy(self._rows.in_buffer).to(self._pool)
        return LoadedLayers(self._rows.open(self._on, first), at, self._dtype)


class LoadedLayers:
    """The layers of a `LoadedRows`; implements `RowLayers`.

    Args:
        layers: the pipeline that loads and rotates the layers.
        at: for each row, its number in the pipeline's buffers.
        dtype: the dtype of the engine's KV cache.
    """

    def __init__(self, layers: TurnedLayers, at: Any, dtype: Any) -> None:
        self._layers, self._at, self._dtype = layers, at, dtype

    def choose(self, chosen: Numbers) -> None:
        self._at = self._at[torch.from_numpy(chosen).to(self._at.device)]

    def take(self, layer: int) -> Planes:
        """See `RowLayers.take`.

        Raises:
            LostStretches: pages of some rows were lost.
            PipelineError: rows did not arrive for another reason, or not before the deadline.
        """
        keys, values = self._tensor(self._layers.layer(layer)).index_select(1, self._at)
        self._layers.leave()
        return keys, values

    def _tensor(self, buffer: Any) -> Any:
        if not isinstance(buffer, np.ndarray):
            return buffer
        signed = buffer.view(f"i{buffer.itemsize}")  # torch lacks some unsigned types
        return torch.from_numpy(signed).view(self._dtype)

    def close(self, wait: bool = True) -> None:
        self._layers.close(wait)
