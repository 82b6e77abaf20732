"""Lists the fields of vLLM's configuration, and the environment variables, that determine the KV of a block and are
therefore part of its key."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from vllm import envs

from flexkv.adapters.common.identity_table import FieldTable
from flexkv.adapters.common.loader_settings import EXTRA_RULE, FORMAT_RULE, files_of_format, loader_settings
from flexkv.adapters.common.model_identity import plain_config

ENGINE = FieldTable(
    "VllmConfig",
    "",
    taken=("additional_config",),
    elsewhere={
        "weight_transfer_config": "if it is set and the weights are random (`load_format` dummy), keys are valid only "
        "in one run, because the engine receives its weights. Else not at all: later weights need a reset anyway"
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
        "model": "by the weights (the hub's commit, samples of the files, or `identity.model`) and the files that say "
        "how they are quantised",
        "revision": "as a part of `model`",
        "seed": "its value, if the weights are random (`load_format` dummy)",
        "hf_config": "all of it, if the model takes images or other inputs",
        "hf_text_config": "all of it",
        "hf_config_path": "by the configuration that is read from it and, with `trust_remote_code`, by its Python "
        "files. A commit of its repository does not identify the weights",
        "hf_overrides": "by the resulting configuration of the model, and the content of a `quantization_config_file`",
        "trust_remote_code": "if it is on, by the content of the Python files in the model's folder",
        "max_model_len": "if the model has LongRoPE, by the factors that it selects; if it has dynamic RoPE, its "
        "value; if it is a Llama 4, by whether vLLM scales queries by their position",
        "generation_config": "if the model is a Llama 4 and this file says whether to scale queries by their position",
        "override_generation_config": "in the same way as `generation_config`",
        "multimodal_config": "it has a table of its own, and the processor's files enter, except the chat template",
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
        "mm_encoder_fp8_scale_path": "by the file's content. Without a file, fp8 attention takes its scales from the "
        "inputs of the run, so pages of inputs are valid only in that run",
        "mm_processor_cache_gb": "if it is 0 and prefix caching is off, inputs have numbers for names, and their pages "
        "are valid only in one run",
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
        "block_size": "by the tokens per block of the pool",
        "mamba_block_size": "by the tokens per block of the group",
        "enable_prefix_caching": "together with `mm_processor_cache_gb`",
    },
)

LORA = FieldTable(
    "LoRAConfig", "lora_config", taken=("lora_dtype", "target_modules", "enable_tower_connector_lora")
)
"""Fields whose values are only in the keys of requests with an adapter."""

SPECULATIVE = FieldTable(
    "SpeculativeConfig",
    "speculative_config",
    taken=("method", "quantization", "kv_cache_dtype", "parallel_drafting"),
    elsewhere={
        "model": "by the draft model's weights; its value, if drafts do not come from a model",
        "revision": "as a part of the draft model's weights",
        "draft_model_config": "by its weights, its configuration, and the fields of ModelConfig that enter unchanged",
        "draft_load_config": "in the same way as LoadConfig; if the draft's weights are random, with the seed",
        "code_revision": "by the draft model's `code_revision`",
    },
)

PARALLEL = FieldTable(
    "ParallelConfig",
    "parallel_config",
    elsewhere={
        "tensor_parallel_size": "not in the key: pages of another number of ranks have another format, so that they "
        "are never found"
    },
)

LOAD = FieldTable(
    "LoadConfig",
    "load_config",
    taken=("ignore_patterns",),
    read={
        "load_format": (
            f"{FORMAT_RULE}. With dummy the weights are random, and the seed is in the key. With auto, the key says "
            "if the model's folder has Mistral's files (`consolidated*.safetensors`): vLLM then reads only these. With "
            "ipc_cache and modelexpress the weights are those of another process, so flexkv refuses them without "
            "`identity.model`. With tensorizer they are not in the model's folder: without `identity.model`, pages "
            "stay in host memory",
            files_of_format,
        ),
        "model_loader_extra_config": (EXTRA_RULE, loader_settings),
    },
)

BACKENDS = ("backend", "backend_per_kind", "mla_prefill_backend", "use_trtllm_attention")
"""Fields that select attention backends."""

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
    elsewhere=dict.fromkeys(
        BACKENDS, "its value, if the KV is quantised, because some backends then quantise the queries"
    ),
)

MAMBA = FieldTable(
    "MambaConfig",
    "mamba_config",
    taken=("enable_stochastic_rounding",),
)

KERNEL = FieldTable(
    "KernelConfig",
    "kernel_config",
    taken=("moe_backend", "linear_backend", "linear_backend_per_quant", "monokernel"),
)
"""Fields that select kernels. They change KV because some kernels of quantised layers also quantise their inputs."""

ENVIRONMENT: dict[str, Any] = {
    "VLLM_B12X_MOE_FP4_FORCE_A16": False,
    "VLLM_CPU_INT4_W4A8": True,
    "VLLM_DISABLED_KERNELS": [],
    "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE": False,
    "VLLM_FLOAT32_MATMUL_PRECISION": "highest",
    "VLLM_HUMMING_INPUT_QUANT_CONFIG": None,
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG": None,
    "VLLM_HUMMING_USE_F16_ACCUM": False,
    "VLLM_MARLIN_INPUT_DTYPE": None,
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY": "",
    "VLLM_MOE_USE_DEEP_GEMM": True,
    "VLLM_USE_DEEP_GEMM": True,
    "VLLM_USE_DEEP_GEMM_E8M0": True,
}
"""Environment variables that change KV, each with vLLM's default: they quantise weights or the inputs of layers, reduce
their precision, select kernels that do so, or replace the routing to experts. A variable is in the key if its value
differs from the default."""

OF_ALL = (ENGINE, MODEL, MULTIMODAL, CACHE, LOAD, ATTENTION, MAMBA, KERNEL)
"""The tables whose values are in the keys of every request."""

TABLES = (*OF_ALL, PARALLEL, LORA, SPECULATIVE)

COMMON_TOO = {
    ENGINE: ("additional_config",),
    MODEL: ("quantization_config", "model_impl", "model_class_overrides"),
    LOAD: ("load_format", "model_loader_extra_config"),
    ATTENTION: ("disable_flashinfer_q_quantization", "use_prefill_query_quantization", "use_non_causal"),
    KERNEL: ("moe_backend", "linear_backend", "linear_backend_per_quant", "monokernel"),
}
"""The fields in keys for which `keys.scheme: common` has no equivalent. For each other field, the common scheme either
has a field of its own, or refuses the field's values, or makes no keys for the pages that the field concerns (those
with images or recurrent states)."""


def object_at(config: Any, path: str) -> Any:
    """Returns the configuration object at a table's path; None if the engine has none."""
    for name in filter(None, path.split(".")):
        config = getattr(config, name, None)
    return config


def settings_of(config: Any) -> dict[str, dict[str, Any]]:
    """Returns, by configuration class, the fields that are in the keys of every request, as plain values."""
    found = ((table, object_at(config, table.path)) for table in OF_ALL)
    return {table.config: table.values(owner) for table, owner in found if owner is not None}


def unusual_settings(config: Any) -> dict[str, Any]:
    """Returns the fields of `COMMON_TOO` whose values differ from vLLM's defaults, as plain values."""
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


def environment() -> dict[str, Any]:
    """Returns the variables of `ENVIRONMENT` whose values differ from vLLM's defaults, as plain values."""
    values = {name: getattr(envs, name, usual) for name, usual in ENVIRONMENT.items()}
    return {name: plain_config(value) for name, value in values.items() if value != ENVIRONMENT[name]}


def _defaults(owner: Any) -> Iterator[tuple[str, Any]]:
    """Yields the name and default value of each field of a configuration object that has a default."""
    if owner is None or not is_dataclass(owner):
        return
    for item in fields(owner):
        default: Any = item.default
        make: Any = item.default_factory
        if default is MISSING and make is not MISSING:
            default = make()
        # With pydantic, `default` is an object that contains the default value or its factory.
        elif hasattr(default, "get_default"):
            default = default.get_default(call_default_factory=True)
        if default is not MISSING:
            yield item.name, default


def markdown() -> str:
    """Returns all tables in Markdown, for the docs."""
    rows = [f"| `{name}` | if it is not {_shown(usual)} |" for name, usual in ENVIRONMENT.items()]
    variables = [
        "### Variables of the environment",
        "",
        "| variable | when it enters the key |",
        "|---|---|",
        *rows,
    ]
    return "\n\n".join([*(table.markdown() for table in TABLES), "\n".join(variables)])


def _shown(usual: Any) -> str:
    return f"`{int(usual) if isinstance(usual, bool) else usual}`" if usual not in (None, "", []) else "empty"
