"""Describes the folders in which a rank keeps its segments on disk, and the namespace of the segments' keys."""

from __future__ import annotations

from typing import Any

from flexkv.adapters.vllm.identity import engine_namespace, engine_weights
from flexkv.adapters.vllm.pool_geometry import PoolGeometry
from flexkv.blend.segment_unit import SegmentFolders
from flexkv.config import FlexKVConfig
from flexkv.errors import ConfigError

WAITS = 2
"""Number of times that a request waits before its segments can be loaded: once for free slots in host memory, and once
for reads from disk. If layers are streamed, the request also waits for the first layers; `WAITS` does not count this
wait. Each wait, and the load after them, gets an equal share of `load.deadline_s`, because after this deadline the
request is computed without any segment."""


def segment_folders(vllm_config: Any, settings: FlexKVConfig, rank: int) -> SegmentFolders:
    """Returns a rank's folders for segments; no folders if `blend.disk_bytes` is not set.

    Raises:
        ConfigError: `blend.disk_bytes` is set, but `disk.folders` is not.
    """
    size, disk = settings.blend.disk_bytes, settings.disk
    if size is None:
        return SegmentFolders(close_s=settings.transfer.close_s)
    if not disk.folders:
        raise ConfigError(f"blend.disk_bytes={size}: it needs disk.folders, which is not set")
    wait_s = min(disk.wait_s, settings.load.deadline_s / (WAITS + disk.stream + 1))
    return SegmentFolders(
        disk.model_copy(update={"bytes_per_folder": size, "wait_s": wait_s}),
        str(vllm_config.model_config.model),
        f"segments-dp{vllm_config.parallel_config.data_parallel_index}-rank{rank}",
        engine_weights(vllm_config, settings),
        streams=disk.stream,
        asks_again=True,
        close_s=settings.transfer.close_s,
        peers=settings.peers,
    )


def segment_namespace(
    vllm_config: Any, geometry: PoolGeometry, settings: FlexKVConfig, rank: int
) -> dict[str, bytes | str | int]:
    """Returns everything that must be equal before a rank may use a segment. If segments are kept on disk, this is the
    engine's namespace, the rank and the number of ranks. Otherwise the rank suffices, because nothing else can differ
    within one process.

    Raises:
        KeySchemeError, ConfigError: see `engine_namespace`.
    """
    if settings.blend.disk_bytes is None:
        return {"rank": rank}
    return {
        "engine": engine_namespace(vllm_config, geometry, settings),
        "rank": rank,
        "ranks": int(vllm_config.parallel_config.tensor_parallel_size),
    }
