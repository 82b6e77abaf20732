"""Which requests may be blended, and the segments of their prompts."""

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
"""[first, end) of a segment in its prompt."""


def is_salted(request: Request) -> bool:
    """Whether the request's blocks are kept apart from those of ordinary requests."""
    return bool(request.cache_salt) and str(request.cache_salt).startswith(SALT)


def refusal(request: Request) -> BlendResult | None:
    """Why the request cannot be blended, whatever its segments; None if it can."""
    sampling = request.sampling_params
    if sampling is None:
        return BlendResult.POOLING
    if request.has_encoder_inputs or request.prompt_embeds is not None or request.prompt_token_ids is None:
        return BlendResult.INPUTS
    if request.lora_request is not None:
        return BlendResult.LORA
    # vLLM 0.33 can also score given tokens at each position of a prompt; a row that is not computed has no score.
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
    """The segments that a prompt may reuse, ascending, or why there are none.

    Args:
        separators: the separators between segments, for a request that names none.
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
    """The longest pieces of the prompt between its separators; none if no separator occurs."""
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
    """The request's prompt. Precondition: it consists of tokens."""
    return np.asarray(request.prompt_token_ids, np.int64)
