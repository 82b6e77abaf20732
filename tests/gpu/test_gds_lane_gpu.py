"""Tests the gds lane with the pool and the staging buffer in GPU memory: every byte arrives, and fences hold while the
engine's stream is busy.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flexkv import c_ext
from flexkv.transfer.graph import OpKind, OpStatus, TransferGraph
from tests.gpu.needs import CUDA_BUILD
from tests.unit.gds.slab_world import SlabWorld
from tests.unit.storage.disk_world import GENEROUS_S

pytestmark = CUDA_BUILD
GPU = 0


class GpuRank:
    """One rank's pool on a GPU, like `Rank` of `slab_world`. Its shape is [runs][blocks][run] or [blocks][runs][run]
    bytes.
    """

    def __init__(self, layers: int, kv: int, run: int, blocks: int, block_first: bool, seed: int) -> None:
        self.runs, self.blocks, self.run = layers * kv, blocks, run
        size = self.runs * blocks * run
        self.raw = torch.zeros(size + 4096, dtype=torch.uint8, device=f"cuda:{GPU}")
        start = -self.raw.data_ptr() % 4096
        shape = (blocks, self.runs, run) if block_first else (self.runs, blocks, run)
        self.memory = self.raw[start : start + size].view(shape)
        self.by_block = self.memory if block_first else self.memory.transpose(0, 1)
        self.memory.random_(0, 256, generator=torch.Generator(f"cuda:{GPU}").manual_seed(seed))
        stride, step = (self.runs * run, run) if block_first else (run, blocks * run)
        base = self.memory.data_ptr()
        rows = [[base + i * step, stride, run, i * run, i // kv] for i in range(self.runs)]
        self.view = c_ext.KvView(np.array(rows, np.int64), blocks, self.runs * run)


def make_world(folder: Path, **shape: Any) -> SlabWorld:
    world = SlabWorld([folder], device=GPU, make_rank=GpuRank, **shape)
    world.stream = torch.cuda.current_stream(GPU).cuda_stream
    return world


@pytest.mark.parametrize("staged", [True, False])
@pytest.mark.parametrize("block_first", [False, True])
@pytest.mark.parametrize(
    ("layers", "kv", "run", "ranks"), [(1, 1, 1, 1), (3, 2, 1000, 2), (5, 1, 18432, 3), (80, 2, 4096, 1)]
)
def test_every_byte_comes_back_and_no_other_changes(
    tmp_path: Path, layers: int, kv: int, run: int, ranks: int, block_first: bool, staged: bool
) -> None:
    world = make_world(
        tmp_path, layers=layers, kv=kv, run=run, ranks=ranks, block_first=block_first, staged=staged
    )
    places, blocks, targets = [9, 2, 17, 4, 0, 11, 6], [3, 11, 0, 7, 5, 1, 8], [2, 0, 9, 10, 4, 6, 11]
    world.store(places, blocks)
    for number, rank in enumerate(world.ranks):
        stored = rank.by_block[blocks].clone()
        rank.memory.fill_(0x5A)
        expected = rank.by_block.clone()
        expected[targets] = stored
        assert world.load(number, places, targets).reason == ""
        assert torch.equal(rank.by_block, expected)
    world.close()


@pytest.mark.parametrize("staged", [True, False])
@pytest.mark.parametrize("block_first", [False, True])
@pytest.mark.parametrize(("layers", "kv", "run"), [(9, 2, 1000), (33, 1, 18432), (80, 2, 4096)])
def test_each_layer_is_there_for_work_enqueued_after_its_wait(
    tmp_path: Path, layers: int, kv: int, run: int, block_first: bool, staged: bool
) -> None:
    """In a layerwise load, work that the engine enqueues after the wait for a layer reads the loaded bytes of this
    layer in every page.
    """
    world = make_world(tmp_path, layers=layers, kv=kv, run=run, block_first=block_first, staged=staged)
    places, blocks, targets = [9, 2, 17, 4, 0, 11, 6], [3, 11, 0, 7, 5, 1, 8], [2, 0, 9, 10, 4, 6, 11]
    world.store(places, blocks)
    rank, engine = world.ranks[0], world.engines[0]
    stored = rank.by_block[blocks].clone()
    rank.memory.fill_(0x5A)
    expected = rank.by_block.clone()
    expected[targets] = stored
    op = replace(world.op(OpKind.GDS_READ, places, targets), layerwise=True)
    ticket = engine.submit(TransferGraph((op,)), stream=world.stream)
    assert ticket is not None
    seen = []
    for layer in range(layers):
        assert engine.wait_layer(ticket, layer, GENEROUS_S, world.stream).in_time
        seen.append(rank.by_block[targets][:, layer * kv : (layer + 1) * kv].clone())
    assert engine.wait(ticket, GENEROUS_S)
    assert engine.poll()[0].reason == ""
    assert torch.equal(torch.cat(seen, 1), stored)
    assert torch.equal(rank.by_block, expected)
    world.close()


@pytest.mark.parametrize("staged", [True, False])
@pytest.mark.parametrize("block_first", [False, True])
def test_damage_is_found_in_the_pool_and_in_the_slots(
    tmp_path: Path, block_first: bool, staged: bool
) -> None:
    world = make_world(tmp_path, block_first=block_first, staged=staged)
    world.store([0, 1, 2], [0, 1, 2])
    world.flip(1, 5000)
    result = world.load(0, [0, 1, 2], [9, 10, 11])
    assert (result.status, result.failed.tolist()) == (OpStatus.FAILED, [1])
    assert "disk miss (data)" in result.reason
    assert torch.equal(world.ranks[0].by_block[[9, 11]], world.ranks[0].by_block[[0, 2]])
    world.close()


@pytest.mark.parametrize("fenced", [True, False], ids=["fenced", "control"])
@pytest.mark.parametrize("block_first", [False, True])
def test_fences_hold_while_a_kernel_keeps_rewriting_the_blocks(
    tmp_path: Path, block_first: bool, fenced: bool
) -> None:
    """The fence of a staged page is a wait in a stream, that of a direct page a wait on the host. Without its fence, a
    transfer would move old bytes. The controls use a stream without work as the fence, and must find old bytes.
    """
    world = make_world(tmp_path, layers=8, run=16384, block_first=block_first)
    rank = world.ranks[0]
    engine_stream = world.stream
    fence = engine_stream if fenced else torch.cuda.Stream(GPU).cuda_stream
    blocks = list(range(8))
    for turn in range(50):
        for value in range(16):
            torch.cuda._sleep(20_000_000)
            rank.by_block[:8].fill_((turn + value) % 256)
        last = (turn + 15) % 256
        world.stream = fence
        world.store(blocks, blocks)
        # Simulates a slow forward pass that reads the blocks before the load overwrites them.
        rank.by_block[:8].fill_(255 - last)
        torch.cuda.current_stream(GPU).synchronize()
        torch.cuda._sleep(200_000_000)
        seen = rank.by_block[:8].clone()
        assert world.load(0, blocks, blocks).reason == ""
        after = rank.by_block[:8].clone()
        torch.cuda.current_stream(GPU).synchronize()
        assert bool((seen == 255 - last).all()) is fenced, (
            f"turn {turn}: the load and what was still to be read"
        )
        assert bool((after == last).all()) is fenced, f"turn {turn}: the store and the forward"
        world.stream = engine_stream
        if not fenced:
            break  # one turn shows that the test can fail
    world.close()


def test_a_stream_is_needed(tmp_path: Path) -> None:
    from flexkv.errors import ContractError

    world = make_world(tmp_path)
    world.stream = None
    with pytest.raises(ContractError, match="none was given"):
        world.run(world.engines[0], world.op(OpKind.GDS_READ, [0], [0]))
    world.close()
