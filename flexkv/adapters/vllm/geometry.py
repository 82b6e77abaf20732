"""What the engine's KV cache configuration means to flexkv, what is refused of it, and how it is read off the tensors
alone, for a connector class that is not given vLLM's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MLAAttentionSpec,
    iter_layer_specs,
)

from flexkv.errors import GeometryError
from flexkv.layout.format_id import FormatId, Interior
from flexkv.layout.vllm import VllmGroup, VllmHandler
from flexkv.transfer.engine import cuda_device_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig

CPU_ATTENTION_OWNER = "vllm-cpu-attn"
BLOCK_FIRST_ORDER = "BLHNC"
VECTOR_ISA = "vec"
"""vLLM's name of its attention kernel for AVX-512 and AVX2."""

SERVED_SPECS = (FullAttentionSpec, MLAAttentionSpec)


@dataclass(frozen=True, slots=True)
class BlockGeometry:
    """Tokens a block of the engine's one KV group, and blocks of its pool.

    Attributes:
        hash_tokens: tokens that one of the engine's block hashes covers; divides `block_tokens`.
        kv_dtype: of the pool's elements, by name.
    """

    block_tokens: int
    hash_tokens: int
    num_blocks: int
    layer_names: tuple[str, ...]
    kv_dtype: str = ""

    @property
    def hashes_per_block(self) -> int:
        return self.block_tokens // self.hash_tokens


def block_geometry(config: KVCacheConfig) -> BlockGeometry:
    """Reads and checks the engine's KV cache configuration.

    Raises:
        GeometryError: several KV groups, or a group that is refused by `check_group`.
    """
    groups = config.kv_cache_groups
    if not groups:
        raise GeometryError(
            "the model has no KV cache, so there is nothing to store; leave --kv-transfer-config out"
        )
    if len(groups) != 1:
        kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in groups)
        raise GeometryError(
            f"the model has {len(groups)} KV cache groups ({kinds}); flexkv stores models with 1. "
            "Start vLLM with --disable-hybrid-kv-cache-manager where the model allows it"
        )
    check_group(groups[0])
    specs = _layer_specs(config)
    spec = specs[0]
    hash_tokens = config.hash_block_size or spec.block_size
    if spec.block_size % hash_tokens:
        raise GeometryError(
            f"a block of {spec.block_size} tokens is no multiple of the {hash_tokens} tokens that a block hash covers"
        )
    dtypes = sorted({str(one.dtype).removeprefix("torch.") for one in specs})
    return BlockGeometry(
        spec.block_size, hash_tokens, config.num_blocks, tuple(groups[0].layer_names), "+".join(dtypes)
    )


def _layer_specs(config: KVCacheConfig) -> tuple[KVCacheSpec, ...]:
    """What the layers of the one group hold, each other spec once.

    Layers of several shapes reach a worker as `UniformTypeKVCacheSpecs`, and the scheduler as the first of them.
    """
    return tuple(dict.fromkeys(iter_layer_specs(config.kv_cache_groups[0].kv_cache_spec)))


def check_group(group: KVCacheGroupSpec) -> None:
    """Refuses a KV cache group whose blocks are not a function of the tokens up to their end, or hold something else
    than one state a token.

    Only the two types themselves are served. vLLM derives others from them that mean something else: `RSWASpec` frees
    blocks of a running request, `HiddenStateCacheSpec` holds no KV, `SinkFullAttentionSpec` has KV that belongs to no
    token of the prompt.

    Raises:
        GeometryError: names the type or the field.
    """
    where = f"KV cache group of {len(group.layer_names)} layers"
    for spec in iter_layer_specs(group.kv_cache_spec):
        _check_spec(spec, where)
    if group.host_resident or not group.enable_kv_transfer:
        raise GeometryError(
            f"{where} is not for connectors ({group.role.value}); flexkv stores KV on the device"
        )


def _check_spec(spec: KVCacheSpec, where: str) -> None:
    if type(spec) not in SERVED_SPECS:
        served = ", ".join(kind.__name__ for kind in SERVED_SPECS)
        raise GeometryError(f"{where} is a {type(spec).__name__}; flexkv stores full attention ({served})")
    if spec.non_causal:
        raise GeometryError(
            f"{where} is non-causal (a prefix LM): KV depends on later tokens of the prompt, so that of one prompt is "
            "of no use to another; leave --kv-transfer-config out"
        )
    if spec.tokens_per_state != 1:
        raise GeometryError(
            f"{where} has {spec.tokens_per_state} tokens a state; flexkv stores models with 1"
        )


def required_layout(config: VllmConfig) -> str | None:
    """The physical order to ask vLLM for: blocks outermost, so that a block is one contiguous run over all layers.

    None where the platform has another one only; an order that the attention backend cannot take would be refused
    with a warning at every start.
    """
    return None if current_platform.is_cpu() else BLOCK_FIRST_ORDER


def is_replicated(config: KVCacheConfig) -> bool:
    """Whether tensor-parallel ranks hold copies of the same KV: MLA's latent belongs to no head, so no rank has a part
    of its own. (Context parallelism, which would split it by tokens, is refused.) One layer that is split by heads
    makes the ranks' blocks differ."""
    return all(isinstance(spec, MLAAttentionSpec) for spec in _layer_specs(config))


def heads_of_rows(config: KVCacheConfig) -> int:
    """KV heads of a rank; 0 where K and V of a token and head are not two rows of one size."""
    spec, *others = _layer_specs(config)
    if others or is_replicated(config) or getattr(spec, "head_size_v", spec.head_size) != spec.head_size:
        return 0
    return int(spec.num_kv_heads)


def build_view(caches: Mapping[str, torch.Tensor], config: KVCacheConfig, ranks: int) -> tuple[Any, FormatId]:
    """The view of this rank's pool and the format of its pages.

    Returns:
        (KvView, FormatId) of the one KV group.

    Raises:
        GeometryError: tensors and configuration disagree, or the pool is not plain memory.
    """
    cuda_device_of(list(caches.values()))  # refuses what no lane can reach
    handler = _handler(caches, config, ranks)
    return handler.view(0), handler.format_id(0)


def layer_numbers(caches: Mapping[str, torch.Tensor], config: KVCacheConfig, ranks: int) -> dict[str, int]:
    """Of each attention layer its number in the view; a layer that shares another's KV has that one's.

    vLLM adds layers that share KV to a copy of its configuration after it has made the connector, so only their
    tensors show them.
    """
    handler = _handler(caches, config, ranks)
    numbers = {name: handler.layer_number(name) for name in block_geometry(config).layer_names}
    placed = {caches[name].data_ptr(): number for name, number in numbers.items()}
    shared = {name: placed.get(cache.data_ptr()) for name, cache in caches.items() if name not in numbers}
    return numbers | {name: number for name, number in shared.items() if number is not None}


def _cpu_interior(config: KVCacheConfig) -> Interior:
    """How the CPU's attention kernel arranges a block, where we know it: to the kernels the pool is plain memory. The
    vector kernel of x86 keeps K by elements and V by tokens; others keep tiles made for their instructions.
    """
    # On a machine with a GPU nothing of the CPU's attention is needed.
    from vllm.v1.attention.backends import cpu_attn

    spec = _layer_specs(config)[0]
    if not isinstance(spec, FullAttentionSpec) or not heads_of_rows(config):
        return Interior.OPAQUE
    isa_of = getattr(cpu_attn, "_get_attn_isa", None)
    if isa_of is None or spec.dtype not in cpu_attn.CPUAttentionBackend.supported_dtypes:
        return Interior.OPAQUE
    isa = isa_of(spec.dtype, spec.block_size, spec.head_size)
    return Interior.K_TRANSPOSED if isa == VECTOR_ISA else Interior.OPAQUE


def _handler(caches: Mapping[str, torch.Tensor], config: KVCacheConfig, ranks: int) -> VllmHandler:
    geometry = block_geometry(config)
    order = str(config.kv_cache_layout)
    is_latent = is_replicated(config)
    owner = ""
    if current_platform.is_cpu():
        interior: Interior | None = _cpu_interior(config)
        owner = CPU_ATTENTION_OWNER if interior is Interior.OPAQUE else ""
    elif len(_layer_specs(config)) > 1:
        # A sparse indexer keeps the values of a block before its scales, others K of another size than V: what one
        # word would say of all layers is not true.
        interior, owner = Interior.OPAQUE, f"vllm-{order.replace('L', '').replace('B', '')}"
    else:
        interior = Interior.LATENT if is_latent else None
    return VllmHandler(
        caches=caches,
        placements=config.kv_cache_tensors,
        groups=[VllmGroup(geometry.layer_names, interior=interior, owner=owner)],
        num_blocks=config.num_blocks,
        order=order,
        ranks=1 if is_latent else ranks,
    )


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
