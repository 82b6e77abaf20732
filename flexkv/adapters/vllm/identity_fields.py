"""Everything in vLLM's configuration that decides the KV of a block, and everything that must not change a key.

A test goes through the fields of the installed vLLM, and fails for one that no table has. `docs/identity.md` is made
from these tables.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from flexkv.adapters.common.identity_table import FieldTable
from flexkv.adapters.common.loader_settings import EXTRA_RULE, FORMAT_RULE, files_of_format, loader_settings

ROUNDING = "another order of the same sums: rounding, as another batch gives it"
MEMORY = "memory: how much there is, and where"
SCHEDULING = "which requests a step computes, and when"
PROCESSES = "processes, ports and places"
SAMPLING = "what is done with the last hidden states, not with KV"
TOKENS = "decides tokens, which are in each key"
API = "what a server shows and logs"
LAYOUT = "the order of a page's bytes, which its format names"
POOL = "found out when the pool is made"
SPEED = "speed alone"
OTHERS = "has a table of its own"

ENGINE = FieldTable(
    "VllmConfig",
    "",
    taken=("additional_config",),
    left_out={
        OTHERS: (
            "model_config",
            "cache_config",
            "parallel_config",
            "load_config",
            "attention_config",
            "mamba_config",
            "kernel_config",
            "lora_config",
            "speculative_config",
        ),
        "made of `quantization`, `quantization_config`, the model's configuration and files, which are in the key; "
        "loading a model changes this object": ("quant_config",),
        SCHEDULING: ("scheduler_config", "shutdown_timeout", "performance_mode"),
        "a device's arithmetic is its own; pages go from one kind to another in formats that both know": (
            "device_config",
        ),
        MEMORY: ("offload_config", "engram_config"),
        ROUNDING: ("compilation_config", "optimization_level"),
        SAMPLING: ("structured_outputs_config", "reasoning_config", "watermark_config", "aux_output_config"),
        API: (
            "observability_config",
            "logging_config",
            "profiler_config",
            "watchdog_config",
            "kv_events_config",
            "instance_id",
        ),
        "flexkv's own settings": ("kv_transfer_config",),
        "where the outputs of an encoder are computed and kept, not what they are": (
            "ec_transfer_config",
            "ec_manager_config",
        ),
        "diffusion models are refused": ("diffusion_config",),
        "new weights in a running engine: a reset": ("weight_transfer_config",),
    },
)

MODEL = FieldTable(
    "ModelConfig",
    "model_config",
    taken=(
        "dtype",
        "quantization",
        "quantization_config",
        "model_impl",
        "model_class_overrides",
        "code_revision",
    ),
    elsewhere={
        "model": "the weights: the hub's commit, samples of the files, or `identity.model`; and the files that say "
        "how they are quantised",
        "revision": "with `model`",
        "seed": "where the weights are random (`load_format` dummy)",
        "hf_config": "whole, for a model that takes images or other inputs",
        "hf_text_config": "whole",
        "hf_config_path": "by the configuration that is read there",
        "hf_overrides": "by the configuration that they make, and the content of a `quantization_config_file`",
        "trust_remote_code": "where it is on, by the content of the Python files in the model's folder",
        "max_model_len": "where it decides which factors of LongRoPE are taken",
        "multimodal_config": "has a table of its own; with it the processor's files, without the chat template",
    },
    left_out={
        "the weights' place in a store, of which `model` is a copy": ("model_weights", "hf_token"),
        TOKENS: (
            "tokenizer",
            "tokenizer_mode",
            "tokenizer_revision",
            "skip_tokenizer_init",
            "generation_config",
            "override_generation_config",
            "enable_trace_replay",
        ),
        "how the configuration is read; what is read is in the key": ("config_format", "is_submodel_config"),
        SAMPLING: (
            "runner",
            "convert",
            "pooler_config",
            "max_logprobs",
            "logprobs_mode",
            "return_sampling_mask",
            "use_fp64_gumbel",
            "logits_processors",
            "word_embeddings_untied_by_checkpoint",
        ),
        ROUNDING: ("enforce_eager", "disable_cascade_attn"),
        "which inputs are allowed; what they are is in the block hashes": (
            "enable_prompt_embeds",
            "allowed_local_media_path",
            "allowed_media_domains",
        ),
        "requests end where the window does, so attention is the same": ("disable_sliding_window",),
        "of a draft model's own limit": ("spec_target_max_model_len",),
        "permits, and changes nothing": ("allow_deprecated_quantization",),
        MEMORY: (
            "enable_sleep_mode",
            "sleep_preserve_parameter_names",
            "sleep_mode_backend",
            "sleep_mode_offload_cudagraph",
            "enable_nccl_comm_suspend",
            "enable_cumem_allocator",
        ),
        API: ("served_model_name", "io_processor_plugin", "renderer_num_workers"),
    },
)

MULTIMODAL = FieldTable(
    "MultiModalConfig",
    "model_config.multimodal_config",
    taken=(
        "mm_processor_kwargs",
        "media_io_kwargs",
        "mm_device_do_normalize",
        "mm_encoder_attn_dtype",
        "video_pruning_rate",
        "video_pruning_method",
    ),
    elsewhere={
        "mm_encoder_fp8_scale_path": "by the file's content; without one fp8 attention takes its scales from what "
        "it has seen, and pages of inputs serve one run",
        "mm_processor_cache_gb": "0 without prefix caching: inputs have numbers for names, and serve one run",
    },
    left_out={
        "which inputs are allowed; what they are is in the block hashes": (
            "language_model_only",
            "limit_per_prompt",
            "enable_mm_embeds",
            "mm_encoder_only",
            "allow_missing_mm_embeddings",
        ),
        "names of inputs, which the block hashes have": ("mm_hasher_algorithm",),
        TOKENS: ("interleave_mm_strings",),
        MEMORY: (
            "mm_processor_cache_type",
            "mm_shm_cache_max_object_size_mb",
            "skip_mm_profiling",
            "mm_tensor_ipc",
            "mm_ipc_gpu_memory_gb",
        ),
        ROUNDING: ("mm_encoder_tp_mode", "mm_encoder_attn_backend"),
        "what is written to a file for another start": (
            "mm_encoder_fp8_scale_save_path",
            "mm_encoder_fp8_scale_save_margin",
        ),
    },
)

CACHE = FieldTable(
    "CacheConfig",
    "cache_config",
    taken=(
        "cache_dtype",
        "kv_cache_dtype_skip_layers",
        "prefix_caching_hash_algo",
        "mamba_cache_dtype",
        "mamba_ssm_cache_dtype",
        "use_replayssm",
        "replayssm_buffer_len",
        "use_kda_recoverssm",
        "swa_bounded_replay",
    ),
    elsewhere={
        "block_size": "as the tokens per block of the pool",
        "mamba_block_size": "as the tokens per block of the group",
        "enable_prefix_caching": "with `mm_processor_cache_gb`, above",
    },
    left_out={
        MEMORY: (
            "gpu_memory_utilization",
            "num_gpu_blocks_override",
            "kv_cache_memory_bytes",
            "kv_offloading_size",
            "kv_offloading_backend",
            "mamba_page_size_padded",
            "skip_page_size_padded",
        ),
        LAYOUT: ("kv_cache_layout",),
        "in the block hashes, which are chains of such units": ("prefix_match_unit", "hash_block_size"),
        "of the model's configuration, which is in the key": ("sliding_window", "is_attention_free"),
        "which blocks and states vLLM keeps, not what is in them": (
            "prefix_cache_retention_interval",
            "mamba_cache_mode",
            "enable_mamba_shared_prefix_checkpoint",
            "cache_hit_alignment_tokens",
        ),
        "layers that share the KV of others skip work; they have none of their own": (
            "kv_sharing_fast_prefill",
        ),
        POOL: (
            "user_specified_block_size",
            "_block_size_resolved",
            "num_gpu_blocks",
            "num_cpu_blocks",
            "simple_cpu_offload_num_blocks",
            "effective_attention_block_size",
            "kv_cache_size_tokens",
            "kv_cache_max_concurrency",
        ),
    },
)

LORA = FieldTable(
    "LoRAConfig",
    "lora_config",
    taken=("lora_dtype", "target_modules", "enable_tower_connector_lora"),
    left_out={
        MEMORY: ("max_lora_rank", "max_loras", "max_cpu_loras"),
        "the adapter is in the request, and its content in the key": ("default_mm_loras",),
        ROUNDING: (
            "fully_sharded_loras",
            "specialize_active_lora",
            "enable_mixed_moe_lora_format",
            "enable_moe_shared_loras",
        ),
        SAMPLING: ("max_lora_cls_labels",),
    },
)
"""Only the keys of requests with an adapter have these values."""

SPECULATIVE = FieldTable(
    "SpeculativeConfig",
    "speculative_config",
    taken=("method", "quantization", "kv_cache_dtype", "parallel_drafting"),
    elsewhere={
        "model": "the draft model's weights; as it is where drafts come from no model",
        "revision": "with the draft model's weights",
        "draft_model_config": "its weights, its configuration, `dtype`, `quantization` and `quantization_config`",
        "draft_load_config": "where the draft's weights are random, by the seed",
        "code_revision": "as the draft model's `code_revision`",
    },
    left_out={
        OTHERS: ("target_model_config",),
        "how many tokens are guessed, and which of them are taken: KV of tokens that are not taken is not stored": (
            "num_speculative_tokens",
            "num_speculative_tokens_per_batch_size",
            "prompt_lookup_max",
            "prompt_lookup_min",
            "suffix_decoding_max_tree_depth",
            "suffix_decoding_max_cached_requests",
            "suffix_decoding_max_spec_factor",
            "suffix_decoding_min_token_prob",
            "rejection_sample_method",
            "synthetic_acceptance_rates",
            "synthetic_acceptance_length",
            "enable_adaptive_verification",
            "draft_sample_method",
            "dspark_draft_topk",
            "use_local_argmax_reduction",
            "draft_lm_head_quantization",
            "xpress_topc",
            "fly_window_size",
            "fly_entropy_threshold",
            "fly_entropy_top_k",
            "use_heterogeneous_vocab",
            "max_model_len",
            "disable_eagle_block_drop",
        ),
        "which tokens a block's hash covers, and hashes are in the keys": ("disable_lookahead_block_hashes",),
        ROUNDING: (
            "enforce_eager",
            "moe_backend",
            "attention_backend",
            "disable_padded_drafter_batch",
            "index_share_for_mtp_iteration",
            "draft_tensor_parallel_size",
            "tensor_parallel_size",
        ),
        PROCESSES: ("target_parallel_config", "draft_parallel_config"),
    },
)

PARALLEL = FieldTable(
    "ParallelConfig",
    "parallel_config",
    elsewhere={
        "tensor_parallel_size": "a page of another number of ranks has another format, which no key finds"
    },
    left_out={
        "refused where it is not 1": (
            "pipeline_parallel_size",
            "prefill_context_parallel_size",
            "decode_context_parallel_size",
            "dcp_kv_cache_interleave_size",
            "cp_kv_cache_interleave_size",
            "_allow_auto_resolve_cp_interleave_size",
            "dcp_comm_backend",
            "dcp_q_replicate",
        ),
        ROUNDING: (
            "is_moe_model",
            "enable_hc_sp",
            "enable_expert_parallel",
            "enable_batch_sharded_sampling",
            "enable_ep_weight_filter",
            "enable_eplb",
            "eplb_config",
            "expert_placement_strategy",
            "all2all_backend",
            "disable_custom_all_reduce",
            "enable_dbo",
            "ubatch_size",
            "dbo_decode_token_threshold",
            "dbo_prefill_token_threshold",
        ),
        PROCESSES: (
            "data_parallel_size",
            "data_parallel_size_local",
            "data_parallel_rank",
            "data_parallel_rank_local",
            "data_parallel_index",
            "data_parallel_master_ip",
            "data_parallel_rpc_port",
            "dp_sync_interval",
            "data_parallel_master_port",
            "data_parallel_backend",
            "data_parallel_external_lb",
            "data_parallel_hybrid_lb",
            "max_parallel_loading_workers",
            "enable_shm_tensor_arena",
            "enable_elastic_ep",
            "elastic_ep_max_dp_size",
            "disable_nccl_for_dp_synchronization",
            "ray_workers_use_nsight",
            "ray_runtime_env",
            "placement_group",
            "distributed_executor_backend",
            "worker_cls",
            "worker_extension_cls",
            "master_addr",
            "master_port",
            "node_rank",
            "nnodes",
            "numa_bind",
            "numa_bind_nodes",
            "numa_bind_cpus",
            "assigned_physical_gpu_ids",
            "distributed_timeout_seconds",
            "cpu_distributed_timeout_seconds",
            "world_size",
            "rank",
            "_data_parallel_master_port_list",
            "_coord_store_port",
            "_api_process_count",
            "_api_process_rank",
            "enable_fault_tolerance",
            "fault_tolerance_config",
        ),
    },
)

LOAD = FieldTable(
    "LoadConfig",
    "load_config",
    taken=("ignore_patterns",),
    read={
        "load_format": (
            f"{FORMAT_RULE}; dummy: the weights are random, and the seed is in the key",
            files_of_format,
        ),
        "model_loader_extra_config": (EXTRA_RULE, loader_settings),
    },
    left_out={
        SPEED: (
            "safetensors_load_strategy",
            "safetensors_prefetch_num_threads",
            "safetensors_prefetch_block_size",
            "use_tqdm_on_load",
        ),
        MEMORY: ("download_dir", "device", "pt_load_map_location"),
    },
)

ATTENTION = FieldTable(
    "AttentionConfig",
    "attention_config",
    taken=(
        "indexer_kv_dtype",
        "indexer_sparse_logits",
        "disable_flashinfer_q_quantization",
        "use_prefill_query_quantization",
        "use_non_causal",
    ),
    left_out={
        ROUNDING: (
            "backend",
            "backend_per_kind",
            "minimax_m3_msa_decode_backend",
            "flash_attn_version",
            "flash_attn_max_num_splits_for_cuda_graph",
            "tokenspeed_mla_min_split_kv",
            "tq_max_kv_splits_for_cuda_graph",
            "use_trtllm_attention",
            "mla_prefill_backend",
            "trtllm_ragged_backend",
            "indexer_tp_shard_min_rows",
            "minimax_m3_indexer_cp",
            "sparse_mla_force_mqa",
            "flex_attn_block_m",
            "flex_attn_block_n",
            "flex_attn_q_block_size",
            "flex_attn_kv_block_size",
        ),
        MEMORY: ("hisparse_config", "sparse_mla_prefill_workspace_factor"),
    },
)

MAMBA = FieldTable(
    "MambaConfig",
    "mamba_config",
    taken=("enable_stochastic_rounding",),
    left_out={ROUNDING: ("backend", "stochastic_rounding_philox_rounds", "ssu_algorithm")},
)

KERNEL = FieldTable(
    "KernelConfig",
    "kernel_config",
    taken=("moe_backend", "linear_backend", "linear_backend_per_quant", "monokernel"),
    left_out={
        ROUNDING: ("ir_op_priority", "sparse_indexer_topk_backend"),
        SPEED: (
            "enable_flashinfer_autotune",
            "enable_rocm_segmented_attn_autotune",
            "enable_cutedsl_warmup",
            "enable_jit_warmup",
        ),
    },
)
"""These fields decide KV because some kernels of quantised layers quantise their inputs too, and others do not."""

OF_ALL = (ENGINE, MODEL, MULTIMODAL, CACHE, LOAD, ATTENTION, MAMBA, KERNEL)
"""Tables whose values are in the keys of every request."""

TABLES = (*OF_ALL, PARALLEL, LORA, SPECULATIVE)

COMMON_TOO = {
    ENGINE: ("additional_config",),
    MODEL: ("quantization_config", "model_impl", "model_class_overrides"),
    LOAD: ("load_format", "model_loader_extra_config"),
    ATTENTION: ("disable_flashinfer_q_quantization", "use_prefill_query_quantization", "use_non_causal"),
    KERNEL: ("moe_backend", "linear_backend", "linear_backend_per_quant", "monokernel"),
}
"""Taken fields for which `keys.scheme: common` has no term of its own. It has terms for the other fields, refuses them,
or has no keys for what they concern (images, recurrent states)."""


def object_at(config: Any, path: str) -> Any:
    """The configuration object at a table's path; None if the engine has none."""
    for name in filter(None, path.split(".")):
        config = getattr(config, name, None)
    return config


def settings_of(config: Any) -> dict[str, dict[str, Any]]:
    """The taken fields of every object that the engine has, as plain values."""
    found = ((table, object_at(config, table.path)) for table in OF_ALL)
    return {table.config: table.values(owner) for table, owner in found if owner is not None}


def unusual_settings(config: Any) -> dict[str, Any]:
    """Fields of `COMMON_TOO` whose values are not vLLM's defaults, as plain values."""
    said: dict[str, Any] = {}
    for table, names in COMMON_TOO.items():
        owner = object_at(config, table.path)
        usual, values = dict(_defaults(owner)), table.values(owner)
        said |= {
            name: values[name]
            for name in names
            if name in usual and values[name] != table.value(name, usual[name])
        }
    return said


def _defaults(owner: Any) -> Iterator[tuple[str, Any]]:
    """Default values of a configuration object's fields."""
    if owner is None or not is_dataclass(owner):
        return
    for item in fields(owner):
        default: Any = item.default
        make: Any = item.default_factory
        if default is MISSING and make is not MISSING:
            default = make()
        # A pydantic field keeps its default, or the default's factory, in a separate object.
        elif hasattr(default, "get_default"):
            default = default.get_default(call_default_factory=True)
        if default is not MISSING:
            yield item.name, default


def markdown() -> str:
    """Every table, for the docs."""
    return "\n\n".join(table.markdown() for table in TABLES)
