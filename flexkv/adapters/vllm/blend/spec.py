"""Reads at the engine's start the facts and settings that the scheduler's side needs for blending."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flexkv.blend.base import Tokens
from flexkv.blend.segments import as_tokens
from flexkv.config import BlendConfig, FlexKVConfig
from flexkv.config.blending import Separator
from flexkv.errors import ConfigError
from flexkv.facts.blend_ask import MOST_SEGMENTS

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

PAGE_TOKENS = 16
"""Number of tokens in a page of a segment. It is small, so that a segment's last page wastes little memory."""


def most_pages(vllm_config: VllmConfig) -> int:
    """Returns how many pages a rank can hold for requests: as many as the longest prompt needs if it has the largest
    number of segments.
    """
    return -(-vllm_config.model_config.max_model_len // PAGE_TOKENS) + MOST_SEGMENTS


@dataclass(frozen=True, slots=True)
class BlendSpec:
    """The facts and settings that the scheduler's side needs for blending.

    Attributes:
        settings: the settings of blending.
        separators: the tokens of each configured separator.
        most_pages: how many pages a rank can hold for requests.
        deadline_s: how long a request waits for its segments, in seconds.
    """

    settings: BlendConfig
    separators: tuple[Tokens, ...]
    most_pages: int
    deadline_s: float

    @classmethod
    def of(cls, vllm_config: VllmConfig, config: FlexKVConfig) -> BlendSpec | None:
        """Reads the facts from vLLM's configuration. Returns None if blending is off.

        Raises:
            ConfigError: a separator's text cannot be encoded.
        """
        if not config.blend.enabled:
            return None
        return cls(
            config.blend,
            _tokens(config.blend.separators, vllm_config.model_config),
            most_pages(vllm_config),
            config.load.deadline_s,
        )


def _tokens(separators: Sequence[Separator], model: ModelConfig) -> tuple[Tokens, ...]:
    if not any(isinstance(each, str) for each in separators):
        return tuple(as_tokens(each) for each in separators if not isinstance(each, str))
    from vllm.tokenizers.registry import cached_tokenizer_from_config

    if model.skip_tokenizer_init:
        raise ConfigError(
            f"blend.separators {list(separators)}: the engine has no tokenizer (skip_tokenizer_init); give token ids"
        )
    tokenizer = cached_tokenizer_from_config(model)
    found = []
    for each in separators:
        ids = tokenizer.encode(each, add_special_tokens=False) if isinstance(each, str) else each
        if not len(ids):
            raise ConfigError(f"blend.separators: the tokenizer makes no token of {each!r}")
        found.append(as_tokens(ids))
    return tuple(found)
