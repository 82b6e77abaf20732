"""Blending for programs that use transformers directly: `flexkv.blend.prefill(model, segments, cache)`."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from flexkv.blend.base import Segment, Tokens
from flexkv.blend.cache import SegmentCache
from flexkv.blend.plan import BlendPlan
from flexkv.blend.registry import NotBlendable
from flexkv.blend.runner.blender import Blender, BlendReport, Prefill
from flexkv.blend.runner.model import LayeredModel
from flexkv.blend.runner.reused import LostPages, ReusedRows
from flexkv.blend.runner.selftest import check_rotation
from flexkv.blend.segment_unit import SegmentFolders
from flexkv.blend.segments import as_tokens
from flexkv.config import DiskConfig, load_config
from flexkv.errors import ConfigError, GeometryError
from flexkv.transfer.layerwise.host_device import HostDevice

logger = logging.getLogger(__name__)

_CHECKED = "_flexkv_blending_off"
"""Name of the attribute in which the result of `off_reason` is kept on a model."""

Segments = Sequence[Segment | Sequence[int] | Tokens]


def segment_cache(
    model: Any,
    namespace: Mapping[str, bytes | str | int],
    *,
    slots: int,
    staging_tokens: int,
    block_tokens: int = 16,
    deadline_s: float = 60.0,
    prefetch_layers: int | None = None,
    disk: DiskConfig | None = None,
) -> SegmentCache:
    """Makes a cache for the segments of `model`.

    Args:
        model: a transformers causal language model.
        namespace: fields that identify the weights (by a digest or a revision) and everything else that separates
            callers. The model's configuration is added.
        slots, staging_tokens, block_tokens, deadline_s: see `SegmentCache`.
        prefetch_layers: number of a prompt's layers that are in memory at once, from 2 to 16; None for
            `load.prefetch_layers` of flexkv's configuration.
        disk: folders that keep segments after they have left host memory, and after the process has exited; None for
            `disk` of flexkv's configuration, which has no folders by default.

    Raises:
        NotBlendable: the model cannot be blended; see `LayeredModel`.
        ConfigError: a setting of flexkv's configuration is not allowed.
        FlexKVError: see `SegmentCache`.
    """
    layered = LayeredModel(model)
    settings = load_config()
    fields = {"flexkv.model": model.config.to_json_string(use_diff=False), **namespace}
    return SegmentCache(
        layered.shape,
        fields,
        slots=slots,
        staging_tokens=staging_tokens,
        block_tokens=block_tokens,
        deadline_s=deadline_s,
        prefetch_layers=settings.load.prefetch_layers if prefetch_layers is None else prefetch_layers,
        folders=SegmentFolders(
            settings.disk if disk is None else disk, model.config.name_or_path or model.config.model_type
        ),
    )


def off_reason(model: Any) -> str:
    """Returns why the model's keys cannot be rotated to other positions; empty if they can. Checks each model once, and
    logs a warning if they cannot.
    """
    if not hasattr(model, _CHECKED):
        reason = ""
        try:
            with torch.no_grad():
                check_rotation(LayeredModel(model))
        except NotBlendable as error:
            reason = str(error)
            logger.warning("blending is off for %s: %s", type(model).__name__, reason)
        setattr(model, _CHECKED, reason)
    return str(getattr(model, _CHECKED))


def as_segments(segments: Segments) -> list[Segment]:
    """Converts segments that are given as token ids to `Segment`s, and leaves out empty segments.

    Raises:
        TokenError: a token is not an integer in [0, 2**32).
        ConfigError: there are no tokens.
    """
    found = [s if isinstance(s, Segment) else Segment(as_tokens(s)) for s in segments]
    found = [segment for segment in found if len(segment)]
    if not found:
        raise ConfigError("segments: there is not one token")
    return found


def _layers_of(past: Any) -> list[tuple[Any, Any]]:
    if past is None or past.get_seq_length() == 0:
        return []
    return [(layer.keys, layer.values) for layer in past.layers]


def _past_layers(past: Any, layered: LayeredModel) -> list[tuple[Any, Any]]:
    """Returns each layer's keys and values [heads, tokens, dim] of the tokens that the caller already has; empty if it
    has none.

    Raises:
        GeometryError: `past` has a different number of layers than the model, or several prompts.
    """
    layers = _layers_of(past)
    if not layers:
        return []
    if len(layers) != len(layered.layers) or layers[0][0].shape[0] != 1:
        raise GeometryError(
            f"past: {len(layers)} layers of batch {layers[0][0].shape[0]}; "
            f"{len(layered.layers)} of batch 1 are needed"
        )
    return [(keys[0], values[0]) for keys, values in layers]


def prefill(
    model: Any,
    segments: Segments,
    cache: SegmentCache,
    plan: BlendPlan = BlendPlan(),  # noqa: B008 - frozen
    past: Any = None,
) -> Prefill:
    """Computes a prompt, the concatenation of `segments`, and reuses the cached rows of its segments.

    Reuses as much of each segment as `cache` has (all of it, or its leading blocks), wherever in the prompt the segment
    is. Computes the rows that are not cached, and those that `plan` chooses. Stores nothing; use `precompute` for that.
    If the model's keys cannot be rotated to other positions (`off_reason`), the model itself computes everything.

    Args:
        model: a transformers causal language model of a supported family, in host memory.
        segments: token ids, or `Segment`s from `split_at_separators`.
        cache: the cache of the model's segments.
        plan: which reused rows are computed again.
        past: a transformers cache with the tokens that the caller already has, which precede the prompt; None if there
            are none. It is not changed.

    Raises:
        NotBlendable: the prompt is so long that a "dynamic" rope changes its frequencies.
        ConfigError: there are no tokens, or the plan has a check layer that the model lacks.
        GeometryError: `past` or `cache` does not fit the model.
    """
    parts = as_segments(segments)
    tokens = torch.from_numpy(np.concatenate([part.tokens for part in parts]))
    reason = off_reason(model)
    with torch.no_grad():
        if reason:
            return _recompute(model, tokens, past, reason)
        layered = LayeredModel(model)
        if cache.shape != layered.shape:
            raise GeometryError(f"the cache has {cache.shape}, the model {layered.shape}")
        had = _past_layers(past, layered)
        layered.check_length(len(tokens) + (had[0][0].shape[1] if had else 0))
        device = HostDevice()
        try:
            return _blend(Blender(layered, plan), parts, tokens, had, cache, device)
        finally:
            device.close(cache.deadline_s)


def _blend(
    blender: Blender,
    parts: Sequence[Segment],
    tokens: Any,
    past: list[tuple[Any, Any]],
    cache: SegmentCache,
    device: HostDevice,
) -> Prefill:
    starts = np.cumsum([0, *map(len, parts)]).tolist()
    wanted: list[Tokens | None] = [part.tokens if part.reusable else None for part in parts]
    lost: list[str] = []
    while True:
        load = cache.begin_load(wanted)
        try:
            reused = ReusedRows(cache, load, starts, len(tokens), device)
            logits, layers, computed = blender.run(tokens, past, reused)
        except LostPages as error:
            # Rows of earlier layers were computed from rows of the lost segments, so the prompt is restarted without
            # the cached rows of these segments. The restarts come to an end, because each restart reuses at least one
            # segment fewer than the run before it.
            load.close()
            for segment in error.segments:
                lost.append(f"segment {segment}: {load.lost.get(segment, str(error))}")
                logger.warning("blending begins again without a part of the prompt: %s", lost[-1])
                wanted[segment] = None
            continue
        finally:
            load.close()
        covered = int(np.count_nonzero(reused.covered))
        return Prefill(
            logits, _as_cache(layers), BlendReport(len(tokens), covered, computed, "", tuple(lost))
        )


def _recompute(model: Any, tokens: Any, past: Any, reason: str) -> Prefill:
    kv = DynamicCache()
    for number, (keys, values) in enumerate(_layers_of(past)):
        kv.update(keys, values, number)
    found = model(tokens[None], past_key_values=kv, use_cache=True, logits_to_keep=1)
    return Prefill(found.logits[0, -1:], found.past_key_values, BlendReport(len(tokens), 0, [], reason))


def _as_cache(layers: Sequence[tuple[Any, Any]]) -> Any:
    cache = DynamicCache()
    for number, (keys, values) in enumerate(layers):
        cache.update(keys[None], values[None], number)
    return cache


def precompute(model: Any, segments: Segments, cache: SegmentCache) -> int:
    """Computes each reusable segment that is not completely cached, separately from all other segments, and stores it.
    Returns the number of the segments' tokens that are cached now; 0 if the model cannot be blended.

    The cached rows of a segment depend only on the segment's own tokens, so one prompt cannot affect another. A segment
    is skipped with a warning if it is so long that a "dynamic" rope changes its frequencies.

    Raises:
        CapacityError: a segment is longer than the cache's staging pool.
        TransferError: see `SegmentCache.store`.
    """
    if off_reason(model):
        return 0
    layered = LayeredModel(model)
    rotation = Blender(layered, BlendPlan()).rotation
    cached = 0
    for part in as_segments(segments):
        if not part.reusable:
            continue
        have = cache.cached_tokens(part.tokens)
        if have < len(part):
            try:
                layered.check_length(len(part))
            except NotBlendable as error:
                logger.warning("a segment is not stored: %s", error)
                cached += have
                continue
            with torch.no_grad(), layered.own_frequencies():
                found = model(torch.from_numpy(part.tokens)[None], use_cache=True, logits_to_keep=1)
            layers = [
                (layer.keys[0].contiguous(), layer.values[0].contiguous())
                for layer in found.past_key_values.layers
            ]
            have = cache.store(part.tokens, layers.__getitem__, rotation)
        cached += have
    return cached
