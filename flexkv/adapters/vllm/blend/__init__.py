"""Blending inside vLLM: reuses the cached KV of segments (pieces of text) at other positions in a new prompt
(docs/blending.md).

The scheduler's side (`requests`) decides which requests are blended, and which of their rows a step reuses or captures.
The worker's side (`worker`, `pages`) keeps each rank's segments. The model's side (`model`, `forward`, `rows`) computes
fewer rows (tokens) in most layers. vLLM finds the model classes (`model`) by the names below.
"""

from __future__ import annotations

MODELS = "flexkv.adapters.vllm.blend.model"

ARCHITECTURES = {
    "LlamaForCausalLM": "FlexKVLlamaForCausalLM",
    "MistralForCausalLM": "FlexKVMistralForCausalLM",
    "Qwen2ForCausalLM": "FlexKVQwen2ForCausalLM",
    "Qwen3ForCausalLM": "FlexKVQwen3ForCausalLM",
}
"""Name of an architecture in vLLM -> name under which vLLM registers flexkv's model class for it, which can blend."""

PLAIN = {blending: plain for plain, blending in ARCHITECTURES.items()}

SALT = "flexkv-blend:"
"""Prefix of a blended request's `cache_salt`. The rest of the salt must be unique to the request, because vLLM and
flexkv share blocks between requests with the same salt."""
