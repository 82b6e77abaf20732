"""Outcomes of requests that ask for blending. Metrics, documentation and vLLM's adapter share this list."""

from __future__ import annotations

from enum import Enum


class BlendResult(Enum):
    """One outcome of a request that asks for blending. A request that was not blended was computed in full.

    Attributes:
        result: the value of the label `result` of `flexkv_blend_requests_total`.
        words: what happened, for the operator.
    """

    BLENDED = "blended", "its cached segments were put at their positions in the prompt"
    STORED = "stored", "the prompt is a segment; it was computed by itself, and every rank keeps it"
    NO_ROOM = "no_room", "the prompt is a segment, and some rank had no space for all of it"
    MISS = "miss", "none of its segments was cached"
    LOST = (
        "lost",
        "no page of its segments arrived and passed verification, or their load could not begin; a prompt that is a "
        "segment was lost to an error",
    )
    LATE = (
        "late",
        "its pages, or space for them, were not there within `load.deadline_s`; the store of a prompt that is a "
        "segment did not finish in time",
    )
    RESET = "reset", "the weights changed, or a namespace was erased, before it was blended or stored"
    OFF = "off", "blending is off in this engine; the log says why"
    SALT = "salt", "it has no `cache_salt` that begins with `flexkv-blend:`"
    USED_SALT = "used_salt", "an earlier request had the same `cache_salt`"
    SEGMENTS = "segments", "its segments overlap, are empty or lie outside the prompt"
    NO_SEGMENTS = "no_segments", "it lists no segments, and its prompt contains no configured separator"
    SHORT = "short", "its segments have fewer than `blend.min_tokens` tokens in all"
    TIME_TO_LIVE = (
        "time_to_live",
        "it asks to be kept as a segment and has a `flexkv.ttl_s`, but segments do not expire",
    )
    INPUTS = "inputs", "it has images, other inputs or prompt embeddings"
    LORA = "lora", "it uses a LoRA adapter"
    POOLING = "pooling", "it is for a pooling model"
    PROMPT_LOGPROBS = "prompt_logprobs", "it asks for log probabilities of its prompt"
    SESSION = "session", "it is a streaming session"

    def __init__(self, result: str, words: str) -> None:
        self.result = result
        self.words = words


RESULTS = tuple(each.result for each in BlendResult)


def markdown_table() -> str:
    """Returns the table of results for the documentation."""
    rows = ["| result | what became of the request |", "|---|---|"]
    rows += [f"| `{each.result}` | {each.words} |" for each in BlendResult]
    return "\n".join(rows)
