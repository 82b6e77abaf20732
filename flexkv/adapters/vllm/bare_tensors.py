"""A KV cache configuration read off the tensors alone, for a connector class that is not given vLLM's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor

from flexkv.errors import GeometryError

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def config_of_tensors(caches: Mapping[str, torch.Tensor], vllm_config: VllmConfig) -> KVCacheConfig:
    """The configuration that these tensors were made from: one group of all layers.

    Args:
        caches: layer name -> logical [B, H, N, C], as `register_kv_caches` gets them.

    Raises:
        GeometryError: layers of another kind than full attention, or tensors of several groups.
    """
    names = list(caches)
    if not names or not all(isinstance(cache, torch.Tensor) and cache.ndim == 4 for cache in caches.values()):
        raise GeometryError("the built-in connector class serves attention layers only, [B, H, N, C] each")
    spec = _common_spec(names, vllm_config)
    pointers = [caches[name].data_ptr() for name in names]
    if len(set(pointers)) != len(names):
        raise GeometryError(
            "several layers share memory (hybrid groups, or layers that share KV), which the built-in connector class "
            'cannot tell apart; use "kv_connector":"FlexKVConnector","kv_connector_module_path":"flexkv.adapters.vllm"'
        )
    first = caches[names[0]]
    kernel_blocks, _, kernel_tokens, _ = first.shape
    ratio, rest = divmod(spec.block_size, kernel_tokens)
    if rest or kernel_blocks % ratio:
        raise GeometryError(
            f"{names[0]}: {kernel_blocks} blocks of {kernel_tokens} tokens; vLLM's block has {spec.block_size}"
        )
    ordered = [name for _, name in sorted(zip(pointers, names, strict=True))]
    return KVCacheConfig(
        num_blocks=kernel_blocks // ratio,
        kv_cache_tensors=_placements(ordered, caches, ratio),
        kv_cache_groups=[KVCacheGroupSpec(names, spec)],
        kv_cache_layout=vllm_config.cache_config.kv_cache_layout,
        hash_block_size=spec.block_size,
    )


def _common_spec(names: Sequence[str], vllm_config: VllmConfig):  # type: ignore[no-untyped-def]
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase, list(names))
    specs = [layer.get_kv_cache_spec(vllm_config) for layer in layers.values()]
    kinds = {(type(spec).__name__, getattr(spec, "block_size", 0)) for spec in specs}
    if len(kinds) != 1:
        raise GeometryError(
            f"layers of several kinds: {sorted(kinds)}; the built-in connector class serves one"
        )
    # One non-causal layer decides for the group, as in vLLM's own merge.
    return next((spec for spec in specs if getattr(spec, "non_causal", False)), specs[0])


def _placements(
    ordered: Sequence[str], caches: Mapping[str, torch.Tensor], ratio: int
) -> list[KVCacheTensor]:
    """One placement for equally spaced layers of one shape, else one for each layer."""
    starts = [caches[name].data_ptr() for name in ordered]
    shapes = {(tuple(caches[name].shape), caches[name].stride(), caches[name].dtype) for name in ordered}
    gaps = {after - before for before, after in pairwise(starts)}
    if len(shapes) == 1 and len(gaps) <= 1:
        return [_placement(list(ordered), caches, gaps.pop() if gaps else 0, ratio)]
    return [_placement([name], caches, 0, ratio) for name in ordered]


def _placement(
    layers: list[str], caches: Mapping[str, torch.Tensor], layer_stride: int, ratio: int
) -> KVCacheTensor:
    cache = caches[layers[0]]
    item = cache.element_size()
    return KVCacheTensor(
        size=cache.untyped_storage().nbytes(),
        layers=layers,
        layer_stride=layer_stride or cache.untyped_storage().nbytes(),
        block_stride=cache.stride(0) * item * ratio,
        offset=cache.storage_offset() * item,
    )
