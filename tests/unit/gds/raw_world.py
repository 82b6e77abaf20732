"""Raw files, an engine's pool in plain memory, and a reference that computes the expected result of a transfer between
them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flexkv import c_ext

VLLM, TRTLLM, SGLANG = 0, 1, 2
Bytes = NDArray[np.uint8]
KEEP = 0xA5
"""Value of every byte of a pool and its padding before a transfer. Bytes that the transfer does not move must keep this
value."""


@dataclass(frozen=True)
class Case:
    """The parameters of one transfer between files and a pool. `gap` is the number of bytes between blocks of the
    pool."""

    backend: int
    kv: int
    chunk: int
    layers: int
    blocks: int
    moved: int
    read: bool
    staged: bool
    seed: int
    lo: int = 0
    hi: int | None = None
    slots: int = 4
    devices: int = 1
    files: int = 1
    round_robin: int = 1
    kv_outermost: bool = False  # a layer of a vLLM pool is [kv][block] instead of [block][kv]
    ranks: int = 1  # number of ranks that share a file chunk
    rank: int = 0
    gap: int = 0
    align: int = 1  # alignment of block strides, in bytes
    element_bytes: int = 1  # a chunk consists of complete elements
    io: str = "auto"

    @property
    def layer_list(self) -> list[int]:
        return list(range(self.lo, self.layers if self.hi is None else self.hi))

    @property
    def file_chunk(self) -> int:
        return self.chunk * self.ranks

    @property
    def file_kv_stride(self) -> int:
        return self.file_chunk

    @property
    def file_layer_stride(self) -> int:
        return self.file_chunk * self.kv

    @property
    def file_block_stride(self) -> int:
        size = self.file_layer_stride * self.layers
        return -(-size // self.align) * self.align

    @property
    def copy_offset(self) -> int:
        return self.rank * self.chunk

    @property
    def blocks_per_file(self) -> int:
        return -(-self.blocks // (self.devices * self.files)) + self.round_robin

    def place(self, block: int) -> tuple[int, int, int]:
        """Returns the location of a block by the documented rule: the device, the file, and the offset in the file."""
        turn, within = divmod(block, self.round_robin)
        device = turn % self.devices
        on_device = (turn // self.devices) * self.round_robin + within
        return (
            device,
            on_device // self.blocks_per_file,
            on_device % self.blocks_per_file * self.file_block_stride,
        )


@dataclass
class Pool:
    """An engine's pool, in the layout of the case's backend."""

    case: Case
    memory: list[Bytes] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    block_stride: int = 0
    kv_stride: int = 0
    layer_stride: int = 0

    def __post_init__(self) -> None:
        case = self.case
        if case.backend == TRTLLM:
            self.kv_stride = case.chunk
            self.layer_stride = case.chunk * case.kv
            self.block_stride = self.layer_stride * case.layers + case.gap
            sizes = [self.block_stride * case.blocks]
        elif case.backend == SGLANG:
            self.block_stride = case.chunk + case.gap
            sizes = [self.block_stride * case.blocks] * (case.layers * case.kv)
        else:
            together = not case.kv_outermost
            self.block_stride = case.chunk * (case.kv if together else 1) + case.gap
            self.kv_stride = case.chunk if together else self.block_stride * case.blocks
            sizes = [self.block_stride * case.blocks * (1 if together else case.kv)] * case.layers
        for size in sizes:
            # The memory starts on a 4 KiB boundary, or at an odd address if the case's gap is odd.
            raw = np.full(size + 8192, KEEP, np.uint8)
            start = -raw.ctypes.data % 4096 + (3 if case.gap % 2 else 0)
            self.memory.append(raw)
            self.starts.append(start)

    def pointers(self) -> NDArray[np.int64]:
        return np.array([m.ctypes.data + s for m, s in zip(self.memory, self.starts, strict=True)], np.int64)

    def run(self, layer: int, kv: int, block: int) -> Bytes:
        case, at = self.case, block * self.block_stride
        if case.backend == TRTLLM:
            tensor, at = 0, at + layer * self.layer_stride + kv * self.kv_stride
        elif case.backend == SGLANG:
            tensor = kv * case.layers + layer
        else:
            tensor, at = layer, at + kv * self.kv_stride
        start = self.starts[tensor] + at
        return self.memory[tensor][start : start + case.chunk]


class World:
    """The files and the pool of one case. The source of the transfer (files or pool) has random bytes."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case = case
        self.random = np.random.default_rng(case.seed)
        self.pool = Pool(case)
        self.paths = {
            device: [str(folder / f"{device}-{number}") for number in range(case.files)]
            for device in range(case.devices)
        }
        size = case.blocks_per_file * case.file_block_stride
        self.files = {
            (device, number): self.random.integers(0, 256, size, np.uint8)
            for device in range(case.devices)
            for number in range(case.files)
        }
        for (device, number), content in self.files.items():
            Path(self.paths[device][number]).write_bytes(content.tobytes())
        if not case.read:
            for tensor in self.pool.memory:
                tensor[:] = self.random.integers(0, 256, tensor.size, np.uint8)
        self.gpu = self.random.permutation(case.blocks)[: case.moved].astype(np.int64)
        self.ssd = self.random.permutation(case.blocks)[: case.moved].astype(np.int64)

    def manager(self, **options: object) -> c_ext.GDSManager:
        case = self.case
        given: dict[str, object] = {
            "max_staging_blocks": case.slots,
            "gpu_device_id": -1,
            "threads_per_device": 2,
            "io": case.io,
            **options,
        }
        return c_ext.GDSManager(self.paths, case.devices, case.round_robin, **given)  # type: ignore[arg-type]

    def arguments(self) -> tuple[object, ...]:
        """Returns the arguments of a transfer function, from the one after the manager to `is_read`."""
        case, pool = self.case, self.pool
        return (
            np.array(case.layer_list, np.int32),
            pool.pointers(),
            self.ssd,
            self.gpu,
            pool.kv_stride,
            pool.block_stride,
            pool.layer_stride,
            case.file_layer_stride,
            case.file_block_stride,
            case.file_kv_stride,
            case.chunk,
            case.copy_offset,
            case.blocks_per_file,
            case.layers,
            case.read,
        )

    def options(self) -> dict[str, object]:
        return {"is_mla": self.case.kv == 1, "gpu_block_type": self.case.backend}

    def file_run(self, layer: int, kv: int, block: int) -> Bytes:
        case = self.case
        device, number, offset = case.place(block)
        start = offset + layer * case.file_layer_stride + kv * case.file_kv_stride + case.copy_offset
        return self.files[device, number][start : start + case.chunk]

    def expect(self) -> None:
        """Computes the expected result of the transfer on copies of the files and the pool. Call it before the real
        transfer.
        """
        self.expected_pool = [tensor.copy() for tensor in self.pool.memory]
        self.expected_files = {key: content.copy() for key, content in self.files.items()}
        model = Pool(self.case)
        model.memory, model.starts = self.expected_pool, self.pool.starts
        source, self.files = self.files, self.expected_files
        for gpu, ssd in zip(self.gpu.tolist(), self.ssd.tolist(), strict=True):
            for layer in self.case.layer_list:
                for kv in range(self.case.kv):
                    if self.case.read:
                        model.run(layer, kv, gpu)[:] = self.file_run(layer, kv, ssd)
                    else:
                        self.file_run(layer, kv, ssd)[:] = model.run(layer, kv, gpu)
        self.files = source

    def differences(self) -> list[str]:
        """Returns a description of each pool tensor and file that differs from the expected result."""
        found = []
        for i, (tensor, expected) in enumerate(zip(self.pool.memory, self.expected_pool, strict=True)):
            wrong = np.flatnonzero(tensor != expected)
            if wrong.size:
                found.append(f"pool tensor {i}: {wrong.size} bytes from {wrong[0]} on")
        for (device, number), expected in self.expected_files.items():
            content = np.frombuffer(Path(self.paths[device][number]).read_bytes(), np.uint8)
            if content.size != expected.size:
                found.append(f"file {device}-{number} has {content.size} bytes, not {expected.size}")
            elif (content != expected).any():
                found.append(f"file {device}-{number}: from {np.flatnonzero(content != expected)[0]} on")
        return found
