"""The CUDA lane on a real GPU: every byte of every path, and fences while the engine's stream is busy."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from flexkv import c_ext
from flexkv.transfer.engine import TransferEngine
from flexkv.transfer.graph import OpId, OpKind, OpStatus, Priority, TransferGraph, TransferOp
from flexkv.transfer.host_pool import HostPool

pytestmark = pytest.mark.gpu

LONG_S = 60.0
BLOCKS = 24


@pytest.fixture(scope="module")
def torch() -> Any:
    found = c_ext.cuda_info()
    if not found["device_count"]:
        pytest.skip(f"no GPU: {found['reason']}")
    module = pytest.importorskip("torch", reason="the GPU tests make the engine's pool with torch")
    if not module.cuda.is_available():
        pytest.skip("torch was built without CUDA")
    return module


class GpuWorld:
    """A layer-first or block-first pool on GPU 0, a host pool, and an engine between."""

    def __init__(
        self, torch: Any, layers: int, run_bytes: int, block_first: bool, batch: bool, kernel: bool
    ) -> None:
        self.torch, self.layers, self.run_bytes = torch, layers, run_bytes
        shape = (BLOCKS, layers, run_bytes) if block_first else (layers, BLOCKS, run_bytes)
        self.pool_memory = torch.zeros(shape, dtype=torch.uint8, device="cuda:0")
        self.by_block = self.pool_memory if block_first else self.pool_memory.transpose(0, 1)
        base, page = self.pool_memory.data_ptr(), layers * run_bytes
        stride = page if block_first else run_bytes
        step = run_bytes if block_first else BLOCKS * run_bytes
        rows = [[base + layer * step, stride, run_bytes, layer * run_bytes, layer] for layer in range(layers)]
        self.view = c_ext.KvView(np.array(rows, dtype=np.int64), BLOCKS, page)
        self.pool = HostPool(-(-page // 4096) * 4096, BLOCKS)
        self.pool.pin(0)
        assert self.pool.wait_ready(BLOCKS, LONG_S)
        self.engine = TransferEngine(device=0, batch_copies=batch, copy_kernel=kernel)
        self.engine.attach_view(0, self.view, self.pool, owners=[self.pool_memory])
        self.ids = itertools.count(1)

    def stream(self) -> int:
        return int(self.torch.cuda.current_stream(0).cuda_stream)

    def submit(self, kind: OpKind, blocks: list[int], slots: list[int], layerwise: bool = False) -> Any:
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
        ticket = self.engine.submit(TransferGraph((op,), ()), stream=self.stream())
        assert ticket is not None
        return ticket

    def run(self, kind: OpKind, blocks: list[int], slots: list[int], layerwise: bool = False) -> None:
        assert self.engine.wait(self.submit(kind, blocks, slots, layerwise), LONG_S)
        (result,) = self.engine.poll()
        assert result.status is OpStatus.OK, result.reason

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


@pytest.mark.parametrize("kernel", [False, True])
def test_fences_hold_while_a_kernel_keeps_rewriting_the_blocks(
    make_gpu_world: Callable[..., GpuWorld], kernel: bool
) -> None:
    world = make_gpu_world(layers=8, run_bytes=16384, kernel=kernel)
    torch = world.torch
    blocks = list(range(8))
    for turn in range(200):
        # The forward: long enough for a copy without a fence to overtake it, and it writes last.
        for value in range(16):
            world.by_block[:8].fill_((turn + value) % 256)
        last = (turn + 15) % 256
        ticket = world.submit(OpKind.D2H, blocks, blocks)
        assert world.engine.wait(ticket, LONG_S)
        assert world.engine.poll()[0].status is OpStatus.OK
        for slot in blocks:
            assert (world.pool.slot(slot)[: 8 * 16384] == last).all(), (
                f"turn {turn}: a store overtook the forward"
            )
        # A forward that reads what a load then overwrites.
        world.by_block[:8].fill_(255 - last)
        for _ in range(8):
            seen = world.by_block[:8].clone()
        ticket = world.submit(OpKind.H2D, blocks, blocks, layerwise=True)
        answer = world.engine.wait_layer(ticket, 7, LONG_S, stream=world.stream())
        assert answer.ok
        after = world.by_block[:8].clone()
        assert world.engine.wait(ticket, LONG_S)
        assert world.engine.poll()[0].status is OpStatus.OK
        torch.cuda.current_stream(0).synchronize()
        assert bool((seen == 255 - last).all()), f"turn {turn}: a load overwrote what was still to be read"
        assert bool((after == last).all()), f"turn {turn}: the forward did not wait for the load"
