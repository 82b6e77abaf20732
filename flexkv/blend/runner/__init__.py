"""Blending for models of Hugging Face transformers. Only this package of flexkv imports transformers."""

from flexkv.blend.runner.blender import Blender, BlendReport, Prefill
from flexkv.blend.runner.prefill import precompute, prefill, segment_cache

__all__ = ["BlendReport", "Blender", "Prefill", "precompute", "prefill", "segment_cache"]
