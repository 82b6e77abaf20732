"""The arguments that TensorRT-LLM passes to its connector: those that decide the KV of a block, and those that must not
change a key. `docs/identity.md` is made from this table.

The package is not installed where flexkv is built: these are the arguments of versions 1.1 to 1.3 as far as known. An
argument that is missing from the table is not in the key.
"""

from __future__ import annotations

from flexkv.adapters.common.identity_table import FieldTable, names
from flexkv.adapters.common.loader_settings import FORMAT_RULE, files_of_format

SCHEDULING = "which requests a step computes, and when"
MEMORY = "memory: how much there is, and where"
PROCESSES = "processes, ports and places"
API = "what a server shows and logs"
TOKENS = "decides tokens, which are in each key"
ROUNDING = "another order of the same sums: rounding, as another batch gives it"
REFUSED = "refused, or only as the runtime itself allows it with a connector"

LEFT_OUT = {
    TOKENS: "tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init reasoning_parser",
    SCHEDULING: """
        max_batch_size max_num_tokens scheduler_config enable_chunked_prefill batch_wait_timeout_ms
        batch_wait_timeout_iters batch_wait_max_tokens_ratio disable_overlap_scheduler stream_interval
    """,
    "how long requests may be": "max_input_len max_seq_len",
    ROUNDING: """
        attn_backend cuda_graph_config torch_compile_config allreduce_strategy moe_expert_parallel_size
        moe_tensor_parallel_size moe_cluster_parallel_size gpus_per_node
    """,
    MEMORY: "enable_sleep peft_cache_config garbage_collection_gen0_threshold",
    PROCESSES: "orchestrator_type mpi_session cache_transceiver_config ray_worker_extension_cls",
    API: """
        print_iter_log enable_iter_perf_stats iter_stats_max_iterations otlp_traces_endpoint
        perf_metrics_max_requests
    """,
    "what is sampled": "sampler_type guided_decoding_backend gather_generation_logits",
    "an adapter is in the request, and what it computed serves one run": "lora_config enable_lora",
    REFUSED: """
        pipeline_parallel_size context_parallel_size max_beam_width enable_attention_dp
        sparse_attention_config
    """,
    "flexkv itself": "kv_connector_config",
}
"""Arguments that must not change a key, by the reason."""

ARGUMENTS = FieldTable(
    "TorchLlmArgs",
    "",
    taken=("checkpoint_format", "nvfp4_gemm_config"),
    read={
        "load_format": (
            f"{FORMAT_RULE}; dummy: the weights are random, and keys serve one run",
            files_of_format,
        )
    },
    elsewhere={
        "model": "the weights: the hub's commit, samples of the files, or `identity.model`; the model's `config.json`; "
        "and the files that say how weights are quantised",
        "revision": "with `model`",
        "model_kwargs": "whole",
        "dtype": "by name",
        "quant_config": "whole",
        "speculative_config": "whole",
        "trust_remote_code": "where it is on, by the content of the Python files in the model's folder",
        "moe_config": "its `backend`: some quantise what goes into the experts",
        "kv_cache_config": "its `dtype`; the tokens per block are those of the pool",
        "tensor_parallel_size": "a page of another number of ranks has another format, which no key finds",
    },
    left_out={reason: names(text) for reason, text in LEFT_OUT.items()},
)
