"""Lists the names of vLLM that flexkv's adapter uses, and the names among them that an installed vLLM lacks. Most names
are found in the adapter's source.

vLLM's connector interface is experimental and the classes of its engine are internal, so a new version may drop any of
these names. The list contains four kinds of names: those that the adapter's source imports, with the keywords of calls;
attributes that the source reads from arguments annotated with a class of vLLM; settings that enter a block's key; and
the names in `BY_HAND`, which the source does not show.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterable, Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from flexkv.adapters.vllm.engine_checks import TESTED_VERSIONS
from flexkv.adapters.vllm.identity_fields import TABLES

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("flexkv/adapters/vllm", "flexkv/integration")

BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"

_OUTPUT = "vllm.v1.core.sched.output"
_SPECS = "vllm.v1.kv_cache_interface"
_HEADS = ("head_size", "head_size_v", "num_kv_heads")

_ATTRIBUTES: dict[str, tuple[str, ...]] = {
    f"{BASE}:KVConnectorBase_V1": (
        "_get_connector_metadata",
        "_kv_cache_config",
        "_kv_transfer_config",
        "_vllm_config",
        "bind_connector_metadata",
        "get_external_cache_hit_sources",
        "has_connector_metadata",
        "restore_kv_caches",
        "role",
        "unregister_kv_caches",
    ),
    f"{BASE}:KVConnectorRole": ("WORKER",),
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics:KVConnectorPromMetrics": (
        "_labelnames",
        "per_engine_labelvalues",
    ),
    "vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory": (
        "_registry",
        "register_connector",
    ),
    "vllm.config:AttentionConfig": ("backend", "backend_per_kind"),
    "vllm.config:CacheConfig": (
        "cache_dtype",
        "enable_prefix_caching",
        "kv_cache_dtype_skip_layers",
        "kv_cache_layout",
        "prefix_caching_hash_algo",
    ),
    "vllm.config:KVEventsConfig": ("enable_kv_cache_events",),
    "vllm.config:KVTransferConfig": ("engine_id", "is_kv_consumer", "is_kv_producer"),
    "vllm.config:LoadConfig": ("load_format",),
    "vllm.config:ModelConfig": (
        "dtype",
        "enable_sleep_mode",
        "get_total_num_kv_heads",
        "hf_config_path",
        "max_model_len",
        "quantization",
        "seed",
        "trust_remote_code",
        "using_transformers_backend",
    ),
    "vllm.config:MultiModalConfig": (
        "mm_encoder_attn_dtype",
        "mm_encoder_fp8_scale_path",
        "mm_processor_cache_gb",
    ),
    "vllm.config:ParallelConfig": (
        "data_parallel_external_lb",
        "data_parallel_index",
        "data_parallel_size",
        "data_parallel_size_local",
        "decode_context_parallel_size",
        "pipeline_parallel_size",
        "prefill_context_parallel_size",
        "rank",
        "use_ubatching",
    ),
    "vllm.config:PoolerConfig": ("seq_pooling_type", "tok_pooling_type"),
    "vllm.config:SchedulerConfig": ("async_scheduling", "max_num_batched_tokens"),
    "vllm.config:SpeculativeConfig": ("draft_load_config", "method", "use_eagle_block_drop"),
    "vllm.config:VllmConfig": ("lora_config",),
    "vllm.envs": (
        "VLLM_B12X_MOE_FP4_FORCE_A16",
        "VLLM_BATCH_INVARIANT",
        "VLLM_CPU_INT4_W4A8",
        "VLLM_DISABLED_KERNELS",
        "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE",
        "VLLM_FLOAT32_MATMUL_PRECISION",
        "VLLM_HUMMING_INPUT_QUANT_CONFIG",
        "VLLM_HUMMING_ONLINE_QUANT_CONFIG",
        "VLLM_HUMMING_USE_F16_ACCUM",
        "VLLM_MARLIN_INPUT_DTYPE",
        "VLLM_MOE_ROUTING_SIMULATION_STRATEGY",
        "VLLM_MOE_USE_DEEP_GEMM",
        "VLLM_USE_BREAKABLE_CUDAGRAPH",
        "VLLM_USE_DEEP_GEMM",
        "VLLM_USE_DEEP_GEMM_E8M0",
    ),
    "vllm.lora.request:LoRARequest": ("adapter_id", "load_inplace", "lora_int_id", "lora_path", "name"),
    "vllm.model_executor.layers.attention_layer_base:AttentionLayerBase": (
        "get_attn_backend",
        "get_kv_cache_spec",
    ),
    "vllm.model_executor.models.registry": ("ModelRegistry",),
    "vllm.model_executor.models.registry:_ModelRegistry": ("register_model",),
    "vllm.multimodal.hasher:MultiModalHasher": ("hash_kwargs",),
    "vllm.multimodal.inputs:MultiModalFeatureSpec": ("identifier", "mm_hash", "mm_position"),
    "vllm.multimodal.inputs:PlaceholderRange": ("length", "offset"),
    "vllm.platforms.interface:Platform": ("is_cpu",),
    "vllm.sampling_params:SamplingParams": ("extra_args",),
    "vllm.v1.attention.backend:AttentionBackend": (
        "get_name",
        "supported_dtypes",
        "supported_kv_cache_layouts",
    ),
    "vllm.v1.attention.backends.cpu_attn": ("CPUAttentionBackend", "_get_attn_isa"),
    "vllm.v1.attention.backends.registry:AttentionBackendEnum": ("get_class",),
    "vllm.v1.core.block_pool:BlockPool": (
        "_reuse_watchers",
        "blocks",
        "cached_block_hash_to_block",
        "free_block_queue",
        "get_cached_block",
        "get_num_free_blocks",
        "touch",
        "unpin_blocks",
    ),
    "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue": (
        "fake_free_list_head",
        "iter_blocks_after",
        "num_free_blocks",
    ),
    "vllm.v1.core.kv_cache_utils:KVCacheBlock": ("block_hash", "block_hash_num_tokens", "is_null"),
    f"{_OUTPUT}:CachedRequestData": ("new_block_ids", "req_ids", "resumed_req_ids"),
    f"{_OUTPUT}:KVConnectorBlockState": ("boundary_state_offloads", "get_block_ids"),
    f"{_OUTPUT}:NewRequestData": ("block_ids", "req_id"),
    f"{_SPECS}:ChunkedLocalAttentionSpec": _HEADS,
    f"{_SPECS}:FullAttentionSpec": (*_HEADS, "non_causal"),
    f"{_SPECS}:SlidingWindowSpec": _HEADS,
    f"{_SPECS}:MambaSpec": ("mamba_type", "num_prefill_checkpoint_blocks", "shapes"),
    "vllm.v1.engine.core": ("EngineCore",),
    "vllm.v1.engine.core:EngineCore": ("add_lora", "collective_rpc"),
    "vllm.v1.metrics.cache_hit_source:CacheHitSource": ("DISK", "EXTERNAL_UNSPECIFIED", "HOST"),
    "vllm.v1.request:Request": (
        "num_computed_tokens",
        "num_in_flight_tokens",
        "num_output_placeholders",
        "num_preemptions",
        "num_prompt_tokens",
        "num_tokens",
        "shared_prefix_boundary",
        "skip_reading_prefix_cache",
        "status",
    ),
    "vllm.v1.request:RequestStatus": ("WAITING_FOR_REMOTE_KVS",),
}

BY_HAND = frozenset(
    f"{owner}{'.' if ':' in owner else ':'}{name}" for owner, names in _ATTRIBUTES.items() for name in names
)
"""Names that are listed by hand: attributes of objects without an annotation, private names, and hooks that the
adapter uses only if vLLM has them. A test records what the adapter reads (tests/unit/adapters/attribute_reads.py),
and finds names that are missing here.
"""

FILLED_BY_US = frozenset(
    f"{BASE}:{name}"
    for name in ("KVConnectorMetadata", "KVConnectorWorkerMetadata", "KVConnectorHandshakeMetadata")
)
"""Classes whose objects a connector makes and vLLM only passes on. The adapter makes these objects from its own
subclasses, so the objects' attributes are not names of vLLM.
"""

ADDED = {
    "0.33": frozenset(
        {
            *(f"{BASE}:KVConnectorBase_V1.{hook}" for hook in ("unregister_kv_caches", "restore_kv_caches")),
            "vllm.config.kernel:KernelConfig.monokernel",
        }
    )
}
"""Names that are new in each version of vLLM. The adapter works without them in earlier versions."""

MODULES = {"KernelConfig": "vllm.config.kernel", "MambaConfig": "vllm.config.mamba"}
"""The modules of configuration classes that are not in `vllm.config`."""


def absent_in(version: str) -> frozenset[str]:
    """Returns the names that the adapter expects this version of vLLM to lack."""
    later = TESTED_VERSIONS[TESTED_VERSIONS.index(version) + 1 :]
    return frozenset().union(*(ADDED.get(one, frozenset()) for one in later))


def touched() -> list[str]:
    """Returns every name that the adapter uses, as "module:Class.attribute" or "module:name", sorted."""
    found = {*BY_HAND, *_settings()}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            found.update(_names_in(ast.parse(path.read_text(encoding="utf-8"))))
    return sorted(found)


def _settings() -> Iterator[str]:
    """Yields the fields of vLLM's configuration that enter a block's key, directly or through other code."""
    for table in TABLES:
        owner = f"{MODULES.get(table.config, 'vllm.config')}:{table.config}"
        yield from (f"{owner}.{name}" for name in (*table.taken, *table.read, *table.elsewhere))


def _names_in(tree: ast.Module) -> Iterator[str]:
    classes: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
            for alias in node.names:
                classes[alias.asname or alias.name] = f"{node.module}:{alias.name}"
    yield from classes.values()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            yield from _attributes_in(node, classes)
        elif isinstance(node, ast.Call) and (called := classes.get(ast.unparse(node.func))):
            yield from (f"{called}.{keyword.arg}" for keyword in node.keywords if keyword.arg)


def _attributes_in(function: ast.FunctionDef, classes: dict[str, str]) -> Iterator[str]:
    """Yields the attributes that a function reads from its arguments, for arguments that are annotated with imported
    vLLM classes."""
    arguments = (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
    kinds = {}
    for argument in arguments:
        kind = classes.get(ast.unparse(argument.annotation)) if argument.annotation else None
        if kind is not None and kind not in FILLED_BY_US:
            kinds[argument.arg] = kind
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in kinds:
            yield f"{kinds[node.value.id]}.{node.attr}"


def missing(names: Iterable[str]) -> list[str]:
    """Returns those of `names` that the vLLM on this process's path lacks."""
    return [name for name in names if not _exists(name)]


def owner_of(name: str) -> Any:
    """Returns the class or module in which the last part of a name is defined; None if the vLLM that is imported lacks
    the name."""
    module, _, path = name.partition(":")
    try:
        target: Any = importlib.import_module(module)
    except ImportError:
        return None
    first, *attributes = path.split(".")
    return getattr(target, first, None) if attributes else target


def _exists(name: str) -> bool:
    module, _, path = name.partition(":")
    try:
        target: Any = importlib.import_module(module)
    except ImportError:
        return False
    first, *attributes = path.split(".")
    if not hasattr(target, first):
        try:
            importlib.import_module(f"{module}.{first}")
        except ImportError:
            return False
        return not attributes
    target = getattr(target, first)
    return all(_has_attribute(target, attribute) for attribute in attributes)


def _has_attribute(owner: Any, name: str) -> bool:
    """Returns whether objects of the class `owner`, or of a subclass, have the attribute `name`. The attribute may be
    defined, annotated or set by a method. If `owner` is a function: whether it has a parameter `name`.
    """
    if hasattr(owner, name):
        return True
    if inspect.isfunction(owner):
        return name in inspect.signature(owner).parameters
    if not inspect.isclass(owner):
        return False
    for base in inspect.getmro(owner):
        if name in getattr(base, "__annotations__", {}):
            return True
        # The source of a dataclass is not searched, because a dataclass annotates every attribute that its methods set.
        is_plain = base.__module__.startswith("vllm") and not is_dataclass(base)
        if is_plain and re.search(rf"\bself\.{name}\b[^=\n]*=(?!=)", inspect.getsource(base)):
            return True
    kinds = (kind for kind in owner.__subclasses__() if kind.__module__.startswith("vllm"))
    return any(_has_attribute(kind, name) for kind in kinds)


def markdown() -> str:
    """Returns a Markdown table of the names by module. The table shows which tested versions of vLLM have each name."""
    modules: dict[str, list[str]] = {}
    for name in touched():
        module, _, path = name.partition(":")
        modules.setdefault(module, []).append(path)
    lines = [
        f"| module | name | {' | '.join(TESTED_VERSIONS)} |",
        f"|---|---|{'---|' * len(TESTED_VERSIONS)}",
    ]
    for module, paths in sorted(modules.items()):
        groups: dict[tuple[str, ...], list[str]] = {}
        for path in paths:
            there = tuple("no" if f"{module}:{path}" in absent_in(one) else "yes" for one in TESTED_VERSIONS)
            groups.setdefault(there, []).append(path)
        for there, names in sorted(groups.items(), reverse=True):
            shown = ", ".join(f"`{name}`" for name in names)
            lines.append(f"| `{module}` | {shown} | {' | '.join(there)} |")
    return "\n".join(lines)
