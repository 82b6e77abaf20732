"""The arguments of SGLang that determine the KV of a page, and therefore enter the page's key."""

from __future__ import annotations

from flexkv.adapters.common.identity_table import FieldTable, names
from flexkv.adapters.common.loader_settings import EXTRA_RULE, FORMAT_RULE, files_of_format, loader_settings

OTHER_WEIGHTS = ("kt_weight_path", "modelopt_checkpoint_restore_path", "uno_lora_path")
"""Arguments that give weights besides the model's. `uno_lora_path`, a draft's LoRA, is one of them, because the KV of
such a draft is in the model's own pages."""

NOT_OF_FILES = ("ipc_cache", "presharded", "private", "rdma", "remote", "remote_instance")
"""Values of `load_format` with which the weights come from another process, from code that is not part of SGLang, or
from an earlier run's copy that may be older than the model's files."""

ENVIRONMENT = (
    "FLASHINFER_NVFP4_4OVER6",
    "FLASHINFER_NVFP4_4OVER6_E4M3_USE_256",
    "SGLANG_CPU_QUANTIZATION",
    "SGLANG_DEEPEP_BF16_DISPATCH",
    "SGLANG_ENABLE_DP_GATHER_FP8",
    "SGLANG_ENABLE_JIT_DEEPGEMM",
    "SGLANG_EXTERNAL_MODEL_PACKAGE",
    "SGLANG_FLASHINFER_CUTEDSL_NVFP4_W4A16",
    "SGLANG_FLASHINFER_MEGAMOE_COMBINE_DTYPE",
    "SGLANG_FLASHINFER_NVFP4_PER_TOKEN_ACTIVATION",
    "SGLANG_FORCE_FP8_MARLIN",
    "SGLANG_FORCE_MXFP8_BLOCK_CONVERT_DENSE",
    "SGLANG_FP4_IGNORED_LAYERS",
    "SGLANG_FP8_IGNORED_LAYERS",
    "SGLANG_HUMMING_INPUT_QUANT_CONFIG",
    "SGLANG_HUMMING_ONLINE_QUANT_CONFIG",
    "SGLANG_HUMMING_USE_F16_ACCUM",
    "SGLANG_INT4_WEIGHT",
    "SGLANG_MOE_NVFP4_DISPATCH",
    "SGLANG_MORI_COMBINE_DTYPE",
    "SGLANG_MORI_DISPATCH_DTYPE",
    "SGLANG_NIXL_EP_BF16_DISPATCH",
    "SGLANG_NPU_ARCH35_REQUANT_BLOCK_FP8",
    "SGLANG_NVFP4_CKPT_FP8_GEMM_IN_ATTN",
    "SGLANG_OPT_HOPPER_BLOCK_FP8_BF16",
    "SGLANG_QUANT_ALLOW_DOWNCASTING",
    "SGLANG_ROPE_CACHE_FP32",
    "SGLANG_SIMULATE_ROUND_ROBIN_EXPERTS",
    "SGLANG_SIMULATE_UNIFORM_EXPERTS",
    "SGLANG_SKIP_SOFTMAX_DECODE_THRESHOLD_SCALE_FACTOR",
    "SGLANG_SKIP_SOFTMAX_PREFILL_THRESHOLD_SCALE_FACTOR",
    "SGLANG_TRITON_FP8_PREFILL_ATTN",
    "SGLANG_USE_AITER_FP8_PER_TOKEN",
    "SGLANG_USE_DEEPGEMM_BMM",
)
"""Environment variables that change KV: they quantise weights or the inputs of layers, reduce their precision, select
kernels that do so, skip parts of the attention, or replace the model's code or the routing to experts. A variable is in
the key if its value differs from SGLang's default."""

ARGUMENTS = FieldTable(
    "ServerArgs",
    "",
    taken=names(
        """
        model_impl model_config_parser modelopt_quant
        quantize_and_serve rl_quant_profile custom_weight_loader
        kt_method kt_num_gpu_experts kt_max_deferred_experts_per_token
        moe_runner_backend fp8_gemm_runner_backend fp4_gemm_runner_backend
        flashinfer_mxfp4_moe_precision enable_w4a4_mxfp4_megamoe deepep_dispatcher_output_dtype
        flashinfer_a2a_dispatch_type enable_tf32_matmul
        enable_quant_communications qsa_indexer_dtype enable_deepseek_v4_fp4_indexer
        prefill_kv_cache_dequant_dtype dllm_algorithm dllm_fdfo
        lora_target_modules experts_shared_outer_loras forward_hooks dcp_size enable_kv_cache_sharding
        enable_dsa_cache_layer_split speculative_algorithm
        """
    ),
    read={
        "load_format": (
            f"{FORMAT_RULE}. With dummy the weights are random, and the seed is in the key. With "
            f"{', '.join(NOT_OF_FILES)} nothing identifies the weights: without `identity.model`, keys are valid only "
            "in one run",
            files_of_format,
        ),
        "model_loader_extra_config": (EXTRA_RULE, loader_settings),
        "ep_dispatch_algorithm": (
            "whether it is `fake`, with which the routing to experts is random",
            lambda algorithm: algorithm == "fake",
        ),
    },
    elsewhere={
        "model_path": "by the weights (the hub's commit, samples of the files, or `identity.model`) and "
        "the files that say how weights are quantised",
        "revision": "as a part of `model_path`",
        "weight_cache_mode": "if it is not off, keys are valid only in one run, unless `identity.model` is set",
        "random_seed": "its value, if the weights are random (`load_format` dummy)",
        "dtype": "the value to which SGLang resolves it",
        "kv_cache_dtype": "the dtype of the pool; for an fp8 pool of HiCache, its value too",
        "quantization": "the value to which SGLang resolves it",
        "quantization_param_path": "by the file's content",
        "dllm_algorithm_config": "by the file's content",
        "kt_weight_path": "by the content of the weights at this path, even with `identity.model`",
        "modelopt_checkpoint_restore_path": "in the same way as `kt_weight_path`",
        "uno_lora_path": "in the same way as `kt_weight_path`",
        "json_model_override_args": "by the resulting configuration of the model",
        "decrypted_config_file": "by the configuration that is read from it",
        "enable_multimodal": "it decides whether the model takes images and all of its configuration is in the key",
        "language_model_only": "in the same way as `enable_multimodal`",
        "trust_remote_code": "if it is on, by the content of the Python files in the model's folder",
        "page_size": "by the tokens per page of the pool",
        "tp_size": "by the rank's position, because ranks have different heads",
        "pp_size": "by the rank's position, because ranks have different layers, and by "
        "`SGLANG_PP_LAYER_PARTITION`",
        "attn_dp_size": "by the rank's position among the ranks that split the heads of the attention",
        "enable_dp_attention": "in the same way as `attn_dp_size`",
        "attention_backend": "its value, if the KV is quantised, because some backends then quantise the queries",
        "prefill_attention_backend": "in the same way as `attention_backend`",
        "decode_attention_backend": "in the same way as `attention_backend`",
        "lora_paths": "by the content of the adapters",
        "enable_deterministic_inference": "as a mode, because its kernels compute different bits",
        "rl_on_policy_target": "as a mode, because its kernels compute different bits",
    },
)


def markdown() -> str:
    """Returns the table of the arguments and the list of environment variables in Markdown, for the docs."""
    variables = "\n".join(f"- `{name}`" for name in ENVIRONMENT)
    return (
        f"{ARGUMENTS.markdown()}\n\n### Environment variables of SGLang\n\n"
        f"Each of these is in the key if its value differs from SGLang's default:\n\n{variables}"
    )
