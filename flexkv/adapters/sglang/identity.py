"""Whose pages a rank's cache holds: the namespace of its keys, and the name of its place on disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.runtime_context import get_lora, get_parallel

from flexkv.adapters.common.adapter_names import content_before, process_start_ns
from flexkv.adapters.common.framed import framed
from flexkv.adapters.common.model_identity import plain_config
from flexkv.adapters.common.unit_disk import UnitOwner
from flexkv.adapters.common.weights import weights_identity
from flexkv.adapters.sglang.node_units import units_on_node
from flexkv.adapters.sglang.pools import PoolView
from flexkv.cache.keys import namespace_digest
from flexkv.config import FlexKVConfig
from flexkv.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Place:
    """One rank among all that hold KV. Every rank has a cache of its own.

    Attributes:
        units_on_node: caches that share this node's memory and disks: one a rank of every data-parallel replica.
    """

    name: str
    units_on_node: int

    @classmethod
    def of_this_process(cls) -> Place:
        parallel = get_parallel()
        stage = f"pp{parallel.pp_rank}of{parallel.pp_size}"
        rank = f"tp{parallel.tp_rank}of{parallel.tp_size}"
        return cls(f"dp{parallel.dp_rank or 0}.{stage}.{rank}", units_on_node(parallel))


def owner_of(
    server_args: Any, pool: PoolView, place: Place, config: FlexKVConfig, kv_dtype: str
) -> UnitOwner:
    """Everything that must be equal before two blocks' KV may be exchanged, as a namespace.

    Raises:
        ConfigError: nothing identifies the weights, or those of an adapter.
    """
    model = ModelConfig.from_server_args(server_args)
    fields: dict[str, Any] = {
        "engine": "sglang",
        "weights": config.identity.model or _weights_of(model),
        # Random weights are the same only for the same seed.
        "random_weights": server_args.random_seed if str(server_args.load_format) == "dummy" else None,
        "architecture": plain_config(model.hf_text_config.to_dict()),
        "model_dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "kv_dtype": kv_dtype,
        "layers": pool.layers,
        "page_tokens": pool.page_size,
        # Heads and layers are split over ranks: another split has other bytes under the same keys.
        "place": place.name.partition(".")[2],
        # With EAGLE the engine hashes pairs of tokens.
        "speculative": str(server_args.speculative_algorithm),
        "hash": "sglang page hash, sha256",
        "namespace": config.identity.namespace,
    }
    if adapters := _adapters():
        fields["adapters"] = adapters
    digest = namespace_digest({name: framed(value) for name, value in fields.items()})
    return UnitOwner(str(model.model_path), digest, place.name)


def _weights_of(model: ModelConfig) -> str:
    """For a model of the hub the commit that was resolved at load, which a branch's name does not tell."""
    commit = getattr(model.hf_text_config, "_commit_hash", None) or getattr(
        getattr(model, "hf_config", None), "_commit_hash", None
    )
    return weights_identity(model.model_path, model.revision, commit)


def _adapters() -> dict[str, str]:
    """Of each adapter that the engine was started with, by name and path, its content.

    A page's hash names such an adapter by name and path alone, and a linker sees nothing but hashes. One that is loaded
    while the engine runs has a random number in its pages' hashes, so that no other run finds them.
    """
    return {
        f"{adapter.lora_name}={adapter.lora_path}": content_before(
            _adapter_folder(adapter.lora_path), process_start_ns()
        )
        for adapter in get_lora().lora_paths or ()
    }


def _adapter_folder(path: str) -> Path:
    """Where the adapter's files lie: SGLang takes what is no folder for a hub name, and has downloaded it by now."""
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
