"""Position-independent reuse ("blending"): rotates the cached keys of a text to the text's position in a different
prompt.

`prefill`, `precompute` and `segment_cache` work on models of Hugging Face transformers; using them imports
transformers.
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
