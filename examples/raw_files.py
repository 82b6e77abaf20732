"""Blocks of a pool written to raw files and read back, without an engine: `python -m examples.raw_files`.

The pool is vLLM's: a tensor for each layer, [kv][block][bytes]. A raw file has whole blocks, [block][layer][kv][bytes],
and nothing else: which block lies where is the caller's to remember. The blocks pass through staging, so that a file
sees one call for each block and not one for each run (docs/gds.md). On a GPU `gpu_device_id` is its number.
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
