"""Tests the transfers of tests/unit/gds with the pool and the staging buffer in GPU memory: every geometry, the fences,
and the reported routes of the I/O.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flexkv import c_ext
from tests.gpu.needs import CUDA_BUILD
from tests.unit.gds.raw_world import KEEP, Case, Pool, World
from tests.unit.gds.test_gds_matrix import sampled

pytestmark = CUDA_BUILD
GPU = 0


class GpuPool:
    """Copies of a pool's tensors on the GPU, with the same alignment as the originals in host memory."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.tensors = [
            torch.empty(m.size + 4096, dtype=torch.uint8, device=f"cuda:{GPU}") for m in pool.memory
        ]
        self.starts = []
        for tensor, memory, start in zip(self.tensors, pool.memory, pool.starts, strict=True):
            wanted = (memory.ctypes.data + start) % 4096
            first = (wanted - start - tensor.data_ptr()) % 4096
            self.starts.append(first)
            tensor[first : first + memory.size].copy_(torch.from_numpy(memory))
        torch.cuda.synchronize(GPU)

    def pointers(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        return np.array(
            [
                t.data_ptr() + first + start
                for t, first, start in zip(self.tensors, self.starts, self.pool.starts, strict=True)
            ],
            np.int64,
        )

    def fetch(self) -> None:
        """Copies the bytes from the GPU into the pool in host memory, for comparison."""
        torch.cuda.synchronize(GPU)
        for tensor, first, memory in zip(self.tensors, self.starts, self.pool.memory, strict=True):
            memory[:] = tensor[first : first + memory.size].cpu().numpy()


def move(world: World, gpu: GpuPool, manager: c_ext.GDSManager) -> None:
    arguments: list[Any] = list(world.arguments())
    arguments[1] = gpu.pointers()
    function = c_ext.transfer_kv_blocks_gds_staged if world.case.staged else c_ext.transfer_kv_blocks_gds
    function(manager, *arguments, **world.options())  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(150))
def test_every_byte_arrives_and_no_other_changes(seed: int, tmp_path: Path) -> None:
    world = World(sampled(seed), tmp_path)
    gpu = GpuPool(world.pool)
    manager = world.manager(gpu_device_id=GPU)
    world.expect()
    move(world, gpu, manager)
    gpu.fetch()
    assert world.differences() == [], world.case
    manager.close()


@pytest.mark.parametrize("fenced", [True, False], ids=["fenced", "control"])
def test_a_store_waits_for_the_forward_and_a_load_for_its_readers(tmp_path: Path, fenced: bool) -> None:
    """When the test submits a transfer, the engine's stream is busy for a long time. So without a fence, a store would
    copy old bytes, and a load would overwrite bytes that the stream still reads. The controls use a stream without
    work as the fence.
    """
    case = Case(0, 2, 65536, 8, 16, 16, False, True, 1, align=4096)
    world = World(case, tmp_path)
    gpu = GpuPool(world.pool)
    stream, idle = torch.cuda.Stream(GPU), torch.cuda.Stream(GPU)
    fence = (stream if fenced else idle).cuda_stream
    manager = world.manager(gpu_device_id=GPU, engine_stream=fence)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(500_000_000)
        for tensor in gpu.tensors:
            tensor.fill_(0x3C)
    for memory in world.pool.memory:
        memory[:] = 0x3C
    world.expect()
    move(world, gpu, manager)
    gpu.fetch()
    assert (world.differences() == []) is fenced
    manager.close()

    read = World(Case(0, 2, 65536, 8, 16, 16, True, True, 2, align=4096), tmp_path)
    reader = read.manager(gpu_device_id=GPU, engine_stream=fence)
    target = GpuPool(read.pool)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(500_000_000)
        seen = target.tensors[0].clone()
    read.expect()
    move(read, target, reader)
    target.fetch()
    assert read.differences() == []
    first, size = target.starts[0], read.pool.memory[0].size
    assert bool((seen[first : first + size] == KEEP).all()) is fenced
    reader.close()


def test_threads_share_a_manager_while_another_stream_computes(tmp_path: Path) -> None:
    world = World(Case(0, 2, 16384, 16, 32, 32, True, True, 3, align=4096), tmp_path)
    gpu = GpuPool(world.pool)
    manager = world.manager(gpu_device_id=GPU)
    world.expect()
    stop = threading.Event()

    def compute() -> None:
        matrix = torch.ones(2048, 2048, device=f"cuda:{GPU}")
        with torch.cuda.stream(torch.cuda.Stream(GPU)):
            while not stop.is_set():
                torch.cuda.current_stream().synchronize()
                matrix @ matrix

    other = threading.Thread(target=compute)
    other.start()
    try:
        for _ in range(20):
            movers = [threading.Thread(target=move, args=(world, gpu, manager)) for _ in range(2)]
            for thread in movers:
                thread.start()
            for thread in movers:
                thread.join()
    finally:
        stop.set()
        other.join()
    gpu.fetch()
    assert world.differences() == []
    manager.close()


def test_the_io_says_what_it_is(tmp_path: Path) -> None:
    world = World(Case(0, 2, 16384, 4, 8, 8, True, True, 4, align=4096), tmp_path)
    gpu = GpuPool(world.pool)
    manager = world.manager(gpu_device_id=GPU)
    move(world, gpu, manager)
    words, totals = manager.describe(), manager.totals
    print(f"\n{words}; {totals}")
    assert ("GPUDirect Storage (" in words) == (totals["bounced_calls"] + totals["unknown_calls"] == 0)
    manager.close()
