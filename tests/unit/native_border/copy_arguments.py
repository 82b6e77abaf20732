"""Valid arguments for the native functions that copy and rotate raw memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.unit.native_border.recipes import BLOCKS, RUN
from tests.unit.native_border.world import World


def _raw_transfer(world: World) -> dict[str, object]:
    chunk = RUN
    return {
        "gds_manager": world.get("GDSManager"),
        "gpu_layer_id_list": np.arange(2, dtype=np.int32),
        "gpu_layer_ptrs_tensor": world.pointers,
        "gds_block_ids": np.arange(2),
        "gpu_block_ids": np.arange(2),
        "gpu_kv_stride_in_bytes": chunk,
        "gpu_block_stride_in_bytes": 2 * chunk,
        "gpu_layer_stride_in_bytes": 2 * chunk * BLOCKS,
        "gds_layer_stride_in_bytes": 2 * chunk,
        "gds_block_stride_in_bytes": 4 * chunk,
        "gds_kv_stride_in_bytes": chunk,
        "block_size_in_bytes": chunk,
        "gds_copy_off_inside_chunks": 0,
        "num_blocks_per_file": 16,
        "total_layers": 2,
        "is_read": False,
    }


def _rotation(_: World) -> dict[str, object]:
    keys = np.ones(64, np.float32)
    return {
        "src": keys,
        "dst": keys.copy(),
        "src_offsets": np.array([0, 64], np.int64),
        "dst_offsets": np.array([64, 0], np.int64),
        "turn_of_row": np.array([0, -1], np.int32),
        "turns": np.ones((1, 2, 2), np.float32),
        "dtype": "float32",
        "pairing": "neox",
        "heads": 2,
        "head_dim": 4,
        "rotary_dim": 4,
        "src_head_stride": 16,
        "dst_head_stride": 16,
    }


COPY_ARGUMENTS: dict[str, Callable[[World], dict[str, object]]] = {
    "check_rotation": _rotation,
    "rotate_rows": _rotation,
    "reserve_gds_staging": _raw_transfer,
    "transfer_kv_blocks_gds": _raw_transfer,
    "transfer_kv_blocks_gds_staged": _raw_transfer,
}
