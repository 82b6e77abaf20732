"""The lane of one rank between the engine's pool and the slabs on disk, without a host page between."""

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
    """Opens the slabs for one rank. The lane serves one transfer engine, which closes it; what is given to none is
    closed by its owner.

    Args:
        stripe: the rank whose stripe this rank moves: 0 where all ranks hold the same bytes.
        device: the CUDA device that has the engine's pool; None for plain memory.
        use_staged_transfer, max_staging_blocks: win over `config` where given.
        io: of plain memory, and of copies from it where a GPU has no other way.
        views: of the rank's pool, one a group: the staging that their blocks need is taken now. Without them it is
            taken by the first transfer.

    Raises:
        ConfigError: a slab that cannot be opened, or `io` that the kernel refuses.
        GeometryError: the runs do not fill the stripes, or are not those of a view.
        CapacityError: the staging is not there; says what to set.
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
        # After the staging was registered, by which cuFile's way to each slab is seen.
        log.info("slabs: %s; %s", lane.describe(), "staged" if staged else "a call a run")
        opened.pop_all()
    return lane


def gpudirect_refusal() -> str:
    """Why no file reaches a GPU's memory by GPUDirect Storage in this process; empty where one may. A lane that has
    opened its slabs knows it of each of them (`GdsLane.direct_refusal`).

    The first call opens cuFile's driver where there is a GPU.
    """
    name_wheels()
    return c_ext.gpudirect_refusal()


def _tables(runs: Sequence[NDArray[np.int64]]) -> list[NDArray[np.int64]]:
    return [np.ascontiguousarray(table, np.int64) for table in runs]
