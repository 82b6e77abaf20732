"""The model families whose keys can be rotated to other positions, and the properties in which they differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flexkv.blend.rope import Pairing, RopeSpec
from flexkv.errors import ConfigError


class NotBlendable(ConfigError):
    """Raised if a model's keys cannot be rotated to other positions. The message says why."""


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """The common properties of all models of one `model_type`.

    Attributes:
        name: the `model_type` of the family's configurations.
        pairing: which elements of a head are rotated together.
        normed_heads: whether each head's query and key are normalised before they are rotated.
        plain: options of the configuration that must be off or absent, because they change the steps of a layer.
    """

    name: str
    pairing: Pairing
    normed_heads: bool
    plain: tuple[str, ...] = ()


FAMILIES = {
    family.name: family
    for family in (
        ModelFamily("llama", "neox", normed_heads=False),
        ModelFamily("mistral", "neox", normed_heads=False),
        ModelFamily("qwen2", "neox", normed_heads=False),
        ModelFamily("qwen3", "neox", normed_heads=True),
        ModelFamily("glm", "gptj", normed_heads=False),
        ModelFamily("stablelm", "neox", normed_heads=False, plain=("use_parallel_residual", "qk_layernorm")),
    )
}
"""Families by the `model_type` of Hugging Face configurations."""


def family_of(config: Any) -> ModelFamily:
    """Returns the family of a model, given the model's configuration.

    Raises:
        NotBlendable: the family is not registered, or the model has a sliding window or an option that must be off.
    """
    name = config.model_type
    if name not in FAMILIES:
        raise NotBlendable(f"model type {name!r}: blending knows {', '.join(FAMILIES)}")
    kinds = set(getattr(config, "layer_types", None) or ())
    # A configuration of Mistral has no list of layer types, because its window applies to all layers.
    windowed = kinds - {"full_attention"} or (not kinds and getattr(config, "sliding_window", None))
    if windowed:
        raise NotBlendable(f"model type {name!r} with a sliding window: blending needs full attention")
    if other := [option for option in FAMILIES[name].plain if getattr(config, option, False)]:
        raise NotBlendable(f"model type {name!r} with {other[0]}: blending knows it without")
    return FAMILIES[name]


def head_dim_of(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def rope_of(config: Any) -> RopeSpec:
    """Returns the rotary embedding that a configuration describes.

    Raises:
        NotBlendable: the family is not supported, the scaling is unknown, or values are missing or not allowed.
    """
    family, head_dim = family_of(config), head_dim_of(config)
    given = dict(config.rope_parameters)
    scaling = given.get("rope_type", "default")
    positions = int(config.max_position_embeddings)
    try:
        return RopeSpec(
            head_dim=head_dim,
            rotary_dim=int(head_dim * given.get("partial_rotary_factor", 1.0)),
            theta=float(given["rope_theta"]),
            pairing=family.pairing,
            scaling=scaling,
            factor=float(given.get("factor") or 1.0),
            max_positions=positions,
            original_positions=int(given.get("original_max_position_embeddings") or positions),
            beta_fast=float(given.get("beta_fast") or 32.0),
            beta_slow=float(given.get("beta_slow") or 1.0),
            truncate=bool(given.get("truncate", True)),
            low_freq_factor=float(given.get("low_freq_factor") or 1.0),
            high_freq_factor=float(given.get("high_freq_factor") or 4.0),
        )
    except (ConfigError, KeyError) as error:
        raise NotBlendable(f"rope parameters {given}: {error}") from error
