"""Tests blending on a GPU: the cached rows of a forward pass are loaded and rotated on streams of the GPU, with the
same bits as on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from flexkv.blend.base import KvShape
from flexkv.blend.cache import SegmentCache
from flexkv.blend.rope import RopeSpec
from flexkv.blend.rotation import KeyRotation
from flexkv.blend.segment_load import SegmentLoad
from flexkv.blend.turned_rows import RowDevice, Stretch, TurnedRows
from flexkv.transfer.layerwise.host_device import HostDevice
from tests.gpu.needs import CUDA_BUILD
from tests.unit.transfer.layerwise.layer_world import GENEROUS_S

pytestmark = CUDA_BUILD

ROUNDS = 20
WORK = 2048
"""Number of rows and columns of the matrices whose products keep the engine's stream busy while layers are loaded."""
LAYERS, TOKENS = 6, 64


class Loaded:
    """Random rows of two requests in the staging pool, and the expected results, which a CPU computes.

    Attributes:
        rows: the rows of each request.
        wanted: for each request, the expected keys and values of each layer.
    """

    def __init__(self, torch: Any, dtype: str) -> None:
        self.dtype = getattr(torch, dtype)
        self._shape = KvShape(LAYERS, heads=2, head_dim=8, dtype=dtype)
        rotation = KeyRotation(RopeSpec(8, 8, 100.0), self._shape.heads, dtype)
        self.cache = SegmentCache(
            self._shape, {"model": "m"}, slots=8, staging_tokens=2 * TOKENS, block_tokens=4
        )
        self.loads: list[SegmentLoad] = []
        self.rows: list[TurnedRows] = []
        for position in (40, 700):
            load = self.cache.load_staged(TOKENS)
            (hit,) = load.hits
            room = self.cache.staging.rows[:, hit.blocks]
            numbers = torch.randn(room.shape).to(self.dtype).view(torch.uint8).numpy()
            self.cache.staging.rows[:, hit.blocks] = numbers.view(room.dtype)
            stretches = [Stretch(hit, 3, 20, position), Stretch(hit, 30, 30, position + 100)]
            self.loads.append(load)
            self.rows.append(TurnedRows(self.cache, rotation, load, stretches))
        self.wanted = [self._on_the_cpu(rows) for rows in self.rows]

    def _on_the_cpu(self, rows: TurnedRows) -> list[np.ndarray]:
        host = HostDevice()
        layers, found = rows.open(RowDevice(host, self._shape.carrier), 0), []
        for layer in range(LAYERS):
            found.append(layers.layer(layer)[:, rows.in_buffer].copy())
            layers.leave()
        layers.close()
        assert host.close(GENEROUS_S)
        return found

    def is_right(self, torch: Any, request: int, layer: int, planes: Any) -> bool:
        bits = planes.cpu().contiguous().view(torch.uint8).numpy().view(self._shape.carrier)
        return np.array_equal(bits, self.wanted[request][layer])

    def close(self) -> None:
        for load in self.loads:
            load.close()
        self.cache.close()


@pytest.fixture(params=["float32", "bfloat16"])
def loaded(torch: Any, request: pytest.FixtureRequest) -> Iterator[Loaded]:
    with closing(Loaded(torch, request.param)) as made:
        yield made


def wrong_layers(torch: Any, loaded: Loaded, requests: list[int], rounds: int = ROUNDS) -> int:
    """Loads the rows of several requests layer by layer at the same time, while the caller's stream is busy. Returns
    how many layers differ from the expected ones.
    """
    from flexkv.adapters.torch_tensors.device import TorchDevice
    from flexkv.adapters.vllm.blend.loaded_rows import LoadedRows, device_of

    where = torch.device("cuda")
    on_gpu = device_of(where, loaded.dtype)
    assert isinstance(on_gpu.device, TorchDevice)
    busy, wrong = torch.randn(WORK, WORK, device=where), 0
    for _ in range(rounds):
        opened = [LoadedRows(loaded.rows[each], on_gpu, loaded.dtype, where).open(0) for each in requests]
        found: list[tuple[int, int, Any]] = []
        for layer in range(LAYERS):
            busy = (busy @ busy).clamp(-1, 1)
            found += [(n, layer, torch.stack(o.take(layer))) for n, o in zip(requests, opened, strict=True)]
        for each in opened:
            each.close()
        wrong += sum(not loaded.is_right(torch, *of) for of in found)
    return wrong


def test_the_cpus_bits_while_the_engines_stream_is_busy(torch: Any, loaded: Loaded) -> None:
    """The caller enqueues a copy of each layer on its own stream, and releases the layer's buffer at once. So the
    loader may reuse the buffer for a later layer while the copy still waits behind the caller's other work.
    """
    assert wrong_layers(torch, loaded, [0]) == 0


def test_two_pipelines_at_once_do_not_mix_their_rows(torch: Any, loaded: Loaded) -> None:
    assert wrong_layers(torch, loaded, [0, 1]) == 0


@pytest.mark.parametrize("edge", ["the caller's work", "the copy to the device"])
def test_control_without_an_edge_between_streams_layers_are_wrong(
    torch: Any, loaded: Loaded, edge: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flexkv.adapters.torch_tensors.device import TorchDevice
    from flexkv.transfer.layerwise.load import LoadPipeline

    if edge == "the caller's work":
        # Without this edge, the loader fills a buffer again while the caller's copy from the buffer still waits.
        monkeypatch.setattr(TorchDevice, "caller_event", lambda self: None)
        monkeypatch.setattr(LoadPipeline, "_after_scatter", lambda self, layer: None)
    else:
        # Without this edge, the caller reads a buffer before its rows have arrived.
        monkeypatch.setattr(TorchDevice, "caller_waits", lambda self, event, deadline_s: True)
        hold_load_streams(torch, monkeypatch)
    assert wrong_layers(torch, loaded, [0], rounds=2) > 0


def hold_load_streams(torch: Any, patch: pytest.MonkeyPatch) -> None:
    """Enqueues some milliseconds of work before every copy to the device, in the stream of the copy."""
    from flexkv.adapters.torch_tensors.pinned_rooms import PinnedRooms

    copy, ballast = PinnedRooms.copy, torch.randn(WORK, WORK, device="cuda")

    def late(self: PinnedRooms, key: Any, source: Any, rows: Any) -> None:
        work = ballast
        for _ in range(10):
            work = work @ ballast
        copy(self, key, source, rows)

    patch.setattr(PinnedRooms, "copy", late)
