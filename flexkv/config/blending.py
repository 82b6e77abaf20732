"""The settings of blending inside vLLM, and the types of values that only these settings have."""

from __future__ import annotations

import json
from typing import Annotated

from pydantic import BeforeValidator, Field

from flexkv.config.sections import GIB, Section
from flexkv.config.values import (
    Count,
    OptionalCount,
    OptionalSizeBytes,
    Share,
    SizeBytes,
    none_is_a_word,
    plain_text,
)

MAX_TOKEN = 2**32 - 1

Separator = str | tuple[int, ...]
"""A separator between segments: a text, which the model's tokenizer encodes without special tokens, or token ids."""


def separators_of(value: object) -> object:
    """Converts one text, or a list of texts and lists of token ids, to a tuple of separators. An environment variable
    may have the list as JSON."""
    if none_is_a_word(value) is None:
        return ()
    if isinstance(value, str) and value:
        value = _json_list(value) or [value]
    if not isinstance(value, (list, tuple)):
        raise ValueError("expected a text, or a list of texts and of lists of token ids")
    return tuple(_separator(each) for each in value)


def _json_list(text: str) -> list[object] | None:
    try:
        read = json.loads(text) if text.lstrip().startswith("[") else None
    except (ValueError, RecursionError):  # not JSON, or nested too deeply
        return None
    return read if isinstance(read, list) else None


def _separator(value: object) -> Separator:
    if isinstance(value, str) and value:
        plain_text(value)
        return value
    ids = tuple(value) if isinstance(value, (list, tuple)) else ()
    if ids and all(type(each) is int and 0 <= each <= MAX_TOKEN for each in ids):
        return ids
    raise ValueError(f"expected texts and lists of token ids from 0 to {MAX_TOKEN}, none of them empty")


Separators = Annotated[tuple[Separator, ...], BeforeValidator(separators_of)]


class BlendConfig(Section):
    """Settings of blending inside vLLM, which reuses the KV of pieces of text at other positions."""

    enabled: bool = Field(
        False,
        description="Blend requests that ask for it ([blending.md](blending.md)). Needs one of flexkv's model classes "
        "(`--hf-overrides`). Off by default, because blended answers are not exact.",
    )
    separators: Separators = Field(
        (),
        description="Separators between the segments of a prompt, for requests that do not list their segments: a "
        "text, or a list of texts and of lists of token ids. A text is encoded without special tokens. Ids are more "
        "reliable, because a tokenizer may join a text with its neighbours.",
    )
    ratio: Share = Field(
        0.15,
        description="Share of the reused rows that is recomputed after the check layer. 0.15 is the value that "
        "CacheBlend's authors use. A request may give its own, including 0.",
    )
    min_tokens: Count = Field(
        256,
        description="A request whose segments have fewer tokens in all is computed fully, because a short prompt "
        "gains little.",
    )
    check_layer: Count = Field(
        1,
        description="The layer whose fresh keys are compared with the cached ones. This layer and those before it "
        "compute every row. The keys of layer 0 do not depend on the text before, so 1 is the earliest.",
    )
    run_tokens: OptionalCount = Field(
        None,
        description="Reused rows are recomputed in runs of this many neighbouring rows. The runs whose keys differ "
        "most on average are chosen. An attention kernel reads all earlier keys once per run. Unset: 16 for an engine "
        "on a GPU, 1 on a CPU, where a single row costs no more.",
    )
    bytes: SizeBytes = Field(
        GIB,
        description="Host memory of each rank for cached segments. The least recently used segments are evicted "
        "first. Segments in flight take further memory, for as many tokens as the longest prompt has.",
    )
    disk_bytes: OptionalSizeBytes = Field(
        None,
        description="Number of bytes that each rank fills with segments in each of `disk.folders`, beside the blocks "
        "of prefixes. `disk.mode` says when. Unset: segments are only in host memory and are lost when the engine "
        "ends.",
    )
