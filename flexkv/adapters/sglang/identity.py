"""Identifies the owner of a rank's pages: makes the namespace of the rank's keys and the name of the rank's folder on
disk."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from sglang import __version__ as sglang_version
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_lora, get_parallel
from sglang.srt.server_args import ServerArgs

from flexkv.adapters.common.common_keys import (
    COMMON,
    SharedModel,
    common_namespace,
    draft_refusal,
    other_config_refusal,
)
from flexkv.adapters.common.framed import plain_namespace
from flexkv.adapters.common.identity_table import is_quantised
from flexkv.adapters.common.loader_settings import files_of_format
from flexkv.adapters.common.lora_names import content_before
from flexkv.adapters.common.model_files import code_files, file_digest, quantization_files
from flexkv.adapters.common.model_identity import plain_config
from flexkv.adapters.common.rank_pool import RankPool
from flexkv.adapters.common.weights import NO_COMMIT, resolved_commit, weights_content, weights_identity
from flexkv.adapters.sglang.engine_watch import put_hook
from flexkv.adapters.sglang.identity_fields import ARGUMENTS, ENVIRONMENT, NOT_OF_FILES, OTHER_WEIGHTS
from flexkv.adapters.sglang.node_units import units_on_node
from flexkv.config import FlexKVConfig
from flexkv.errors import ConfigError, GeometryError
from flexkv.facts.ranks import UnitOwner
from flexkv.observe import get_logger
from flexkv.unit.capacity import PromptLimit
from flexkv.weights.files import NAMED, WeightsContent, process_start_ns

logger = get_logger(__name__)

STAGE_LAYERS = "SGLANG_PP_LAYER_PARTITION"
"""Environment variable of SGLang with the number of layers of each pipeline stage, separated by commas."""


@dataclass(frozen=True, slots=True)
class Place:
    """The position of one rank among all ranks that hold KV. Every rank has its own cache.

    Attributes:
        name: the rank's numbers and the sizes of its groups, such as `dp0.pp0of1.tp1of2`. Everything after the first
            dot determines which layers and heads the rank's pages hold.
        units_on_node: number of caches that share this node's memory and disks: one per rank on the node, over all
            data-parallel replicas.
        is_whole: whether the rank's pages hold all heads and layers.
        rank: the tensor-parallel rank.
        is_alone: whether no other rank holds a part of the same pages. With data-parallel attention, this may be true
            even if there are several ranks.
    """

    name: str
    units_on_node: int
    is_whole: bool
    rank: int = 0
    is_alone: bool = True

    @classmethod
    def of_this_process(cls) -> Place:
        """The position of this process's rank.

        Raises:
            GeometryError: the engine has decode context parallelism.
        """
        parallel = get_parallel()
        if parallel.attn_dcp_size != 1:
            raise GeometryError(
                f"decode context parallelism of {parallel.attn_dcp_size}; flexkv works with 1, because SGLang's page "
                "numbers are then not those of this rank's pool"
            )
        stage = f"pp{parallel.pp_rank}of{parallel.pp_size}"
        if parallel.pp_size > 1 and (layers := os.environ.get(STAGE_LAYERS)):
            stage += f".from{sum(map(int, layers.split(',')[: parallel.pp_rank]))}"
        rank = f"tp{parallel.tp_rank}of{parallel.tp_size}"
        if parallel.attn_tp_size != parallel.tp_size:
            # With data-parallel attention, the rank with a given number holds different heads than without it.
            rank += f".attn{parallel.attn_tp_rank}of{parallel.attn_tp_size}"
        is_whole = parallel.tp_size == parallel.pp_size == 1
        is_alone = parallel.attn_tp_size == parallel.pp_size == parallel.attn_cp_size == 1
        name = f"dp{parallel.dp_rank or 0}.{stage}.{rank}"
        units = units_on_node(parallel.dp_size, parallel.tp_size, parallel.pp_size, parallel.nnodes)
        return cls(name, units, is_whole, parallel.tp_rank, is_alone)


def owner_of(
    server_args: Any, pool: RankPool, place: Place, config: FlexKVConfig, kv_dtype: str
) -> UnitOwner:
    """The owner of this rank's pages. Its namespace contains everything that must be equal before one engine may use
    KV of another engine. From this call on, requests with images or embeddings get separate extra keys
    (`name_inputs`).

    Raises:
        ConfigError: nothing identifies the weights of the model or of an adapter, the common key scheme cannot be used,
            or this version of SGLang has no hook for requests that enter a queue.
    """
    model = ModelConfig.from_server_args(server_args)
    put_hook("enter")
    content = _content_of(server_args, model, config)
    if config.keys.scheme == COMMON:
        shared = _shared_model(server_args, model, pool, place, config, kv_dtype)
        namespace = common_namespace(shared, config)
    else:
        namespace = plain_namespace(_fields(server_args, model, pool, place, config, kv_dtype))
    return UnitOwner(str(model.model_path), namespace, place.name, content)


def _fields(
    server_args: Any, model: ModelConfig, pool: RankPool, place: Place, config: FlexKVConfig, kv_dtype: str
) -> dict[str, Any]:
    apart = _apart(server_args, config) | _attention(server_args, kv_dtype)
    return apart | {
        "engine": "sglang",
        # A different version of SGLang may compute different KV for the same model.
        "version": sglang_version.partition("+")[0],
        "weights": config.identity.model or _weights_of(model),
        # Random weights are equal only if their seeds are equal.
        "random_weights": server_args.random_seed if str(server_args.load_format) == "dummy" else None,
        "architecture": _architecture(model),
        "files": _files(server_args, model, bool(config.identity.model)),
        "settings": ARGUMENTS.values(server_args),
        "model_dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "kv_dtype": kv_dtype,
        "layers": pool.layers,
        "page_tokens": pool.block_tokens,
        # Heads and layers are split over ranks: with a different split, a page of the same tokens has different bytes,
        # even if its format is the same.
        "place": place.name.partition(".")[2],
        # The algorithm enters the key because with EAGLE the engine hashes pairs of tokens.
        "speculative": str(server_args.speculative_algorithm),
        "hash": "sglang page hash, sha256",
        "namespace": config.identity.namespace,
    }


def _apart(server_args: Any, config: FlexKVConfig) -> dict[str, Any]:
    """Other facts on which the KV may depend, by kind: adapters, weights besides the model's, special kernels. Kinds
    that this engine does not use are left out."""
    found = {
        "adapters": _adapters(),
        "other_weights": _other_weights(server_args),
        "kernels": _kernels(server_args),
        "environment": _environment(),
        "unnamed_weights": "" if config.identity.model else _unnamed_weights(server_args),
    }
    return {kind: value for kind, value in found.items() if value}


def _architecture(model: ModelConfig) -> Any:
    """The model's configuration as SGLang uses it, with the user's overrides. For a model that takes images, the
    complete configuration; otherwise only the text model's."""
    whole = model.hf_config if model.is_multimodal else model.hf_text_config
    return plain_config(whole.to_dict())


def _files(server_args: Any, model: ModelConfig, named: bool) -> dict[str, Any]:
    """The content, by purpose, of those files beside the weights that determine KV; empty if there are none.

    Args:
        named: whether the user names the weights, so that the key does not contain their commit.
    """
    path, revision, found = str(model.model_path), resolved_commit(model) or model.revision, {}
    if model.quantization is not None:
        found["quantization"] = quantization_files(path, revision, named)
    if scales := server_args.quantization_param_path:
        found["scales"] = {"sha256": file_digest(str(scales))}
    if algorithm := server_args.dllm_algorithm_config:
        found["dllm algorithm"] = {"sha256": file_digest(str(algorithm))}
    if server_args.trust_remote_code:
        found["code"] = code_files(path, revision, named)
    return {name: content for name, content in found.items() if content}


def prompt_limit(server_args: Any) -> PromptLimit:
    """The longest prompt that the engine accepts."""
    return PromptLimit(int(ModelConfig.from_server_args(server_args).context_len), "context_length")


def _shared_model(
    server_args: Any, model: ModelConfig, pool: RankPool, place: Place, config: FlexKVConfig, kv_dtype: str
) -> SharedModel:
    """The description of the model for the common key scheme.

    Raises:
        ConfigError: this engine cannot use the common key scheme. The message says why.
    """
    if server_args.speculative_algorithm is not None:
        raise draft_refusal(str(server_args.speculative_algorithm))
    if server_args.decrypted_config_file:
        raise other_config_refusal("decrypted_config_file", str(server_args.decrypted_config_file))
    if model.is_multimodal:
        raise ConfigError(
            "keys.scheme=common: SGLang names an image among its tokens by a part of its digest, too little to share "
            "pages by; use keys.scheme=engine with models that take images"
        )
    apart: dict[str, Any] = {
        # A rank's pages hold only its own heads and layers.
        "part": None if place.is_whole else place.name.partition(".")[2],
        "adapters": None,
        "random_weights": server_args.random_seed if str(server_args.load_format) == "dummy" else None,
    } | _apart(server_args, config)
    if settings := _unusual(server_args):
        apart["settings"] = settings
    if files := _files(server_args, model, bool(config.identity.model)):
        apart["files"] = files
    return SharedModel(
        path=str(model.model_path),
        weights=config.identity.model or _weights_of(model),
        kv_dtype=kv_dtype.removeprefix("torch."),
        quantization=str(model.quantization),
        block_tokens=pool.block_tokens,
        overrides=json.loads(server_args.json_model_override_args or "{}"),
        config=model.hf_text_config.to_dict(),
        apart=apart if any(value is not None for value in apart.values()) else None,
    )


def _attention(server_args: Any, kv_dtype: str) -> dict[str, Any]:
    """The attention backends if the KV is quantised, because some backends then quantise the queries; else empty."""
    if not is_quantised(kv_dtype):
        return {}
    names = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
    return {"attention": {name: str(getattr(server_args, name)) for name in names}}


def _unusual(server_args: Any) -> dict[str, Any]:
    """The values of those arguments in `ARGUMENTS` that differ from SGLang's defaults, as plain values. The common key
    scheme has no equivalent of them. Random weights are left out, because their seed identifies them."""
    usual = {field.name: field.default for field in msgspec.structs.fields(ServerArgs)}
    return {
        name: value
        for name, value in ARGUMENTS.values(server_args).items()
        if name in usual and value not in (ARGUMENTS.value(name, usual[name]), "dummy")
    }


def _kernels(server_args: Any) -> str:
    """The engine's mode, if its kernels compute different bits from the usual kernels; empty if it uses the usual
    kernels. No other engine has such a mode.
    """
    if target := server_args.rl_on_policy_target:
        return f"sglang, as {target}"
    return "sglang, deterministic" if server_args.enable_deterministic_inference else ""


def _unnamed_weights(server_args: Any) -> str:
    """Random digits if the engine does not read its weights from the model's files, because then its weights may differ
    from the files' content. Empty if the engine reads the files."""
    if (
        files_of_format(server_args.load_format) not in NOT_OF_FILES
        and server_args.weight_cache_mode == "off"
    ):
        return ""
    logger.warning(
        "nothing identifies the weights (load_format=%s, weight_cache_mode=%s), so pages are found in this run alone; "
        "set identity.model to a name of the weights",
        server_args.load_format,
        server_args.weight_cache_mode,
    )
    return os.urandom(16).hex()


def _environment() -> dict[str, Any]:
    """The variables of `ENVIRONMENT` whose values differ from SGLang's defaults."""
    found = {name: getattr(envs, name) for name in ENVIRONMENT}
    return {name: plain_config(field.get()) for name, field in found.items() if field.get() != field.default}


def _weights_of(model: ModelConfig) -> str:
    return weights_identity(model.model_path, model.revision, resolved_commit(model))


def _content_of(server_args: Any, model: ModelConfig, config: FlexKVConfig) -> WeightsContent:
    """The weights that the namespace identifies only by samples of their content. A draft model's weights are not
    included, because its KV is in separate pools and in no page.
    """
    named = config.identity.model or str(server_args.load_format) == "dummy"
    content = NAMED if named else weights_content(model.model_path, model.revision, resolved_commit(model))
    for path in _other_paths(server_args).values():
        content = content.joined(weights_content(path, None, NO_COMMIT))
    return content


def _other_paths(server_args: Any) -> dict[str, str]:
    """The paths of weights besides the model's, by the name of the argument that gives each path."""
    said = {name: getattr(server_args, name, None) for name in OTHER_WEIGHTS}
    return {name: str(path) for name, path in said.items() if path}


def _other_weights(server_args: Any) -> dict[str, str]:
    """The `weights_identity` of each set of weights besides the model's, by the name of the argument that gives it.

    Raises:
        ConfigError: a path holds no weights of a known format.
    """
    paths = _other_paths(server_args)
    return {name: weights_identity(path, None, NO_COMMIT) for name, path in paths.items()}


def _adapters() -> dict[str, str]:
    """The name of the content of each adapter that the engine was started with, by the adapter's name and path.

    SGLang's page hashes identify such an adapter only by name and path, and a linker gets only hashes. So the content
    must enter the namespace. For an adapter that is loaded while the engine runs, SGLang puts a random number into the
    hashes of the adapter's pages, so no other run finds these pages.
    """
    return {
        f"{adapter.lora_name}={adapter.lora_path}": content_before(
            _adapter_folder(adapter.lora_path), process_start_ns()
        )
        for adapter in get_lora().lora_paths or ()
    }


def _adapter_folder(path: str) -> Path:
    """The folder with the adapter's files. If `path` is not a folder, SGLang has taken it for a hub name and has
    downloaded the adapter by now.

    Raises:
        ConfigError: the adapter is neither a folder nor in the hub's cache.
    """
    folder = Path(path)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, local_files_only=True))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"adapter {path} is no folder, and the hub's cache has no such adapter: {error}"
        ) from error
