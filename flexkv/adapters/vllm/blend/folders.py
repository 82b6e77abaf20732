"""Where a rank keeps its segments on disk, and the name under which they are found again."""

from __future__ import annotations

from typing import Any

from flexkv.adapters.vllm.identity import engine_namespace, engine_weights
from flexkv.adapters.vllm.pool_geometry import PoolGeometry
from flexkv.blend.segment_unit import SegmentFolders
from flexkv.config import FlexKVConfig
from flexkv.errors import ConfigError

WAITS = 2
"""How often a request's segments wait: for room in host memory and for reads. Where layers are streamed they wait
again, for the first of them. Each wait, and the load of the pages that came, gets an equal share of `load.deadline_s`:
beyond the deadline the request would be computed without any of them."""


def segment_folders(vllm_config: Any, settings: FlexKVConfig, rank: int) -> SegmentFolders:
    """A rank's folders for segments; none unless `blend.disk_bytes` is set.

    Raises:
        ConfigError: there are no folders for segments.
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
    """Everything that must be equal before a rank may use a segment. On disk this is everything that prefixes need, the
    rank and the number of ranks; in this process's memory only the rank can differ.

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
