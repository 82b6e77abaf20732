"""Reads the engine's arguments, and refuses those that flexkv cannot serve."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flexkv.adapters.common.identity_table import is_quantised
from flexkv.adapters.common.model_files import model_config
from flexkv.adapters.tensorrt_llm.identity_fields import ARGUMENTS
from flexkv.errors import ConfigError
from flexkv.layout.trtllm import TrtllmModel
from flexkv.observe import get_logger
from flexkv.unit.capacity import PromptLimit

logger = get_logger(__name__)

LATENT_TOKENS = 64
"""Tokens per block of an MLA pool. The engine's kernels require this number, so the engine ignores
`tokens_per_block`."""


@dataclass(frozen=True, slots=True)
class EngineArguments:
    """The engine's arguments, normalised. A value that is not given is 0, empty or None.

    Attributes:
        model: the model's folder or hub name.
        revision: the commit, branch or tag of a hub name; None if not given.
        ranks: tensor-parallel size, which is the number of ranks of the unit.
        tokens_per_block: tokens per block according to the arguments; an MLA pool ignores it (LATENT_TOKENS).
        layers: number of layers of the model, without those of a draft model; 0 if unknown.
        heads: number of heads of K and V on one rank; 0 for a latent, or if unknown.
        head_size: elements of one head, or of the latent; 0 if unknown.
        latent: whether the model is an MLA model, whose pool holds one latent per token and layer; None if unknown.
        draft: the speculative decoding configuration as text; empty if there is none. A draft model may have layers in
            the same pool.
        architecture: the content of the model's `config.json`; empty if there is none.
        quant_algo: name of the quantisation of the weights; "None" if they are not quantised.
        overrides: overrides of the model's configuration (`model_kwargs`).
        without_hooks: name of the argument that lets forward passes run without the hooks of their layers; empty if
            every forward pass calls the hooks.
        prompt_limit: the limit from `max_seq_len`; None if that argument is not given. The engine then chooses a limit
            that depends on the model and the memory.
        in_key: plain values of other arguments that determine KV, by their names in the key.
        attention: settings that limit to which tokens a token attends; empty if a token attends to all earlier tokens.
        random_weights: whether the weights are random, so that no file identifies them.
        remote_code: whether Python files in the model's folder are part of the model.
        draft_model: folder or hub name of the draft model; empty if there is none.
    """

    model: str
    revision: str | None
    ranks: int
    tokens_per_block: int
    layers: int
    heads: int
    head_size: int
    latent: bool | None
    draft: str
    architecture: Mapping[str, Any]
    quant_algo: str = "None"
    overrides: Mapping[str, Any] = field(default_factory=dict)
    without_hooks: str = ""
    prompt_limit: PromptLimit | None = None
    in_key: Mapping[str, Any] = field(default_factory=dict)
    attention: Mapping[str, Any] = field(default_factory=dict)
    random_weights: bool = False
    remote_code: bool = False
    draft_model: str = ""

    @classmethod
    def of(cls, llm_args: Any) -> EngineArguments:
        """Reads and checks the engine's arguments, a `TorchLlmArgs`.

        Raises:
            ConfigError: the engine is parallelised, or keeps KV, in a way that a page cannot represent. The message
                names the argument.
        """
        cache = getattr(llm_args, "kv_cache_config", None)
        _refuse(llm_args, cache)
        architecture = model_config(str(llm_args.model))  # if empty, shapes are not checked
        text = architecture.get("text_config", architecture)
        _refuse_model(text, bool(getattr(llm_args, "sparse_attention_config", None)))
        ranks = int(getattr(llm_args, "tensor_parallel_size", 1) or 1)
        layers = int(text.get("num_hidden_layers", 0))
        latent = "kv_lora_rank" in text if text else None
        heads, head_size = _heads(text, ranks)
        longest = getattr(llm_args, "max_seq_len", None)
        return cls(
            model=str(llm_args.model),
            revision=getattr(llm_args, "revision", None),
            ranks=ranks,
            tokens_per_block=int(getattr(cache, "tokens_per_block", 0) or 0),
            layers=layers,
            heads=heads if layers and not latent else 0,
            head_size=head_size,
            latent=latent,
            draft=str(getattr(llm_args, "speculative_config", None) or ""),
            architecture=architecture,
            quant_algo=str(getattr(getattr(llm_args, "quant_config", None), "quant_algo", None)),
            overrides=dict(getattr(llm_args, "model_kwargs", None) or {}),
            without_hooks=_without_hooks(llm_args),
            prompt_limit=PromptLimit(int(longest), "max_seq_len") if longest else None,
            in_key={
                "dtype": str(getattr(llm_args, "dtype", "auto")),
                "kv_dtype": str(getattr(cache, "dtype", "auto")),
                "quantization": str(getattr(llm_args, "quant_config", None)),
                "settings": ARGUMENTS.values(llm_args)
                | _experts(getattr(llm_args, "moe_config", None))
                | _backend(llm_args, cache),
            },
            attention=_attention(cache, longest),
            random_weights="dummy" in str(getattr(llm_args, "load_format", "")).lower(),
            remote_code=bool(getattr(llm_args, "trust_remote_code", False)),
            draft_model=_draft_model(getattr(llm_args, "speculative_config", None)),
        )

    def model_of(self, pool_layers: int, latent: bool) -> TrtllmModel:
        """The model's shape, against which the engine's pool is checked.

        Args:
            pool_layers: number of layers of the pool.
            latent: whether the pool holds latents instead of K and V.

        Raises:
            ConfigError: `latent` contradicts the model's configuration, or the pool has a different number of layers
                than the model (more are allowed if there is a draft).
        """
        if self.latent is not None and self.latent != latent:
            raise ConfigError(
                f"the pool keeps {'one latent' if latent else 'K and V'} a layer, the model's configuration says "
                f"{'a latent (kv_lora_rank)' if self.latent else 'K and V'}"
            )
        if self.layers and pool_layers != self.layers and not (self.draft and pool_layers > self.layers):
            raise ConfigError(
                f"the pool has {pool_layers} layers, the model {self.layers}: other pools hold the rest, and only "
                "one is handed over, so what was restored would be incomplete"
            )
        heads, tokens = (1, LATENT_TOKENS) if latent else (self.heads, self.tokens_per_block)
        return TrtllmModel(heads, self.head_size, tokens, latent)


def _draft_model(speculative: Any) -> str:
    """The draft model's folder or hub name. The name of the field that contains it differs between versions of the
    engine. Empty if there is no draft model, as in n-gram speculation.
    """
    names = ("speculative_model", "speculative_model_dir")
    return str(next((found for name in names if (found := getattr(speculative, name, None))), ""))


def _attention(cache: Any, longest: int | None) -> dict[str, Any]:
    """See `EngineArguments.attention`. The windows of all layers are equal, because `_refuse` refuses engines with
    different windows. A window of `longest` tokens (the maximum length of a request) limits nothing."""
    given = set(getattr(cache, "max_attention_window", None) or ())
    windows = sorted(window for window in given if not longest or window < longest)
    sinks = getattr(cache, "sink_token_length", None)
    return {name: value for name, value in (("windows", windows), ("sinks", sinks)) if value}


def _backend(llm_args: Any, cache: Any) -> dict[str, Any]:
    """The attention backend if the KV is quantised, because some backends then quantise the queries; else empty."""
    algorithm = getattr(getattr(llm_args, "quant_config", None), "kv_cache_quant_algo", None)
    if not is_quantised(getattr(cache, "dtype", None), algorithm):
        return {}
    return {"attn_backend": str(getattr(llm_args, "attn_backend", None))}


def _experts(moe: Any) -> dict[str, Any]:
    """The settings of experts that change KV: the backend, because some backends quantise the experts' inputs, and
    whether the experts' outputs are quantised before they are summed."""
    backend = getattr(moe, "backend", None)
    found: dict[str, Any] = {"moe_config.backend": None if backend is None else str(backend)}
    if getattr(moe, "use_low_precision_moe_combine", False):
        found["moe_config.use_low_precision_moe_combine"] = True
    return found


def _without_hooks(llm_args: Any) -> str:
    """See `EngineArguments.without_hooks`. If the engine has no argument `cuda_graph_config`, that name is returned,
    because the engine may replay CUDA graphs even without the argument."""
    if not hasattr(llm_args, "cuda_graph_config"):
        return "cuda_graph_config (not among the engine's arguments)"
    names = ("cuda_graph_config", "torch_compile_config", "speculative_config")
    return next((name for name in names if getattr(llm_args, name, None) is not None), "")


def _refuse(llm_args: Any, cache: Any) -> None:
    for name in ("pipeline_parallel_size", "context_parallel_size", "max_beam_width"):
        value = getattr(llm_args, name, 1) or 1
        if value != 1:
            raise ConfigError(f"TensorRT-LLM's {name} is {value}; with a KV cache connector it must be 1")
    if getattr(llm_args, "enable_attention_dp", False):
        raise ConfigError(
            "enable_attention_dp is on: its ranks hold blocks of different requests, and one scheduler on rank 0 "
            "plans for all; set it to false"
        )
    if getattr(cache, "host_cache_size", 0):
        raise ConfigError(
            f"kv_cache_config.host_cache_size is {cache.host_cache_size}: the engine's own host cache moves blocks "
            "under the connector; set it to 0, flexkv keeps them in host memory (host.bytes)"
        )
    dtype = str(getattr(cache, "dtype", "auto")).lower()
    if "fp4" in dtype:
        raise ConfigError(
            f"kv_cache_config.dtype is {dtype}: its block scales lie in a pool that is not handed over, so KV would "
            "lose them; use fp8 or auto"
        )
    windows = getattr(cache, "max_attention_window", None) or ()
    if len(set(windows)) > 1:
        raise ConfigError(
            f"kv_cache_config.max_attention_window is {list(windows)}: each window has a pool of its own and only "
            "one is handed over"
        )
    if getattr(cache, "enable_partial_reuse", False):
        logger.warning(
            "kv_cache_config.enable_partial_reuse is on: a request of which the engine has a part of a block is not "
            "looked up, because pages are loaded whole; set it to false"
        )


def _refuse_model(text: Mapping[str, Any], sparse: bool) -> None:
    if sparse or "index_topk" in text:
        raise ConfigError(
            "the model's sparse attention keeps indexer keys in pools that are not handed over; restored blocks "
            "would lack them"
        )
    for name in ("layers_block_type", "hybrid_override_pattern", "ssm_state_size", "mamba_d_state"):
        if text.get(name):
            raise ConfigError(f"the model has recurrent layers ({name}); their state is not handed over")
    heads = text.get("num_key_value_heads")
    if isinstance(heads, list) and len(set(heads)) > 1:
        raise ConfigError(
            f"layers have {sorted(set(heads))} KV heads: each count has a pool of its own and only one is handed over"
        )


def _heads(text: Mapping[str, Any], ranks: int) -> tuple[int, int]:
    """Number of KV heads on one rank, and elements of one head; for MLA, 1 and the elements of the latent. Zeros if
    unknown."""
    if "kv_lora_rank" in text:
        return 1, int(text["kv_lora_rank"]) + int(text.get("qk_rope_head_dim", 0))
    queries = int(text.get("num_attention_heads", 0))
    if not queries:
        return 0, 0
    heads = text.get("num_key_value_heads", queries)
    heads = int(heads[0] if isinstance(heads, list) else heads)
    size = text.get("head_dim") or int(text["hidden_size"]) // queries
    # With more ranks than heads, each rank holds a copy of one head.
    return max(1, heads // ranks), int(size)
