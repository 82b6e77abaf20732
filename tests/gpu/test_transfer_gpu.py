"""Tests the CUDA lane on a GPU: every path copies every byte, and fences hold while the engine's stream is busy."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from flexkv import c_ext
from flexkv.transfer.engine import TransferEngine
from flexkv.transfer.graph import OpId, OpKind, OpStatus, Priority, TransferGraph, TransferOp
from flexkv.transfer.host_pool import HostPool
from tests.gpu.needs import GPU

pytestmark = GPU

LONG_S = 60.0
BLOCKS = 24


class GpuWorld:
    """A layer-first or block-first pool on one GPU, a host pool, and a transfer engine between them."""

    def __init__(
        self,
        torch: Any,
        layers: int,
        run_bytes: int,
        block_first: bool,
        batch: bool,
        kernel: bool,
        device: int = 0,
    ) -> None:
        self.torch, self.layers, self.run_bytes, self.device = torch, layers, run_bytes, device
        shape = (BLOCKS, layers, run_bytes) if block_first else (layers, BLOCKS, run_bytes)
        self.pool_memory = torch.zeros(shape, dtype=torch.uint8, device=f"cuda:{device}")
        self.by_block = self.pool_memory if block_first else self.pool_memory.transpose(0, 1)
        base, page = self.pool_memory.data_ptr(), layers * run_bytes
        stride = page if block_first else run_bytes
        step = run_bytes if block_first else BLOCKS * run_bytes
        rows = [[base + layer * step, stride, run_bytes, layer * run_bytes, layer] for layer in range(layers)]
        self.view = c_ext.KvView(np.array(rows, dtype=np.int64), BLOCKS, page)
        self.pool = HostPool(-(-page // 4096) * 4096, BLOCKS)
        self.pool.pin(device)
        assert self.pool.wait_ready(BLOCKS, LONG_S)
        ends_s = time.monotonic() + LONG_S
        while self.pool.pinned_slots < BLOCKS:  # the kernel can copy only pinned slots
            assert time.monotonic() < ends_s, f"{self.pool.pinned_slots} of {BLOCKS} slots are pinned"
            time.sleep(0.01)
        self.engine = TransferEngine(device=device, batch_copies=batch, copy_kernel=kernel)
        self.engine.attach_view(0, self.view, self.pool, owners=[self.pool_memory])
        self.ids = itertools.count(1)

    def stream(self) -> int:
        return int(self.torch.cuda.current_stream(self.device).cuda_stream)

    def submit(
        self,
        kind: OpKind,
        blocks: list[int],
        slots: list[int],
        layerwise: bool = False,
        stream: int | None = None,
    ) -> Any:
        """Submits one op. The op's fence is on `stream`, or on the engine's stream if `stream` is None."""
        priority = Priority.LOAD if kind is OpKind.H2D else Priority.STORE
        op = TransferOp(
            OpId(next(self.ids)),
            kind,
            0,
            priority,
            np.array(blocks, dtype=np.int32),
            np.array(slots, dtype=np.int32),
            layerwise,
        )
        ticket = self.engine.submit(
            TransferGraph((op,), ()), stream=self.stream() if stream is None else stream
        )
        assert ticket is not None
        return ticket

    def run(self, kind: OpKind, blocks: list[int], slots: list[int], layerwise: bool = False) -> None:
        assert self.engine.wait(self.submit(kind, blocks, slots, layerwise), LONG_S)
        (result,) = self.engine.poll()
        assert result.status is OpStatus.OK, result.reason

    def paths(self) -> dict[str, int]:
        """Returns the number of bytes that each path has moved, without the paths that have moved none."""
        assert self.engine.cuda_lane is not None
        return {path: moved for path, _, moved, _ in self.engine.cuda_lane.counts() if moved}

    def close(self) -> None:
        assert self.engine.close(LONG_S)
        self.pool.close()


@pytest.fixture
def make_gpu_world(torch: Any) -> Iterator[Callable[..., GpuWorld]]:
    worlds: list[GpuWorld] = []

    def make(**shape: Any) -> GpuWorld:
        given = {"layers": 4, "run_bytes": 4096, "block_first": False, "batch": True, "kernel": True} | shape
        worlds.append(GpuWorld(torch, **given))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()


@pytest.mark.parametrize("ways", [(True, True), (True, False), (False, False), (False, True)])
@pytest.mark.parametrize("run_bytes", [1, 7, 24, 1000, 4096, 9001, 65536])
@pytest.mark.parametrize("block_first", [False, True])
@pytest.mark.parametrize("layers", [1, 5, 80])
def test_every_byte_arrives_and_no_other_is_touched(
    make_gpu_world: Callable[..., GpuWorld],
    ways: tuple[bool, bool],
    run_bytes: int,
    block_first: bool,
    layers: int,
) -> None:
    world = make_gpu_world(
        layers=layers, run_bytes=run_bytes, block_first=block_first, batch=ways[0], kernel=ways[1]
    )
    torch = world.torch
    world.pool_memory.random_(0, 256)
    before = world.by_block.clone()
    world.run(OpKind.D2H, [0, 1, 2, 5], [3, 0, 7, 1])
    stored = torch.from_numpy(world.pool.slot(7)[: layers * run_bytes].copy())
    assert torch.equal(stored, before[2].reshape(-1).cpu())
    world.run(OpKind.H2D, [9, 7, 6], [3, 7, 1], layerwise=True)
    expected = before.clone()
    for block, source in ((9, 0), (7, 2), (6, 5)):
        expected[block] = before[source]
    assert torch.equal(world.by_block, expected)
    paths = world.paths()
    assert sum(paths.values()) == 7 * layers * run_bytes
    batch, kernel = ways
    if not kernel or not c_ext.cuda_info()["built"]:
        assert "kernel" not in paths
    elif not block_first and run_bytes <= 16384:
        assert list(paths) == ["kernel"]
    if not batch:
        assert "batch" not in paths


# The controls use a stream without work as the fence. Wrong bytes must then appear; otherwise the test proves nothing.
FENCED = pytest.mark.parametrize("fenced", [True, False], ids=["fenced", "control"])
KERNEL = pytest.mark.parametrize("kernel", [False, True], ids=["copy engine", "kernel"])
TURNS = 30
SLEEP_CYCLES = 100_000_000
"""Clock cycles of a sleep: about 50 ms on a GPU at 2 GHz. A copy without a fence ends long before the sleep does."""
FENCE_BLOCKS = list(range(8))
FENCE_SHAPE = {"layers": 8, "run_bytes": 16384}


def fence_of(world: GpuWorld, fenced: bool) -> int:
    """Returns the engine's stream, or, for a control, a stream without work."""
    return world.stream() if fenced else int(world.torch.cuda.Stream(0).cuda_stream)


def end(world: GpuWorld, ticket: Any) -> None:
    assert world.engine.wait(ticket, LONG_S)
    assert world.engine.poll()[0].status is OpStatus.OK
    world.torch.cuda.current_stream(0).synchronize()


def fill(world: GpuWorld, value: int) -> None:
    """Fills the blocks of the fence tests with a value, and waits until the stream has executed the fill."""
    world.by_block[: len(FENCE_BLOCKS)].fill_(value)
    world.torch.cuda.current_stream(0).synchronize()


def warm_up(world: GpuWorld) -> None:
    """Runs one store and one load. They load kernels and start threads. The first `Stream` makes torch create all its
    32 streams. Without this, the copies of the first turn might begin only after the stream's sleep.
    """
    world.torch.cuda.Stream(0)
    world.torch.cuda._sleep(1)
    world.run(OpKind.D2H, FENCE_BLOCKS, FENCE_BLOCKS)
    world.run(OpKind.H2D, FENCE_BLOCKS, FENCE_BLOCKS)


def stored(world: GpuWorld, value: int) -> bool:
    page = world.layers * world.run_bytes
    return all(bool((world.pool.slot(slot)[:page] == value).all()) for slot in FENCE_BLOCKS)


@FENCED
@KERNEL
def test_a_store_copies_what_the_forward_before_it_writes(
    make_gpu_world: Callable[..., GpuWorld], kernel: bool, fenced: bool
) -> None:
    world = make_gpu_world(**FENCE_SHAPE, kernel=kernel)
    warm_up(world)
    for turn in range(TURNS):
        value = turn % 200
        fill(world, 255 - value)
        world.torch.cuda._sleep(SLEEP_CYCLES)
        for last in (value + 1, value):  # simulates a forward that writes each block twice
            world.by_block[: len(FENCE_BLOCKS)].fill_(last)
        end(world, world.submit(OpKind.D2H, FENCE_BLOCKS, FENCE_BLOCKS, stream=fence_of(world, fenced)))
        assert stored(world, value) is fenced, f"turn {turn}"


@FENCED
@KERNEL
def test_a_load_overwrites_after_the_forward_before_it_reads(
    make_gpu_world: Callable[..., GpuWorld], kernel: bool, fenced: bool
) -> None:
    world = make_gpu_world(**FENCE_SHAPE, kernel=kernel)
    fill(world, 7)
    warm_up(world)
    for turn in range(TURNS):
        value = 8 + turn
        fill(world, value)
        world.torch.cuda._sleep(SLEEP_CYCLES)
        seen = world.by_block[: len(FENCE_BLOCKS)].clone()
        end(world, world.submit(OpKind.H2D, FENCE_BLOCKS, FENCE_BLOCKS, True, fence_of(world, fenced)))
        assert bool((seen == value).all()) is fenced, f"turn {turn}"
        assert bool((world.by_block[: len(FENCE_BLOCKS)] == 7).all())


@FENCED
@KERNEL
def test_a_forward_after_wait_layer_reads_what_the_load_brings(
    make_gpu_world: Callable[..., GpuWorld], kernel: bool, fenced: bool
) -> None:
    world = make_gpu_world(**FENCE_SHAPE, kernel=kernel)
    torch = world.torch
    fill(world, 7)
    warm_up(world)
    busy = torch.cuda.Stream(0)
    for turn in range(TURNS):
        fill(world, 8 + turn)
        # The load's fence is behind this sleep, so its copies begin long after they were enqueued.
        with torch.cuda.stream(busy):
            torch.cuda._sleep(SLEEP_CYCLES)
        ticket = world.submit(OpKind.H2D, FENCE_BLOCKS, FENCE_BLOCKS, stream=int(busy.cuda_stream))
        assert world.engine.wait_layer(ticket, 7, LONG_S, stream=fence_of(world, fenced)).ok
        seen = world.by_block[: len(FENCE_BLOCKS)].clone()
        end(world, ticket)
        assert bool((seen == 7).all()) is fenced, f"turn {turn}"


@FENCED
def test_a_forward_reads_each_layer_once_its_wait_has_passed_while_one_kernel_loads_all(
    make_gpu_world: Callable[..., GpuWorld], fenced: bool
) -> None:
    blocks = list(range(BLOCKS))
    world = make_gpu_world(layers=32, run_bytes=48 << 10)  # 37 MB, which the kernel moves in 0.8 ms
    torch = world.torch
    world.by_block.fill_(7)
    world.run(OpKind.D2H, blocks, blocks)
    world.run(OpKind.H2D, blocks, blocks, True)
    busy = torch.cuda.Stream(0)
    for turn in range(TURNS):
        world.by_block.fill_(8 + turn)
        torch.cuda.current_stream(0).synchronize()
        launched = kernel_calls(world)
        with torch.cuda.stream(busy):
            torch.cuda._sleep(SLEEP_CYCLES // 10)
        ticket = world.submit(OpKind.H2D, blocks, blocks, True, stream=int(busy.cuda_stream))
        seen = []
        for layer in range(world.layers):
            assert world.engine.wait_layer(ticket, layer, LONG_S, stream=fence_of(world, fenced)).ok
            seen.append(world.pool_memory[layer].clone())
        end(world, ticket)
        assert all(bool((layer == 7).all()) for layer in seen) is fenced, f"turn {turn}"
        assert bool((world.by_block == 7).all())
        assert kernel_calls(world) == launched + 1


def kernel_calls(world: GpuWorld) -> int:
    assert world.engine.cuda_lane is not None
    return next(calls for path, _, _, calls in world.engine.cuda_lane.counts() if path == "kernel")


def test_two_gpus_of_one_process_move_their_own_bytes(torch: Any) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs, has {torch.cuda.device_count()}")
    worlds = [GpuWorld(torch, 5, 4096, False, True, True, device=device) for device in (0, 1)]
    before = []
    for world in worlds:
        world.pool_memory.random_(0, 256)
        before.append(world.by_block.clone())
    for world in worlds:
        torch.cuda.synchronize(world.device)
    blocks, targets = [0, 1, 2, 5], [9, 7, 6, 8]
    # Ops on both GPUs run at once. One thread submits them; its current device may differ from an op's device.
    for kind, places in ((OpKind.D2H, blocks), (OpKind.H2D, targets)):
        tickets = [world.submit(kind, places, blocks) for world in worlds]
        for world, ticket in zip(worlds, tickets, strict=True):
            assert world.engine.wait(ticket, LONG_S)
            assert world.engine.poll()[0].status is OpStatus.OK
    for world, was in zip(worlds, before, strict=True):
        expected = was.clone()
        expected[targets] = was[blocks]
        assert torch.equal(world.by_block, expected)
        world.close()
