"""Cached rows of a blended forward on a GPU's own streams: the bits that a CPU gives."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import numpy as np

from flexkv.blend.turned_rows import RowDevice, TurnedRows
from flexkv.transfer.layerwise.host_device import HostDevice
from tests.gpu.needs import CUDA_BUILD
from tests.unit.blend.loaded_world import ROTATION, SHAPE, load_all, make_cache, store_all, stretches_of
from tests.unit.transfer.layerwise.layer_world import GENEROUS_S

pytestmark = CUDA_BUILD

ROUNDS = 20
WORK = 2048
"""Side of the matrices with which the engine's stream is busy while the next layers come."""


def test_the_cpus_bits_while_the_engines_stream_is_busy(torch: Any) -> None:
    """Each layer is taken on the caller's stream and left at once; its buffer is a later layer's while the copy of its
    rows may still be waiting behind the caller's work."""
    from flexkv.adapters.torch_tensors.device import TorchDevice
    from flexkv.adapters.vllm.blend.pages import LoadedRows, device_of

    cache = make_cache()
    store_all(cache)
    where = torch.device("cuda")
    on_gpu = device_of(where, torch.float32)
    assert isinstance(on_gpu.device, TorchDevice)
    host = HostDevice()
    with closing(cache), closing(load_all(cache)) as load:
        rows = TurnedRows(cache, ROTATION, load, stretches_of(load))
        layers, wanted = rows.open(RowDevice(host, SHAPE.carrier), 0), []
        for layer in range(SHAPE.layers):
            wanted.append(layers.layer(layer)[:, rows.in_buffer].copy())
            layers.leave()
        layers.close()
        busy = torch.randn(WORK, WORK, device=where)
        for _ in range(ROUNDS):
            taken = LoadedRows(rows, on_gpu, torch.float32, where).open(0)
            found = []
            for layer in range(SHAPE.layers):
                busy = (busy @ busy).clamp(-1, 1)
                found.append(torch.stack(taken.take(layer)))
            taken.close()
            for layer, planes in enumerate(found):
                bits = planes.cpu().numpy().view(SHAPE.carrier)
                assert np.array_equal(bits, wanted[layer]), f"layer {layer}"
    assert host.close(GENEROUS_S)
