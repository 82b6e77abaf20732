"""Copies blocks between raw files and one rank's pool. A `GDSTransferWorker` makes a native GDSManager from flexkv's
settings and the geometries of pool and files.

worker = GDSTransferWorker(pool=pool, files=layout, ssd_files={0: ["/nvme0/kv-0"]})
worker.read(gpu_blocks=[4, 9], ssd_blocks=[100, 101])
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flexkv import c_ext
from flexkv.config import GdsConfig, IoBackend, load_config
from flexkv.errors import FlexKVError, GeometryError
from flexkv.observe import get_logger
from flexkv.transfer.cufile_library import name_wheels
from flexkv.transfer.gds_lane import log_refusal
from flexkv.transfer.staging_limits import staging_cut
from flexkv.transfer.stream import StreamLike, stream_address

Ids = Sequence[int] | NDArray[np.int64]

TENSORRT_LLM = 1
"""The value of `RawPool.gpu_block_type` for pools in which all layers of a block are adjacent."""

SAMPLE_BLOCKS = np.arange(2, dtype=np.int64)
"""The numbers of two blocks. The alignment of these blocks shows how all blocks of a pool are aligned, and so whether
the pool needs staging buffers.
"""


@dataclass(frozen=True, slots=True)
class RawPool:
    """The location of the blocks of one rank's pool in memory, as addresses and strides in bytes.

    Attributes:
        gpu_block_type: the engine's order of a block's bytes: 0 for vLLM, 1 for TensorRT-LLM, 2 for SGLang.
        layer_ptrs: one address per layer (vLLM), one address (TensorRT-LLM), or the addresses of K of every layer and
            then of V of every layer (SGLang).
        block_stride, kv_stride, layer_stride: bytes from one block to the next, from K to V, and from one layer to the
            next.
        gpu_device_id: the GPU that holds the pool; -1 for plain memory.
        is_mla: whether K and V are stored together as one vector.
        blocks: number of blocks in the pool; 0 if it is not known. If it is known, blocks that are contiguous can be
            copied directly between a disk and a GPU (`gds.register_pool`).
    """

    gpu_block_type: int
    layer_ptrs: tuple[int, ...]
    block_stride: int
    kv_stride: int = 0
    layer_stride: int = 0
    gpu_device_id: int = -1
    is_mla: bool = False
    blocks: int = 0


@dataclass(frozen=True, slots=True)
class RawFileLayout:
    """The location of blocks in raw files (docs/gds.md). Sizes and strides are in bytes.

    Attributes:
        total_layers: number of layers in a block.
        chunk: number of bytes of K, or of V, that this rank copies in one layer of one block.
        layer_stride, kv_stride, block_stride: bytes from one layer to the next, from K to V, and from one block to the
            next.
        blocks_per_file: number of blocks in each file.
        copy_offset: offset of this rank's bytes in a chunk that several ranks share.
    """

    total_layers: int
    chunk: int
    layer_stride: int
    kv_stride: int
    block_stride: int
    blocks_per_file: int
    copy_offset: int = 0

    @classmethod
    def dense(cls, total_layers: int, chunk: int, blocks_per_file: int, kv_dim: int = 2) -> RawFileLayout:
        """Makes the layout of blocks without gaps, each in the order [layer][K or V][chunk].

        Args:
            kv_dim: 2 if K and V are stored separately, 1 if they are stored as one vector.
        """
        layer = chunk * kv_dim
        return cls(total_layers, chunk, layer, chunk, layer * total_layers, blocks_per_file)


class GDSTransferWorker:
    """Copies one rank's blocks between raw files and its pool.

    Args:
        ssd_files: the paths of each disk's files, by the disk's number.
        config: the settings; None to read them from FLEXKV_CONFIG's file and the environment variables FLEXKV_GDS_* and
            FLEXKV_DISK_IO, which override the file.
        round_robin: number of consecutive blocks that are on one disk; the next block is on the next disk.
        use_staged_transfer, max_staging_blocks: override the settings in `config`; None keeps them.
        engine_stream: the engine's device stream; transfers start after the work enqueued on it.
        io: the I/O backend. It is used for a pool in plain memory, and for a GPU whose transfers must pass through
            plain memory. None means the setting `disk.io` if `config` is None, and "auto" otherwise.

    Raises:
        ContractError: `engine_stream` is not a stream.
        ConfigError: a setting or option is not allowed, a file cannot be opened, or Linux refuses the I/O backend `io`.
        CapacityError: there is not enough memory for the staging buffers; the message names the setting to change.
    """

    def __init__(
        self,
        pool: RawPool,
        files: RawFileLayout,
        ssd_files: Mapping[int, Sequence[str]],
        config: GdsConfig | None = None,
        round_robin: int = 1,
        use_staged_transfer: bool | None = None,
        max_staging_blocks: int | None = None,
        engine_stream: StreamLike = 0,
        io: IoBackend | None = None,
    ) -> None:
        if config is None:
            settings = load_config()
            gds, io = settings.gds, io or settings.disk.io
        else:
            gds, io = config, io or "auto"
        self.use_staged_transfer = (
            gds.use_staged_transfer if use_staged_transfer is None else use_staged_transfer
        )
        self.max_staging_blocks = gds.max_staging_blocks if max_staging_blocks is None else max_staging_blocks
        self._pool, self._files = pool, files
        self._ptrs = np.array(pool.layer_ptrs, np.int64)
        self._all_layers = np.arange(files.total_layers, dtype=np.int32)
        if pool.gpu_device_id >= 0:
            name_wheels()
        self.manager = c_ext.GDSManager(
            ssd_files,
            len(ssd_files),
            round_robin,
            threads_per_device=gds.threads_per_disk,
            use_staged_transfer=self.use_staged_transfer,
            max_staging_blocks=self.max_staging_blocks,
            max_staging_bytes=gds.max_staging_bytes,
            gpu_device_id=pool.gpu_device_id,
            engine_stream=stream_address(engine_stream),
            io=io,
            register_pool=gds.register_pool,
        )
        self._log = get_logger("gds")
        self._reserve_staging(gds.max_staging_bytes)
        # This line is logged last, because cuFile shows its route to each file only after the staging buffers are
        # registered.
        way = "staged" if self.use_staged_transfer else "a call a run"
        self._log.info("%s; %s", self.manager.describe(), way)
        log_refusal(self.manager.pool, gds)

    def read(self, gpu_blocks: Ids, ssd_blocks: Ids, layers: Ids | None = None) -> None:
        """Copies block ssd_blocks[i] of the files to block gpu_blocks[i] of the pool, for each i.

        Args:
            layers: numbers of the layers to copy; None for all.

        Raises:
            TransferError: some blocks did not arrive; the message lists them. All other blocks arrived.
            GeometryError, BlockRangeError, CapacityError, ClosedError: see `c_ext.transfer_kv_blocks_gds_staged`.
        """
        self._move(gpu_blocks, ssd_blocks, layers, is_read=True)

    def write(self, gpu_blocks: Ids, ssd_blocks: Ids, layers: Ids | None = None) -> None:
        """Copies block gpu_blocks[i] of the pool to block ssd_blocks[i] of the files; otherwise like `read`."""
        self._move(gpu_blocks, ssd_blocks, layers, is_read=False)

    def _reserve_staging(self, max_bytes: int) -> None:
        pool = self._pool
        block_bytes = self._files.total_layers * self._files.chunk * (1 if pool.is_mla else 2)
        try:
            if pool.blocks and pool.gpu_block_type == TENSORRT_LLM and self._in_one_piece(block_bytes):
                self.manager.register_pool(pool.layer_ptrs[0], pool.blocks, pool.block_stride, block_bytes)
            self._call(
                c_ext.reserve_gds_staging, SAMPLE_BLOCKS, SAMPLE_BLOCKS, self._all_layers, is_read=True
            )
        except FlexKVError:
            self.manager.close()
            raise
        manager = self.manager
        if cut := staging_cut(
            manager.staging_slots, manager.staging_slot_bytes, self.max_staging_blocks, max_bytes
        ):
            self._log.info("%s", cut)

    def _in_one_piece(self, block_bytes: int) -> bool:
        """Whether a block's bytes are contiguous in the pool and in the file, in the same order."""
        pool, files = self._pool, self._files
        in_a_row = block_bytes // files.total_layers
        kv_too = pool.is_mla or pool.kv_stride == files.kv_stride == files.chunk
        return kv_too and pool.layer_stride == files.layer_stride == in_a_row

    def _move(self, gpu_blocks: Ids, ssd_blocks: Ids, layers: Ids | None, is_read: bool) -> None:
        start = time.perf_counter()
        self._call(
            c_ext.transfer_kv_blocks_gds_staged,
            _ids(gpu_blocks, "gpu_blocks"),
            _ids(ssd_blocks, "ssd_blocks"),
            self._all_layers if layers is None else _ids(layers, "layers").astype(np.int32),
            is_read,
        )
        taken_ms = 1e3 * (time.perf_counter() - start)
        self._log.debug("%s %d blocks in %.1f ms", "read" if is_read else "wrote", len(gpu_blocks), taken_ms)

    def _call(
        self,
        function: Callable[..., None],
        gpu_blocks: NDArray[np.int64],
        ssd_blocks: NDArray[np.int64],
        layers: NDArray[np.int32],
        is_read: bool,
    ) -> None:
        pool, files = self._pool, self._files
        function(
            self.manager,
            layers,
            self._ptrs,
            ssd_blocks,
            gpu_blocks,
            pool.kv_stride,
            pool.block_stride,
            pool.layer_stride,
            files.layer_stride,
            files.block_stride,
            files.kv_stride,
            files.chunk,
            files.copy_offset,
            files.blocks_per_file,
            files.total_layers,
            is_read,
            is_mla=pool.is_mla,
            gpu_block_type=pool.gpu_block_type,
        )

    def close(self) -> None:
        """Cancels copies that have not begun, waits for the copies in flight, and closes the files. Idempotent."""
        self.manager.close()


def _ids(values: Ids, name: str) -> NDArray[np.int64]:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise GeometryError(
            f"{name}: a one-dimensional sequence of whole numbers is needed, got {values!r:.80}"
        )
    return np.ascontiguousarray(array, np.int64)
