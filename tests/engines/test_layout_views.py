"""Views built from vLLM's own placements and tensors: its own indexing is the reference, in all its physical orders."""

from __future__ import annotations

import pytest
import torch
from vllm.v1 import kv_cache_interface as interface
from vllm.v1.kv_cache_layout import KVCacheLayout

from flexkv import c_ext
from flexkv.layout.vllm import VllmGroup, VllmHandler
from flexkv.layout.vllm_order import ORDERS

pytestmark = pytest.mark.engine

BLOCKS, LAYERS = 5, 3


def test_vllm_has_the_orders_we_know() -> None:
    assert tuple(layout.name for layout in KVCacheLayout) == ORDERS


@pytest.mark.parametrize("kernel_tokens", [None, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("layout", list(KVCacheLayout), ids=lambda layout: layout.name)
def test_every_order_with_vllms_own_tensors(layout, dtype, kernel_tokens) -> None:
    if kernel_tokens and (layout.is_block_outermost or layout is KVCacheLayout.LHBNC):
        kernel_tokens = None  # vLLM splits dense pages only
    spec = interface.FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=8, dtype=dtype)
    fixed = (None, LAYERS * spec.page_size_bytes if layout.is_block_outermost else None, None, None, None)
    strides = interface.compute_layout_strides(spec, BLOCKS, LAYERS, layout, fixed_strides=fixed)
    size = BLOCKS * LAYERS * spec.page_size_bytes
    names = [f"layer{i}" for i in range(LAYERS)]
    placement = interface.KVCacheTensor(
        size=size, layers=names, layer_stride=strides[0], block_stride=strides[1]
    )
    raw = torch.randint(-128, 128, (size,), dtype=torch.int8)
    views = interface.create_kv_cache_views(raw, spec, BLOCKS, layout, placement, kernel_tokens)
    handler = VllmHandler(
        dict(zip(names, views, strict=True)), [placement], [VllmGroup(tuple(names))], BLOCKS, layout.name
    )
    view = handler.view()
    assert view.stripe_bytes == LAYERS * spec.page_size_bytes
    stripe = torch.zeros(view.stripe_bytes, dtype=torch.uint8)
    for block in range(BLOCKS):
        c_ext.gather(view, block, stripe.numpy())
        blocks = [interface.group_kernel_blocks(v.view(torch.uint8), BLOCKS)[block] for v in views]
        if layout is KVCacheLayout.BHLNC:
            expected = torch.stack(blocks, dim=1)
        elif layout.name.endswith("NHC"):
            expected = torch.stack([b.transpose(-3, -2) for b in blocks])
        else:
            expected = torch.stack(blocks)
        assert torch.equal(stripe, expected.reshape(-1))
    wanted = raw.clone()
    raw.zero_()
    for block in range(BLOCKS):
        source = wanted.clone()
        raw_before = raw.clone()
        raw.copy_(source)
        c_ext.gather(view, block, stripe.numpy())
        raw.copy_(raw_before)
        c_ext.scatter(view, block, stripe.numpy())
    assert torch.equal(raw, wanted), "all blocks scattered into a zeroed pool are the pool"
