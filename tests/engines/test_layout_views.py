"""Views that flexkv builds from vLLM's own placements and tensors, for all physical orders that vLLM supports. vLLM's
own indexing is the reference.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1 import kv_cache_interface as interface
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from flexkv import c_ext
from flexkv.adapters.vllm.geometry import build_views
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
        kernel_tokens = None  # vLLM splits only dense pages into kernel blocks, and these pages are not dense
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


ATTENTION = interface.FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=8, dtype=torch.bfloat16)
STATES = interface.MambaSpec(
    block_size=32,
    shapes=((3, 10), (2, 8, 13)),
    dtypes=(torch.bfloat16, torch.float32),
    page_size_padded=ATTENTION.page_size_bytes,
    mamba_cache_mode="align",
)


@pytest.mark.parametrize("layout", list(KVCacheLayout), ids=lambda layout: layout.name)
def test_states_in_a_pool_that_vllm_allocates(layout: KVCacheLayout) -> None:
    """A pool that vLLM allocates, with groups of states that share memory with an attention group, gives the right
    views. All blocks have the same size, and states do not fill their blocks.
    """
    engine: Any = SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: layout,
            num_gpu_blocks_override=None,
            prefix_cache_retention_interval=0,
        ),
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=None,
    )
    layers = {f"layer.{n}": ATTENTION if n % 3 == 2 else STATES for n in range(6)}
    groups = get_kv_cache_groups(engine, layers)
    config = get_kv_cache_config_from_groups(engine, groups, 2 * BLOCKS * ATTENTION.page_size_bytes)
    config.kv_cache_layout = layout.name
    caches = allocate_kv_cache(config, torch.device("cpu"), layout)
    assert config.num_blocks == BLOCKS
    raw = next(iter(caches.values())).untyped_storage()
    torch.tensor([], dtype=torch.uint8).set_(raw).random_(0, 256)
    full, *of_states = build_views(caches, config, 1)
    assert full.facts.stripe_bytes == 2 * ATTENTION.page_size_bytes
    numbers = [n for n, group in enumerate(groups) if isinstance(group.kv_cache_spec, interface.MambaSpec)]
    assert len(numbers) == len(of_states) == 2
    for number, group in zip(numbers, of_states, strict=True):
        names = groups[number].layer_names
        assert group.facts.stripe_bytes == 2 * STATES.state_content_size_bytes < full.facts.stripe_bytes
        assert (group.facts.heads, "vllm-mamba2" in group.facts.format_id) == (0, True)
        stripe = torch.zeros(group.view.stripe_bytes, dtype=torch.uint8)
        for block in range(BLOCKS):
            c_ext.gather(group.view, block, stripe.numpy())
            expected = torch.cat([caches[name][block].reshape(-1).view(torch.uint8) for name in names])
            assert torch.equal(stripe, expected)
