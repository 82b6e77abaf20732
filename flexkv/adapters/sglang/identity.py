"""Whose pages a rank's cache holds: the namespace of its keys, and the name of its place on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.runtime_context import get_parallel

from flexkv.adapters.common.framed import framed
from flexkv.adapters.common.model_identity import plain_config
from flexkv.adapters.common.unit_disk import UnitOwner
from flexkv.adapters.common.weights import weights_identity
from flexkv.adapters.sglang.pools import PoolView
from flexkv.cache.keys import namespace_digest
from flexkv.config import FlexKVConfig


@dataclass(frozen=True, slots=True)
class Place:
    """One rank among all that hold KV. Every rank has a cache of its own.

    Attributes:
        ranks: of this data-parallel replica, each with a unit; they share a node's memory.
    """

    name: str
    ranks: int

    @classmethod
    def of_this_process(cls) -> Place:
        parallel = get_parallel()
        stage = f"pp{parallel.pp_rank}of{parallel.pp_size}"
        rank = f"tp{parallel.tp_rank}of{parallel.tp_size}"
        return cls(f"dp{parallel.dp_rank or 0}.{stage}.{rank}", parallel.tp_size * parallel.pp_size)


def owner_of(
    server_args: Any, pool: PoolView, place: Place, config: FlexKVConfig, kv_dtype: str
) -> UnitOwner:
    """Everything that must be equal before two blocks' KV may be exchanged, as a namespace.

    Raises:
        ConfigError: nothing identifies the weights.
    """
    model = ModelConfig.from_server_args(server_args)
    fields: Mapping[str, Any] = {
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
    digest = namespace_digest({name: framed(value) for name, value in fields.items()})
    return UnitOwner(str(model.model_path), digest, place.name)


def _weights_of(model: ModelConfig) -> str:
    """For a model of the hub the commit that was resolved at load, which a branch's name does not tell."""
    commit = getattr(model.hf_text_config, "_commit_hash", None) or getattr(
        getattr(model, "hf_config", None), "_commit_hash", None
    )
    return weights_identity(model.model_path, model.revision, commit)
