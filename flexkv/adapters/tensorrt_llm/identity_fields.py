"""The arguments of TensorRT-LLM that determine the KV of a block, and therefore enter the block's key.

TensorRT-LLM is not installed where flexkv is built, so no test compares the table with the package. The table has the
arguments of versions 1.1 to 1.3 as far as they are known. An argument that is missing from the table is not in the key.
"""

from __future__ import annotations

from flexkv.adapters.common.identity_table import FieldTable
from flexkv.adapters.common.loader_settings import FORMAT_RULE, files_of_format

ARGUMENTS = FieldTable(
    "TorchLlmArgs",
    "",
    taken=("checkpoint_format", "nvfp4_gemm_config"),
    read={
        "load_format": (
            f"{FORMAT_RULE}. With dummy the weights are random, and keys are valid only in one run",
            files_of_format,
        )
    },
    elsewhere={
        "model": "by the weights (the hub's commit, samples of the files, or `identity.model`), the model's "
        "`config.json`, and the files that say how weights are quantised",
        "revision": "as a part of `model`",
        "model_kwargs": "all of it",
        "dtype": "its name",
        "quant_config": "all of it",
        "speculative_config": "all of it",
        "trust_remote_code": "if it is on, by the content of the Python files in the model's folder",
        "moe_config": "its `backend`, because some backends quantise the inputs of the experts, and "
        "`use_low_precision_moe_combine`, if it is on",
        "attn_backend": "its value, if the KV is quantised, because some backends then quantise the queries",
        "kv_cache_config": "its `dtype`, `max_attention_window` (if below `max_seq_len`) and `sink_token_length`, and "
        "the tokens per block of the pool",
        "tensor_parallel_size": "not in the key: pages of another number of ranks have another format, so that they "
        "are never found",
    },
)
