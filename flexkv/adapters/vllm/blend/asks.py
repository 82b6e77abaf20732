"""Decides which requests may be blended, and divides their prompts into segments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from flexkv.adapters.vllm.blend import SALT
from flexkv.blend.base import Tokens
from flexkv.blend.segments import split_at_separators
from flexkv.facts.blend_ask import MOST_SEGMENTS, BlendAsk
from flexkv.observe import BlendResult

if TYPE_CHECKING:
    from vllm.v1.request import Request

Span = tuple[int, int]
"""The positions [first, end) of a segment in its prompt."""


def is_salted(request: Request) -> bool:
    """Whether the request's salt marks it as blended (see `SALT`), so that it shares no blocks with ordinary
    requests."""
    return bool(request.cache_salt) and str(request.cache_salt).startswith(SALT)


def refusal(request: Request) -> BlendResult | None:
    """Returns why the request cannot be blended, whatever its segments are; None if it can be blended."""
    sampling = request.sampling_params
    if sampling is None:
        return BlendResult.POOLING
    if request.has_encoder_inputs or request.prompt_embeds is not None or request.prompt_token_ids is None:
        return BlendResult.INPUTS
    if request.lora_request is not None:
        return BlendResult.LORA
    # A request for the logprobs of its prompt is refused, because a token that not all layers compute has no logprobs.
    # In vLLM 0.33, a request can also ask for the logprobs of given tokens at each position.
    if (
        sampling.prompt_logprobs is not None
        or getattr(sampling, "prompt_logprob_token_ids", None) is not None
    ):
        return BlendResult.PROMPT_LOGPROBS
    if request.resumable:
        return BlendResult.SESSION
    return None if is_salted(request) else BlendResult.SALT


def spans_of(
    ask: BlendAsk, prompt: Tokens, separators: Sequence[Tokens], min_tokens: int
) -> list[Span] | BlendResult:
    """Returns the segments that a prompt may reuse, ascending, or the reason why there are none.

    Args:
        separators: the separators at which the prompt is divided if the request does not give its segments.
        min_tokens: number of tokens that all segments together must have.
    """
    if ask.segments is not None:
        spans = sorted(ask.segments)
        ends = [0, *(end for _, end in spans)]
        if any(
            not before <= first < end <= len(prompt)
            for before, (first, end) in zip(ends, spans, strict=False)
        ):
            return BlendResult.SEGMENTS
    else:
        spans = _between(prompt, separators)
    if not spans:
        return BlendResult.NO_SEGMENTS
    if sum(end - first for first, end in spans) < min_tokens:
        return BlendResult.SHORT
    return spans


def _between(prompt: Tokens, separators: Sequence[Tokens]) -> list[Span]:
    """Returns the pieces of the prompt between separators, at most the `MOST_SEGMENTS` longest; none if the prompt has
    no separator."""
    pieces, is_cut = [(0, len(prompt))], False
    for separator in separators:
        cut = []
        for first, end in pieces:
            at = first
            for segment in split_at_separators(prompt[first:end], separator):
                is_cut |= not segment.reusable
                cut += [(at, at + len(segment))] * segment.reusable
                at += len(segment)
        pieces = cut
    if not is_cut:
        return []
    longest = sorted(pieces, key=lambda span: span[0] - span[1])[:MOST_SEGMENTS]
    return sorted(longest)


def tokens_of(request: Request) -> Tokens:
    """Returns the request's prompt.

    Preconditions:
        The prompt consists of tokens, not of embeddings.
    """
    return np.asarray(request.prompt_token_ids, np.int64)
