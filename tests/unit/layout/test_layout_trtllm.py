"""TensorRT-LLM's pools: a block-first pool is a single segment, and a pool may consist of regions of slots. If flexkv
does not support a pool, the error gives the reason.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexkv.errors import GeometryError
from flexkv.layout.format_id import Interior, PageOrder
from flexkv.layout.trtllm import TrtllmBuffer, TrtllmHandler, TrtllmModel, TrtllmRegion
from tests.unit.layout.fake_tensor import fake_tensor
from tests.unit.layout.page_check import check_view


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 8),
    st.integers(1, 5),
    st.booleans(),
    st.integers(1, 3),
    st.integers(1, 9),
    st.integers(0, 2**32 - 1),
)
def test_a_pool_is_one_segment(
    blocks: int, layers: int, latent: bool, heads: int, tokens: int, seed: int
) -> None:
    heads = 1 if latent else heads
    pool = np.zeros((blocks, layers, 1 if latent else 2, heads * tokens * 6 * 2), np.uint8)
    model = TrtllmModel(heads, 6, tokens, latent)
    handler = TrtllmHandler.from_pool(fake_tensor(pool, pool), model)
    view = handler.view()
    assert len(view.segments) == 1
    assert len(view.runs) == layers * (1 if latent else 2)
    assert view.num_layers == layers
    assert handler.format_id().page_order is PageOrder.LAYER_MAJOR
    assert handler.format_id().interior_tokens == tokens

    def write(block: int, page: np.ndarray) -> None:
        pool[block] = page.reshape(pool.shape[1:])

    check_view(view, pool.reshape(-1), lambda b: pool[b].reshape(-1), write, seed)


def test_a_pool_of_one_layer_and_an_odd_tail() -> None:
    pool = np.zeros((3, 1, 2, 13), np.uint8)
    view = TrtllmHandler.from_pool(fake_tensor(pool, pool, 1), TrtllmModel(tokens_per_block=13)).view()
    assert view.stripe_bytes == 26

    def write(block: int, page: np.ndarray) -> None:
        pool[block] = page.reshape(pool.shape[1:])

    check_view(view, pool.reshape(-1), lambda b: pool[b].reshape(-1), write, 0)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 6), st.integers(0, 40), st.integers(0, 2**32 - 1))
def test_regions_of_slots(regions: int, buffers: int, slots: int, gap: int, seed: int) -> None:
    size = buffers * 24
    raw = np.zeros((regions, slots, size + gap), np.uint8)
    parts = [
        TrtllmRegion(
            raw[i].ctypes.data,
            size,
            size + gap,
            slots,
            tuple(TrtllmBuffer(i * buffers + n, n * 24, 24) for n in range(buffers)),
        )
        for i in range(regions)
    ]
    handler = TrtllmHandler.from_regions(parts, 32, Interior.KV_SPLIT_HND)
    assert handler.view().num_layers == regions * buffers

    def write(block: int, page: np.ndarray) -> None:
        raw[:, block, :size] = page.reshape(regions, size)

    check_view(handler.view(), raw.reshape(-1), lambda b: raw[:, b, :size].reshape(-1), write, seed)


def test_unsupported_pools_are_refused_with_the_reason() -> None:
    array = np.zeros((4, 2, 2, 64), np.uint8)
    pool = fake_tensor(array, array)
    cases = [
        (TrtllmModel(latent=True), "kv_factor is 2; allowed is 1"),
        (TrtllmModel(2, 4, 8), "32 elements a block are not 8 tokens of 8"),
        (TrtllmModel(3, 4), "are not whole tokens of 12"),
        (TrtllmModel(tokens_per_block=7), "are not 7 tokens of unknown size"),
        (TrtllmModel(), "are not whole tokens of unknown size"),
    ]
    for model, message in cases:
        with pytest.raises(GeometryError, match=message):
            TrtllmHandler.from_pool(pool, model)
    with pytest.raises(GeometryError, match="byte strides"):
        TrtllmHandler.from_pool(pool.but(strides=(256, 64, 32, 1)), TrtllmModel())
    with pytest.raises(GeometryError, match="4 are needed"):
        TrtllmHandler.from_pool(pool.but(shape=(4, 2, 64)), TrtllmModel())


def test_wrong_regions_are_refused() -> None:
    good = TrtllmRegion(4096, 64, 64, 4)
    cases = [
        ([], "the regions have"),
        ([good, TrtllmRegion(8192, 64, 64, 5)], r"the regions have \[4, 5\] slots"),
        ([TrtllmRegion(4096, 64, 63, 4)], "stride 63 is less"),
        (
            [TrtllmRegion(4096, 64, 64, 4, (TrtllmBuffer(0, 0, 32), TrtllmBuffer(1, 40, 24)))],
            "must be positive",
        ),
        ([TrtllmRegion(4096, 64, 64, 4, (TrtllmBuffer(0, 0, 32),))], "buffers end at 32"),
        ([good, TrtllmRegion(4096 + 128, 64, 64, 4)], "share bytes"),
        ([TrtllmRegion(4096, 64, 64, 0)], "num_blocks is 0"),
    ]
    for regions, message in cases:
        with pytest.raises(GeometryError, match=message):
            TrtllmHandler.from_regions(regions, 32, Interior.KV_SPLIT_HND)
