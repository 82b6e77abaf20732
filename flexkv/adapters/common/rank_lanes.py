"""Starts the lanes between one rank's KV pool and the unit's host pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from flexkv.adapters.common.rank_facts import RankPlace
from flexkv.config import FlexKVConfig
from flexkv.transfer.engine import TransferEngine, cuda_device_of
from flexkv.transfer.gds_lane import make_gds_lane
from flexkv.transfer.host_pool import HostPool
from flexkv.transfer.slab_map import SlabMap


def open_lanes(
    config: FlexKVConfig,
    view: Any,
    tensors: Sequence[Any],
    pool: HostPool,
    place: RankPlace,
    *,
    stream_of: Callable[[int], int],
    mover: Any = None,
    slabs: SlabMap | None = None,
    stripe: int = 0,
) -> TransferEngine:
    """The transfer engine of a rank, with its pool attached as group 0; on a GPU the host pool is registered too.

    Args:
        view: `KvView` of the rank's pool.
        tensors: that the view was made of; they say which device the pool lies on, and are held while needed.
        stream_of: the stream of a CUDA device that copies are ordered after, where `submit` names none.
        mover: of host lanes; None takes the engine's own.
        slabs: on disk, that blocks are loaded from without a page of the host pool.
        stripe: the rank whose stripe of them this rank loads.

    Raises:
        GeometryError: the tensors lie on several devices, or on one that no lane can reach.
        ConfigError: a slab that cannot be opened.
    """
    transfer = config.transfer
    device = cuda_device_of(tensors)
    engine = TransferEngine(
        mover=mover,
        device=device,
        batch_copies=transfer.batch_copies,
        copy_kernel=transfer.copy_kernel,
        current_stream=None if device is None else lambda: stream_of(device),
        queue_ops=transfer.queue_ops,
        copy_threads=transfer.copy_thread_count(),
        op_stuck_s=transfer.stuck_s,
        lanes=[] if slabs is None else [make_gds_lane(slabs, stripe, device, config.gds)],
    )
    engine.attach_view(0, view, pool, place.stripe, place.digests, tensors)
    if device is not None:
        pool.pin(device)
    return engine
