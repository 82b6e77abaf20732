"""Blending inside vLLM: cached pieces of text are used at their positions in a new prompt (docs/blending.md).

The scheduler's side (`requests`) decides which requests are blended and where their rows are in each step; the worker's
side (`worker`, `pages`) keeps each rank's segments; the model's side (`model`, `forward`, `rows`) computes fewer rows.
vLLM takes the model classes (`model`) by the names below.
"""

from __future__ import annotations

MODELS = "flexkv.adapters.vllm.blend.model"

ARCHITECTURES = {
    "LlamaForCausalLM": "FlexKVLlamaForCausalLM",
    "MistralForCausalLM": "FlexKVMistralForCausalLM",
    "Qwen2ForCausalLM": "FlexKVQwen2ForCausalLM",
    "Qwen3ForCausalLM": "FlexKVQwen3ForCausalLM",
}
"""vLLM's name of an architecture -> the name under which its blending class is registered, which is the class's."""

PLAIN = {blending: plain for plain, blending in ARCHITECTURES.items()}

SALT = "flexkv-blend:"
"""Prefix of a blended request's `cache_salt`. The rest must be unique to the request: vLLM and flexkv treat blocks of
two requests with one salt as equal."""
