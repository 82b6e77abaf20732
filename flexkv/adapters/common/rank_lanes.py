"""Starts the lanes between one rank's KV pool and the unit's host pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from flexkv.c_ext import GdsLane
from flexkv.config import FlexKVConfig
from flexkv.errors import ConfigError, FlexKVError
from flexkv.facts.ranks import RankPlace
from flexkv.transfer import nvtx
from flexkv.transfer.engine import TransferEngine, cuda_device_of
from flexkv.transfer.gds_lane import make_gds_lane
from flexkv.transfer.host_pool import HostPool
from flexkv.transfer.slab_map import SlabMap
from flexkv.transfer.ways_file import usable_ways


def open_gds_lane(
    config: FlexKVConfig, slabs: SlabMap, stripe: int, views: Sequence[Any], tensors: Sequence[Any]
) -> tuple[GdsLane | None, str]:
    """Opens the lane that loads blocks from the slabs on disk without using a slot of the host pool.

    Args:
        stripe: number of the stripe that this rank loads from each page.
        views: a `KvView` of the rank's pool for each KV group.
        tensors: the tensors from which the views were made. They determine which device the pool is on.

    Returns:
        The lane and an empty string; or, if `disk.gds` is auto and the lane is unavailable, None and the reason.

    Raises:
        ConfigError: `disk.gds` demands the lane, but the lane or its staging buffers are unavailable.
    """
    try:
        device = cuda_device_of(tensors)
        lane = make_gds_lane(slabs, stripe, device, config.gds, io=config.disk.io, views=views)
        # Even where direct reads are supported, a slab's file system or the staging buffers may rule them out.
        if config.disk.gds == "auto" and device is not None and (refusal := lane.direct_refusal):
            lane.close()
            return None, refusal
        return lane, ""
    except FlexKVError as error:
        if config.disk.gds != "auto":
            raise ConfigError(
                f"disk.gds={config.disk.gds}: {error}; allowed here are 'auto', which goes through host memory where "
                "that fails, and 'off'"
            ) from error
        return None, f"{type(error).__name__}: {error}"


def open_lanes(
    config: FlexKVConfig,
    views: Sequence[Any],
    tensors: Sequence[Any],
    pool: HostPool,
    places: Sequence[RankPlace],
    *,
    stream_of: Callable[[int], int],
    mover: Any = None,
    gds_lane: GdsLane | None = None,
) -> TransferEngine:
    """Starts the transfer engine of a rank and attaches the rank's pool. If that pool is on a GPU, also registers the
    host pool with the GPU.

    Args:
        views: a `KvView` of the rank's pool for each KV group.
        tensors: the tensors from which the views were made. They determine which device the pool is on, and are kept
            alive while copies may touch them.
        places: for each KV group, the position of this rank's blocks in a slot.
        stream_of: returns a stream for a CUDA device. Copies start after the work enqueued on that stream, unless
            `submit` is given a different point.
        mover: the object that copies the pages of host lanes; None for the transfer engine's own.
        gds_lane: the lane that `open_gds_lane` returned. The transfer engine takes ownership; if this function raises,
            it closes the lane.

    Raises:
        GeometryError: the tensors are on several devices, or on a device that no lane can reach.
        ConfigError: `observe.nvtx` names a library that does not exist, or the file of `transfer.ways_file` has no
            complete table.
    """
    transfer = config.transfer
    with ExitStack() as opened:
        if gds_lane is not None:
            opened.callback(gds_lane.close)
        nvtx.enable(config.observe.nvtx)
        device = cuda_device_of(tensors)
        engine = TransferEngine(
            mover=mover,
            device=device,
            batch_copies=transfer.batch_copies,
            copy_kernel=transfer.copy_kernel,
            ways=usable_ways(transfer, device),
            digest_threads=config.host.verify_threads,
            current_stream=None if device is None else lambda: stream_of(device),
            queue_ops=transfer.queue_ops,
            copy_threads=transfer.copy_thread_count(),
            op_stuck_s=transfer.stuck_s,
            lanes=[] if gds_lane is None else [gds_lane],
        )
        opened.callback(engine.close, transfer.close_s)
        attach_views(engine, views, pool, places, tensors)
        if device is not None:
            pool.pin(device)
        opened.pop_all()
        return engine


def attach_views(
    engine: TransferEngine,
    views: Sequence[Any],
    pool: HostPool,
    places: Sequence[RankPlace],
    tensors: Sequence[Any],
) -> None:
    """Attaches the rank's pool to its transfer engine. The i-th view becomes KV group i."""
    for group, (view, place) in enumerate(zip(views, places, strict=True)):
        engine.attach_view(group, view, pool, place.stripe, place.digests, tensors)
