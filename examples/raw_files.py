"""Writes blocks of a pool to raw files and reads them back, without an engine: `python -m examples.raw_files`.

The pool has vLLM's layout: a tensor for each layer, [kv][block][bytes]. A raw file contains only whole blocks,
[block][layer][kv][bytes]; the caller must remember where each block is. The blocks pass through staging slots, so that
there is one I/O call per block and not one per run (docs/gds.md). For a pool on a GPU, `gpu_device_id` is the GPU's
number.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from flexkv.config import GdsConfig
from flexkv.transfer.raw.gds_worker import GDSTransferWorker, RawFileLayout, RawPool

LAYERS, KV, BLOCKS, RUN_BYTES = 8, 2, 32, 4096
DISKS, BLOCKS_PER_FILE = 2, 64


def main() -> None:
    random = np.random.default_rng(0)
    memory = random.integers(0, 256, (LAYERS, KV, BLOCKS, RUN_BYTES), np.uint8)
    pool = RawPool(
        gpu_block_type=0,
        layer_ptrs=tuple(layer.ctypes.data for layer in memory),
        block_stride=RUN_BYTES,
        kv_stride=BLOCKS * RUN_BYTES,
        gpu_device_id=-1,
    )
    layout = RawFileLayout.dense(LAYERS, RUN_BYTES, BLOCKS_PER_FILE)
    stored, loaded = np.split(random.permutation(BLOCKS)[:16], 2)
    places = random.permutation(DISKS * BLOCKS_PER_FILE)[: stored.size]
    wanted = memory[:, :, stored].copy()

    with tempfile.TemporaryDirectory() as folder:
        files = {disk: [str(Path(folder, f"disk-{disk}"))] for disk in range(DISKS)}
        worker = GDSTransferWorker(pool, layout, files, config=GdsConfig())
        try:
            worker.write(stored, places)
            worker.read(loaded, places)
            calls = worker.manager.totals["io_calls"]
        finally:
            worker.close()

    assert np.array_equal(memory[:, :, loaded], wanted)
    assert calls == 2 * stored.size
    print(
        f"{stored.size} blocks of {LAYERS} layers written to {DISKS} disks and read back with {calls} calls"
    )


if __name__ == "__main__":
    main()
