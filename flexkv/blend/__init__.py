"""Position-independent reuse: rotates the keys of cached text to the text's position in another prompt.

`prefill`, `precompute` and `segment_cache` work on Hugging Face transformers models; using them imports transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flexkv.blend.base import Segment
from flexkv.blend.plan import BlendPlan
from flexkv.blend.segments import split_at_separators

if TYPE_CHECKING:
    from flexkv.blend.runner import precompute, prefill, segment_cache

__all__ = ["BlendPlan", "Segment", "precompute", "prefill", "segment_cache", "split_at_separators"]


def __getattr__(name: str) -> Any:
    if name in ("precompute", "prefill", "segment_cache"):
        from flexkv.blend import runner

        return getattr(runner, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
