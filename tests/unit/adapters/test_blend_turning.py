"""Before the first request, flexkv rotates some rows on the device that has the engine's pool. If this fails or gives a
wrong result, blending is turned off.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from flexkv.adapters.torch_tensors.device import TorchDevice
from flexkv.adapters.torch_tensors.pinned_rooms import PinnedMemory, PinnedRooms
from flexkv.adapters.vllm.blend.pages import BlendPages
from flexkv.adapters.vllm.blend.turn_check import check_turning
from flexkv.blend.base import KvShape
from flexkv.blend.cache import SegmentCache
from flexkv.blend.registry import NotBlendable
from flexkv.blend.rope import RopeSpec
from flexkv.blend.rotation import KeyRotation
from flexkv.blend.turned_keys import TurnedKeys
from flexkv.blend.turned_rows import LayerRows, RowDevice
from flexkv.errors import ConfigError
from flexkv.observe import Counters

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Pages:
    """Makes one rank's `BlendPages`. With device "stand-in", they use torch's CPU memory and streams in place of a
    GPU's.
    """

    def __init__(self) -> None:
        self.made: list[BlendPages] = []

    def __call__(self, device: str = "cpu", dtype: str = "float32", prefetch_layers: int = 2) -> BlendPages:
        shape = KvShape(layers=6, heads=2, head_dim=8, dtype=dtype)
        rotation = KeyRotation(RopeSpec(8, 8, 100.0), shape.heads, dtype)
        cache = SegmentCache(
            shape,
            {"model": "m"},
            slots=16,
            staging_tokens=64,
            block_tokens=4,
            prefetch_layers=prefetch_layers,
        )
        where = "cpu" if device == "stand-in" else device
        try:
            pages = BlendPages(cache, rotation, DTYPES[dtype], torch.device(where), Counters())
        except BaseException:
            cache.close()
            raise
        if device == "stand-in":
            pages._rows_on = RowDevice(
                TorchDevice("cpu"), DTYPES[dtype], partial(PinnedRooms, PinnedMemory(torch.device("cpu")))
            )
        self.made.append(pages)
        return pages


@pytest.fixture
def make() -> Iterator[Pages]:
    pages = Pages()
    yield pages
    for each in pages.made:
        assert len(each.cache.staging.free) == each.cache.staging.rows.shape[1], "all blocks are free again"
        each.close()


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("device", ["cpu", "stand-in"])
def test_rows_that_come_as_the_cpu_turns_them_pass(make: Pages, device: str, dtype: str) -> None:
    check_turning(make(device, dtype))


def test_a_device_without_streams_is_refused(make: Pages) -> None:
    with pytest.raises(NotBlendable, match="cached rows cannot be turned on meta: Device 'meta'"):
        make("meta")


def test_a_core_without_kernels_for_the_device_is_refused(
    make: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the native core was built without CUDA and the engine uses a GPU, blending is refused."""
    apply = KeyRotation.apply

    def on_the_cpu_alone(self: KeyRotation, source: Any, *given: Any, **more: Any) -> None:
        if not isinstance(source, np.ndarray):
            raise ConfigError("the keys are in memory of a GPU: this is a build without CUDA")
        apply(self, source, *given, **more)

    monkeypatch.setattr(KeyRotation, "apply", on_the_cpu_alone)
    pages = make("stand-in")
    with pytest.raises(NotBlendable, match=r"cached rows cannot be turned on cpu: .*a build without CUDA"):
        check_turning(pages)


def not_turned(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TurnedKeys, "__call__", lambda *given: None)


def another_layer(patch: pytest.MonkeyPatch) -> None:
    copy = LayerRows.copy_to
    patch.setattr(
        LayerRows, "copy_to", lambda self, rows: copy(LayerRows(self.stretch, max(0, self.layer - 1)), rows)
    )


@pytest.mark.parametrize(("breaks", "layers"), [(not_turned, [0, 1, 2]), (another_layer, [1, 2])])
@pytest.mark.parametrize("device", ["cpu", "stand-in"])
def test_rows_that_come_out_wrong_are_refused(
    make: Pages, monkeypatch: pytest.MonkeyPatch, device: str, breaks: Any, layers: list[int]
) -> None:
    breaks(monkeypatch)
    with pytest.raises(NotBlendable) as refused:
        check_turning(make(device))
    assert str(refused.value) == f"rows turned on cpu differ from the CPU's in layers {layers}"


@pytest.mark.parametrize("prefetch_layers", [2, 3, 5])
@pytest.mark.parametrize("device", ["cpu", "stand-in"])
def test_the_first_layer_whose_buffer_is_used_again_is_looked_at(
    make: Pages, monkeypatch: pytest.MonkeyPatch, device: str, prefetch_layers: int
) -> None:
    copy = LayerRows.copy_to

    def stale(self: LayerRows, rows: Any) -> None:
        copy(LayerRows(self.stretch, self.layer % prefetch_layers), rows)

    monkeypatch.setattr(LayerRows, "copy_to", stale)
    with pytest.raises(NotBlendable, match=rf"in layers \[{prefetch_layers}\]"):
        check_turning(make(device, prefetch_layers=prefetch_layers))
