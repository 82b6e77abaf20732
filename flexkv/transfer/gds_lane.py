"""Makes a rank's lane for copies between the engine's pool and the slabs on disk. These copies use no page of host
memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np
from numpy.typing import NDArray

from flexkv import c_ext
from flexkv.config import GdsConfig, IoBackend
from flexkv.observe import get_logger
from flexkv.transfer.cufile_library import name_wheels
from flexkv.transfer.slab_map import SlabMap
from flexkv.transfer.staging_limits import staging_cut


def make_gds_lane(
    slabs: SlabMap,
    stripe: int,
    device: int | None,
    config: GdsConfig,
    use_staged_transfer: bool | None = None,
    max_staging_blocks: int | None = None,
    io: IoBackend = "auto",
    views: Sequence[c_ext.KvView] = (),
) -> c_ext.GdsLane:
    """Makes a lane for one rank, and opens the slabs. The lane serves one transfer engine, which closes it. A caller
    that passes the lane to no transfer engine must close it itself.

    Args:
        slabs: the slabs on the unit's disks.
        stripe: index of the stripe that this rank reads and writes; 0 if all ranks share one.
        device: the CUDA device that holds the engine's pool; None for plain memory.
        use_staged_transfer, max_staging_blocks: override the settings in `config`; None keeps them.
        io: the I/O backend. It is used for a pool in plain memory, and for a GPU whose transfers must pass through
            plain memory.
        views: views of the rank's pool, one per group. If they are given, this call allocates the staging buffers for
            their blocks; otherwise the first transfer does.

    Raises:
        ConfigError: a slab cannot be opened, or Linux refuses the I/O backend `io`.
        GeometryError: the runs do not fill the stripes, or differ from a view's runs.
        CapacityError: there is not enough memory for the staging buffers; the message names the setting to change.
        DiskError: a disk does not answer.
    """
    codecs = [
        c_ext.PageCodec(list(group.stripe_bytes), _tables(group.runs), False, number)
        for number, group in enumerate(slabs.groups)
    ]
    staged = config.use_staged_transfer if use_staged_transfer is None else use_staged_transfer
    slots = config.max_staging_blocks if max_staging_blocks is None else max_staging_blocks
    if device is not None:
        name_wheels()
    lane = c_ext.GdsLane(
        codecs,
        stripe,
        slabs.disks,
        threads_per_device=config.threads_per_disk,
        use_staged_transfer=staged,
        max_staging_blocks=slots,
        max_staging_bytes=config.max_staging_bytes,
        gpu_device_id=-1 if device is None else device,
        io=io,
        register_pool=config.register_pool,
    )
    with ExitStack() as opened:
        opened.callback(lane.close)
        log = get_logger("gds")
        for group, view in enumerate(views):
            lane.reserve_staging(group, view)
            if cut := staging_cut(
                lane.staging_slots, lane.staging_slot_bytes, slots, config.max_staging_bytes
            ):
                log.info("slabs of group %d: %s", group, cut)
        # This line is logged last, because cuFile shows its route to each slab only after the staging buffers are
        # registered.
        log.info("slabs: %s; %s", lane.describe(), "staged" if staged else "a call a run")
        log_refusal(lane.pool, config)
        opened.pop_all()
    return lane


def log_refusal(pool: c_ext.PoolState, config: GdsConfig) -> None:
    """Warns if `gds.register_pool` is `on` but the pool could not be registered, so that transfers go through staging
    buffers. For `auto`, the log line that describes the lane shows whether the pool was registered.
    """
    if pool["refusal"] and config.register_pool == "on":
        get_logger("gds").warning(
            "gds.register_pool=on: the pool passes through staging: %s", pool["refusal"]
        )


def log_lost_registration(pool: c_ext.PoolState) -> None:
    """Warns if the pool was registered before the engine slept and could not be registered again."""
    if pool["released"] and not pool["regions"]:
        get_logger("gds").warning("the pool passes through staging since the sleep: %s", pool["refusal"])


def gpudirect_refusal() -> str:
    """Returns why this process cannot copy files to a GPU's memory by GPUDirect Storage; empty if that may be possible.
    Whether it is possible for a given slab is known only after a lane has opened the slab (`GdsLane.direct_refusal`).

    The first call opens cuFile's driver if there is a GPU.
    """
    name_wheels()
    return c_ext.gpudirect_refusal()


def _tables(runs: Sequence[NDArray[np.int64]]) -> list[NDArray[np.int64]]:
    return [np.ascontiguousarray(table, np.int64) for table in runs]
