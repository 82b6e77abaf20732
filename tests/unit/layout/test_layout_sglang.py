"""SGLang's pools: K and V are halves of one allocation, or there is one buffer for MLA. flexkv never touches page 0."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexkv import c_ext
from flexkv.errors import BlockRangeError, GeometryError
from flexkv.layout.format_id import Interior
from flexkv.layout.sglang import SglangHandler
from tests.unit.layout.fake_tensor import fake_tensor
from tests.unit.layout.page_check import check_view


@settings(deadline=None, max_examples=100)
@given(
    st.integers(1, 4),
    st.integers(1, 6),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(1, 9),
    st.integers(0, 2**32 - 1),
)
def test_k_and_v_in_one_allocation(
    layers: int, pages: int, page: int, heads: int, dim: int, seed: int
) -> None:
    raw = np.zeros(2 * layers * (pages + 1) * page * heads * dim * 2, np.uint8)
    kv = raw.reshape(2, layers, (pages + 1) * page, heads, dim * 2)
    tensors = [[fake_tensor(kv[side, layer], raw) for layer in range(layers)] for side in (0, 1)]
    assert tensors[1][0].storage_offset() > 0
    handler = SglangHandler(page, k_buffers=tensors[0], v_buffers=tensors[1])
    by_page = raw.reshape(2, layers, pages + 1, page, heads, dim * 2)

    def write(block: int, data: np.ndarray) -> None:
        by_page[:, :, block] = data.reshape(layers, 2, page, heads, dim * 2).swapaxes(0, 1)

    check_view(handler.view(), raw, lambda b: by_page[:, :, b].swapaxes(0, 1).reshape(-1), write, seed)
    assert handler.view().num_layers == layers
    assert handler.format_id().interior is Interior.KV_SPLIT_NHD


def test_page_0_is_reserved() -> None:
    raw = np.zeros((2, 4, 1, 8), np.uint8)
    tensors = [fake_tensor(half, raw) for half in raw]
    view = SglangHandler(2, k_buffers=tensors[:1], v_buffers=tensors[1:]).view()
    stripe = np.zeros(view.stripe_bytes, np.uint8)
    for block in (0, 2, -1):
        with pytest.raises(BlockRangeError, match=r"the pool has blocks \[1, 2\)"):
            c_ext.gather(view, block, stripe)
        with pytest.raises(BlockRangeError, match=r"the pool has blocks \[1, 2\)"):
            c_ext.scatter(view, block, stripe)


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 4), st.integers(1, 6), st.sampled_from([1, 16, 64]), st.integers(0, 2**32 - 1))
def test_joined_buffers_of_mla(layers: int, pages: int, page: int, seed: int) -> None:
    latent = 72 * 2
    raw = np.zeros(layers * (pages + 1) * page * latent, np.uint8)
    kv = raw.reshape(layers, (pages + 1) * page, 1, latent)
    handler = SglangHandler(page, kv_buffers=[fake_tensor(kv[layer], raw) for layer in range(layers)])
    by_page = kv.reshape(layers, pages + 1, page * latent)

    def write(block: int, data: np.ndarray) -> None:
        by_page[:, block] = data.reshape(layers, -1)

    check_view(handler.view(), raw, lambda b: by_page[:, b].reshape(-1), write, seed)
    assert handler.format_id().interior is Interior.LATENT


def test_control_k_and_v_swapped_is_noticed() -> None:
    raw = np.zeros(2 * 8 * 16, np.uint8)
    halves = raw.reshape(2, 8, 1, 16)
    k, v = ([fake_tensor(half, raw)] for half in halves)
    view = SglangHandler(2, k_buffers=v, v_buffers=k).view()
    pages = raw.reshape(2, 4, 32)

    def write(block: int, data: np.ndarray) -> None:
        pages[:, block] = data.reshape(2, 32)

    with pytest.raises(AssertionError, match="gather of block"):
        check_view(view, raw, lambda b: pages[:, b].reshape(-1), write, 1)


def test_wrong_buffers_are_refused_by_name() -> None:
    raw = np.zeros((4, 8, 2, 16), np.uint8)
    k, v, other = ([fake_tensor(raw[i], raw)] for i in range(3))
    with pytest.raises(GeometryError, match="page_size is 0"):
        SglangHandler(0, k_buffers=k, v_buffers=v)
    with pytest.raises(GeometryError, match="1 K, 0 V and 0 joined"):
        SglangHandler(2, k_buffers=k)
    with pytest.raises(GeometryError, match="1 K, 1 V and 1 joined"):
        SglangHandler(2, k_buffers=k, v_buffers=v, kv_buffers=other)
    with pytest.raises(GeometryError, match=r"k_buffer\[0\]: shape .* 3 are needed"):
        SglangHandler(2, k_buffers=[k[0].but(shape=(8, 16))], v_buffers=v)
    with pytest.raises(GeometryError, match=r"v_buffer\[0\]: byte strides"):
        SglangHandler(2, k_buffers=k, v_buffers=[v[0].but(strides=(32, 8, 1))])
    with pytest.raises(GeometryError, match="not aligned to 2 bytes"):
        SglangHandler(2, k_buffers=[k[0].but(address=k[0].address + 1)], v_buffers=v)
    with pytest.raises(GeometryError, match=r"k_buffer\[1\]: uint8"):
        SglangHandler(2, k_buffers=[*k, fake_tensor(raw[3], raw, 1)], v_buffers=[*v, *other])
    with pytest.raises(GeometryError, match="different numbers of pages"):
        SglangHandler(2, k_buffers=k, v_buffers=[fake_tensor(raw[1, :6], raw)])
    with pytest.raises(GeometryError, match="page 0 is reserved"):
        SglangHandler(8, k_buffers=k, v_buffers=v)
    with pytest.raises(GeometryError, match="share bytes"):
        SglangHandler(2, k_buffers=[*k, *other], v_buffers=[*v, k[0].but(address=k[0].address + 2)])
