"""Makes views of the engine's pool, and finds out which ranks hold the same KV."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from flexkv.adapters.common.rank_pool import RankPool
from flexkv.adapters.vllm.engine_checks import backends_of_layers
from flexkv.adapters.vllm.pool_geometry import BlockGeometry, PoolGeometry, layer_specs, pool_geometry
from flexkv.errors import GeometryError
from flexkv.layout.format_id import Interior
from flexkv.layout.vllm import VllmGroup, VllmHandler
from flexkv.transfer.engine import cuda_device_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import AttentionBackend

CPU_ATTENTION_OWNER = "vllm-cpu-attn"
BLOCK_FIRST_ORDERS = ("BLHNC", "BLNHC", "BHLNC")
"""vLLM's names of the physical orders in which a block is one contiguous run over all layers, in order of
preference."""

KV_HEADS = re.compile("(key_value|kv).*head|head.*kv|query_group|multi_query")
"""Matches the names of entries in a model's configuration that hold a number of KV heads."""

HEAD_SPECS = (FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec)
"""vLLM's specs of layers whose blocks contain only KV heads, which vLLM divides among the ranks."""

VECTOR_ISA = "vec"
"""vLLM's name for its CPU attention kernel for AVX-512 and AVX2."""


def required_layout(config: VllmConfig) -> str | None:
    """Returns the physical order of the KV cache that flexkv requests from vLLM. In this order, a block is one
    contiguous run over all layers.

    Returns None if an attention backend in use does not support such an order, because vLLM would then ignore the
    request and log a warning at every start. The backends in use are known if the model's layers are in this process,
    or if the configuration names them. Backends that vLLM's workers choose later are assumed to support every order.
    """
    if current_platform.is_cpu():
        return None
    accepted = [
        layouts for kind in _backends_in_use(config) if (layouts := kind.supported_kv_cache_layouts())
    ]
    names = [{layout.name for layout in layouts} for layouts in accepted]
    return next((order for order in BLOCK_FIRST_ORDERS if all(order in own for own in names)), None)


def _backends_in_use(config: VllmConfig) -> list[type[AttentionBackend]]:
    """Returns the attention backends that are known; none if the workers choose them in their own processes."""
    if of_layers := backends_of_layers(config):
        return of_layers
    attention = config.attention_config
    named = [attention.backend, *attention.backend_per_kind.values()]
    return [backend.get_class() for backend in named if backend is not None]


def replicas(config: KVCacheConfig, ranks: int, of_heads: int = 1) -> int:
    """Returns how many consecutive tensor-parallel ranks hold copies of the same KV.

    With MLA, all ranks hold the same KV, because the latent belongs to no head. If even one layer is divided by heads,
    ranks with different heads hold different blocks. Context parallelism, which would divide KV by tokens, is refused.

    Args:
        of_heads: how many consecutive ranks have the same KV head; see `head_replicas`.
    """
    specs = [spec for group in config.kv_cache_groups for spec in layer_specs(group)]
    if all(isinstance(spec, MLAAttentionSpec) for spec in specs):
        return ranks
    by_heads = all(type(spec) in HEAD_SPECS and spec.num_kv_heads == 1 for spec in specs)
    return of_heads if by_heads else 1


def head_replicas(config: VllmConfig) -> int:
    """Returns how many consecutive ranks get the same KV head from vLLM: more than 1 if there are more ranks than
    heads.

    Returns 1 if this number may differ between layers: if the model's configuration has several numbers of KV heads, or
    there is a draft model.
    """
    heads, ranks = config.model_config.get_total_num_kv_heads(), config.parallel_config.tensor_parallel_size
    counts = [name for name in config.model_config.hf_text_config.to_dict() if KV_HEADS.search(name)]
    if config.speculative_config is not None or len(counts) != 1 or heads < 1 or ranks % heads:
        return 1
    return max(1, ranks // heads)


def heads_of_rows(group: KVCacheGroupSpec) -> int:
    """Returns a rank's number of KV heads; 0 if a token's K and V are not two rows of equal size per head."""
    spec, *others = layer_specs(group)
    if (
        others
        or isinstance(spec, (MLAAttentionSpec, MambaSpec))
        or getattr(spec, "head_size_v", spec.head_size) != spec.head_size
    ):
        return 0
    return int(spec.num_kv_heads)


def build_views(
    caches: Mapping[str, torch.Tensor], config: KVCacheConfig, stripes: int, replicas: int = 1
) -> list[RankPool]:
    """Returns the pool of each KV group, in the order of `pool_geometry`.

    Args:
        stripes: number of stripes in a page, which is the number of ranks that hold different bytes.
        replicas: how many consecutive ranks hold the same bytes; see the function `replicas`.

    Raises:
        GeometryError: tensors and configuration disagree, or no lane can reach the pool's memory.
    """
    cuda_device_of(list(caches.values()))  # raises if no lane can reach the memory
    geometry, handler = pool_geometry(config), _handler(caches, config, stripes)
    if geometry.is_hybrid:
        _refuse_shared(caches, geometry)
    return [
        RankPool(
            handler.view(at),
            handler.format_id(at),
            group.block_tokens,
            [caches[name] for name in group.layer_names],
            len(group.layer_names),
            heads_of_rows(config.kv_cache_groups[group.number]),
            replicas,
        )
        for at, group in enumerate(geometry.groups)
    ]


def _refuse_shared(caches: Mapping[str, torch.Tensor], geometry: PoolGeometry) -> None:
    """Refuses a hybrid pool if some layers attend to the KV of earlier layers. With such a model vLLM 0.32 itself
    answers differently after a hit (seen with a Gemma 3n on a CPU, without any connector)."""
    placed = {name for group in geometry.groups for name in group.layer_names}
    if shared := sorted(set(caches) - placed):
        raise GeometryError(
            f"{len(shared)} layers ({shared[0]}, ...) share the KV of others, and the model has "
            f"{len(geometry.groups)} KV cache groups, with which vLLM itself answers otherwise after a hit; start vLLM "
            "with --disable-hybrid-kv-cache-manager"
        )


def layer_numbers(caches: Mapping[str, torch.Tensor], config: KVCacheConfig) -> dict[str, int]:
    """Returns the number of each attention layer in its group's view. A layer that shares another layer's KV has the
    other layer's number.

    The configuration does not contain layers that share KV: vLLM adds such layers to a copy of the configuration, after
    the connector has been made. This function finds them by their tensors, which have the other layer's address.
    """
    handler = _handler(caches, config, 1)
    names = [name for group in pool_geometry(config).groups for name in group.layer_names]
    numbers = {name: handler.layer_number(name) for name in names}
    placed = {caches[name].data_ptr(): number for name, number in numbers.items()}
    shared = {name: placed.get(cache.data_ptr()) for name, cache in caches.items() if name not in numbers}
    return numbers | {name: number for name, number in shared.items() if number is not None}


def _cpu_interior(group: KVCacheGroupSpec) -> Interior:
    """Returns the interior order of a block in a CPU's pool, which vLLM's attention kernel determines; OPAQUE if it is
    not known. The vector kernel of x86 stores K element by element and V token by token. Other kernels store tiles that
    suit their instructions.
    """
    # The module is imported here and not at the top, because it is only needed if the engine runs on CPUs.
    from vllm.v1.attention.backends import cpu_attn

    spec = layer_specs(group)[0]
    if not isinstance(spec, FullAttentionSpec) or not heads_of_rows(group):
        return Interior.OPAQUE
    isa_of = getattr(cpu_attn, "_get_attn_isa", None)
    if isa_of is None or spec.dtype not in cpu_attn.CPUAttentionBackend.supported_dtypes:
        return Interior.OPAQUE
    isa = isa_of(spec.dtype, spec.block_size, spec.head_size)
    return Interior.K_TRANSPOSED if isa == VECTOR_ISA else Interior.OPAQUE


def _handler(caches: Mapping[str, torch.Tensor], config: KVCacheConfig, stripes: int) -> VllmHandler:
    return VllmHandler(
        caches=caches,
        placements=config.kv_cache_tensors,
        groups=[_layers_of(config, group) for group in pool_geometry(config).groups],
        num_blocks=config.num_blocks,
        order=str(config.kv_cache_layout),
        ranks=stripes,
    )


def _layers_of(config: KVCacheConfig, geometry: BlockGeometry) -> VllmGroup:
    group = config.kv_cache_groups[geometry.number]
    specs = layer_specs(group)
    if isinstance(specs[0], MambaSpec):
        # On CPUs and GPUs alike, only the model's own code can interpret the bytes of a state.
        return VllmGroup(
            geometry.layer_names, interior=Interior.OPAQUE, owner=f"vllm-{specs[0].mamba_type.name.lower()}"
        )
    owner = ""
    if current_platform.is_cpu():
        interior: Interior | None = _cpu_interior(group)
        owner = CPU_ATTENTION_OWNER if interior is Interior.OPAQUE else ""
    elif len(specs) > 1:
        # The layers order the bytes within a block in different ways: a sparse indexer stores all values of a block
        # before its scales, and in some other layers K and V differ in size.
        order = str(config.kv_cache_layout).replace("L", "").replace("B", "")
        interior, owner = Interior.OPAQUE, f"vllm-{order}"
    else:
        interior = Interior.LATENT if isinstance(specs[0], MLAAttentionSpec) else None
    return VllmGroup(geometry.layer_names, interior=interior, owner=owner)
