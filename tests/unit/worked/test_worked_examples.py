"""flexkv implements five documents, which contain worked examples. These tests compute each example's numbers with
flexkv's code and compare them with the document's.

The documents are about: the layer pipeline (from buffers to paged memory); two requests in a CPU offload connector; the
flow through POSIX files; staged GDS transfers; and tokens and blocks in a cache's connector. Some documents have
mistakes: two different sizes of a block, V of layer 0 taken for layer 1, and an enumeration in another order. In these
cases the test uses the numbers that follow from the document's own assumptions, and a comment names the mistake.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from flexkv.cache.base import GroupSpec
from flexkv.cache.keys import namespace_digest, tail_candidates, tail_key
from flexkv.config import load_config
from flexkv.config.sizes import format_size
from flexkv.transfer.layerwise.chunks import Chunk, ChunkSet
from flexkv.transfer.layerwise.host_device import HostDevice
from flexkv.transfer.layerwise.load import LoadPipeline
from flexkv.transfer.layerwise.paged import PagedLayers
from flexkv.transfer.layerwise.rows import PageRows
from flexkv.transfer.raw.gds_worker import GDSTransferWorker, RawFileLayout, RawPool
from flexkv.transfer.staging_limits import staging_cut
from tests.unit.cache.host_world import end, ids, make
from tests.unit.transfer.layerwise.layer_world import GENEROUS_S, LayerWorld, ReorderingDevice

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
BLOCK_TOKENS = 16
NAMESPACE = namespace_digest({"model": "worked"})


# --- the layer pipeline ---


def test_the_table_of_steps_for_32_layers() -> None:
    """Section "whole table of the sequence": 32 layers take 34 steps; layer 0 is written to paged memory in step 2, and
    layer 31 in step 33."""
    world = LayerWorld(3, layers=32)
    device = ReorderingDevice(0)
    steps = world.pipeline(device).run()
    next(steps)
    for layer in range(32):
        steps.send(world.sources(layer))
    next(steps)
    step_of: dict[tuple[str, int], int] = {}
    step = 0
    for number, work in enumerate(device.given):
        # A step begins with its scatter (the write to paged memory), or with its transform if it has no scatter. Step 0
        # has only a load.
        if work[0] == "scatter" or (work[0] == "transform" and device.given[number - 1][0] != "scatter"):
            step += 1
        step_of[work] = step
    assert max(step_of.values()) + 1 == 34
    table = {  # for each step, the layers that are written to paged memory, transformed and loaded
        0: (None, None, 0),
        1: (None, 0, 1),
        2: (0, 1, 2),
        3: (1, 2, 3),
        4: (2, 3, 4),
        31: (29, 30, 31),
        32: (30, 31, None),
        33: (31, None, None),
    }
    for at, layers in table.items():
        for stage, expected in zip(("scatter", "transform", "load"), layers, strict=True):
            found = [of for (name, of), when in step_of.items() if name == stage and when == at]
            assert found == ([] if expected is None else [expected]), (at, stage)
    # Section "One layer's way": layer 5 is loaded in step 5, transformed in step 6 and written in step 7.
    assert [step_of[(stage, 5)] for stage in ("load", "transform", "scatter")] == [5, 6, 7]
    assert len(device.buffers) == 2, "two buffers serve all layers"


# --- two requests through a CPU offload connector ---


def test_the_settings_of_the_walk_are_taken_by_their_names() -> None:
    """Section "start of the service": each rank gets 3 GiB of host memory, and blocks are stored as soon as they are
    computed. flexkv accepts these settings by their names in the document."""
    config = load_config({"cpu_bytes_to_use_per_rank": 3221225472, "lazy_offload": False}, {})
    assert config.host.bytes_per_rank == 3 * GIB
    assert config.store.mode == "eager"


def test_k_of_a_block_in_one_layer_is_128_kib(tmp_path: Path) -> None:
    """Sections "assumptions" and "worker": 16 tokens of 32 heads with 128 float16 numbers are 128 KiB in one layer, and
    4 MiB in 32 layers.

    The document calls this the size of a block, but it is only the size of the block's K. With V, a block is twice as
    large.
    """
    k_bytes = BLOCK_TOKENS * 32 * 128 * 2
    assert k_bytes == 128 * KIB
    layout = RawFileLayout.dense(32, k_bytes, blocks_per_file=1)
    assert layout.block_stride == 2 * 4 * MIB
    assert RawFileLayout.dense(32, k_bytes, blocks_per_file=1, kv_dim=1).block_stride == 4 * MIB


def test_a_second_request_loads_the_three_tokens_that_the_first_one_stored() -> None:
    """Sections "request A" to "final state": host memory has 50 blocks of 16 tokens. The first request has 3 tokens,
    and the second one has 7, which begin with these 3.

    The second request loads 3 tokens and computes 4, in another block. Both partial tails stay cached, so 48 of the 50
    blocks are free. The document has two mistakes: an engine with 100 blocks gets a block 101, and two different
    contents have the same key.
    """
    first = np.array([11, 12, 13], np.uint32)
    second = np.concatenate([first, np.array([21, 22, 23, 24], np.uint32)])
    assert -(-len(first) // BLOCK_TOKENS) == -(-len(second) // BLOCK_TOKENS) == 1
    manager = make(50, (GroupSpec(BLOCK_TOKENS, 50),))
    none = np.empty((0, 16), np.uint8)

    candidates = tail_candidates(NAMESPACE, 0, None, b"", first, BLOCK_TOKENS, 0)
    assert manager.match("A", [none], 0, [candidates]).tail_tokens == 0
    manager.release("A")
    key_a = tail_key(NAMESPACE, 0, None, b"", first, 0)
    plan = manager.begin_store("A", 0, key_a, ids(61), 0, tokens=3)
    assert plan.graph is not None
    (offload,) = plan.graph.ops
    assert end(manager, offload.op_id) is not None
    assert manager.free_slots(0) == 49, "1 of 50 is used"

    match = manager.match("B", [none], 0, [tail_candidates(NAMESPACE, 0, None, b"", second, BLOCK_TOKENS, 0)])
    assert (match.blocks, match.tail_tokens) == (0, 3), "3 tokens can be loaded"
    assert len(second) - match.tail_tokens == 4, "4 are computed"
    graph = manager.begin_load("B", [ids(62)], tail=True)
    assert graph is not None
    (load,) = graph.ops
    assert load.blocks.tolist() == [62], "a block of its own, not the first request's"
    assert load.slots.tolist() == offload.slots.tolist()
    assert end(manager, load.op_id) is not None
    key_b = tail_key(NAMESPACE, 0, None, b"", second, 0)
    assert key_b.tolist() != key_a.tolist()
    plan = manager.begin_store("B", 0, key_b, ids(62), 0, tokens=7)
    assert plan.graph is not None
    (offload_b,) = plan.graph.ops
    assert offload_b.slots.tolist() != offload.slots.tolist()
    assert end(manager, offload_b.op_id) is not None
    assert manager.free_slots(0) == 48, "48 of 50 are free"


# --- the flow through POSIX files ---


class RawRank:
    """A rank's pool in plain memory, in the layout of a backend: 0 for vLLM, 1 for TensorRT-LLM, 2 for SGLang."""

    def __init__(self, layers: int, blocks: int, chunk: int, backend: int = 0) -> None:
        self.memory = np.random.default_rng(1).integers(0, 256, (layers, 2, blocks, chunk), np.uint8)
        if backend == 1:  # the pool is [block][layer][kv], and begins on a 4 KiB boundary
            raw = np.empty(self.memory.size + 4096, np.uint8)
            start = -raw.ctypes.data % 4096
            self.memory = raw[start : start + self.memory.size].reshape(blocks, layers, 2, chunk)
            pointers = (self.memory.ctypes.data,)
            self.pool = RawPool(1, pointers, 2 * layers * chunk, chunk, 2 * chunk)
        elif backend == 2:  # the pool has K of each layer, then V of each layer
            planes = [self.memory[layer, kv] for kv in (0, 1) for layer in range(layers)]
            self.pool = RawPool(2, tuple(plane.ctypes.data for plane in planes), chunk)
        else:  # the pool has one tensor per layer, [block][kv]
            self.memory = self.memory.reshape(layers, blocks, 2, chunk)
            pointers = tuple(self.memory[layer].ctypes.data for layer in range(layers))
            self.pool = RawPool(0, pointers, 2 * chunk, chunk)


def test_the_table_of_offsets_in_a_file(tmp_path: Path) -> None:
    """Section "details of the offsets": a file has a header of 1 KiB, then K and V of each layer, 2 MiB each.

    2 MiB are 256 tokens of 32 heads with 128 float16 numbers. The document reads its array as one offset per layer. In
    fact the array has two per layer, for K and for V: [1] is V of layer 0, and layer 1 begins at [2].
    """
    token = 32 * 128 * 2
    assert token == 8 * KIB
    chunk = 256 * token
    assert chunk == 2 * MIB
    offsets = [1 * KIB, 2049 * KIB, 4097 * KIB, 6145 * KIB]
    layers = 2
    rank = RawRank(layers, 1, chunk)
    block = KIB + 2 * layers * chunk
    files = RawFileLayout(layers, chunk, 2 * chunk, chunk, block, blocks_per_file=1, copy_offset=KIB)
    path = tmp_path / "a1b2c3d4.kv"
    worker = GDSTransferWorker(rank.pool, files, {0: [str(path)]}, config=load_config(None, {}).gds)
    worker.write([0], [0])
    worker.close()
    content = np.fromfile(path, np.uint8)
    for number, offset in enumerate(offsets):
        layer, kv = divmod(number, 2)
        assert (content[offset : offset + chunk] == rank.memory[layer, 0, kv]).all(), offset
    assert not content[:KIB].any(), "the header is not the transfer's"


def test_slots_80_to_95_are_block_5() -> None:
    """Section "memory from host to GPU": block 5 has slots 80 to 95, and block 10 has slots 160 to 175."""
    paged = paged_layers(1, 16)[0]
    for block, slots in ((5, range(80, 96)), (10, range(160, 176))):
        blocks, tokens = paged.split(np.array(slots, np.int64))
        assert set(blocks.tolist()) == {block}
        assert tokens.tolist() == list(range(16))


# --- staged GDS transfers ---


def test_staging_of_a_70b_model_takes_a_gib_and_a_quarter(tmp_path: Path) -> None:
    """Section "memory that it costs": 128 KiB each for K and V, in 80 layers, for 64 blocks, are 1.25 GiB.

    The test allocates only one staging slot. By default 64 slots are requested, and they are within the limit in bytes.
    """
    gds = load_config(None, {}).gds
    files = RawFileLayout.dense(80, 128 * KIB, blocks_per_file=1)
    rank = RawPool(0, tuple(range(1 << 32, (1 << 32) + 80 * MIB, MIB)), 256 * KIB, 128 * KIB)
    worker = GDSTransferWorker(
        rank, files, {0: [str(tmp_path / "kv")]}, config=gds.model_copy(update={"max_staging_blocks": 1})
    )
    assert worker.manager.staging_bytes == 128 * KIB * 2 * 80
    worker.close()
    assert 128 * KIB * 2 * 80 * gds.max_staging_blocks == 5 * GIB // 4
    assert format_size(5 * GIB // 4) == "1.2 GiB"
    assert staging_cut(64, files.block_stride, gds.max_staging_blocks, gds.max_staging_bytes) == ""
    assert gds.max_staging_bytes // files.block_stride >= 64


# For each engine: its number in the document's interface, and the I/O calls for a block of 80 layers without staging
# and with staging. The document also shows an enumeration of the engines in another order, which is a mistake.
CALLS = {"vLLM": (0, 80, 1), "TensorRT-LLM": (1, 1, 1), "SGLang": (2, 160, 1)}


@pytest.mark.parametrize("engine", CALLS)
def test_calls_for_a_block_of_80_layers(engine: str, tmp_path: Path) -> None:
    """Section "what to expect": with staging, one call replaces 80 calls (vLLM) or 160 (SGLang). TensorRT-LLM needs
    only one call per block even without staging."""
    backend, direct, staged = CALLS[engine]
    rank = RawRank(80, 3, 4096, backend)
    files = RawFileLayout.dense(80, 4096, blocks_per_file=4)
    for use_staged, calls in ((False, direct), (True, staged)):
        worker = GDSTransferWorker(
            rank.pool, files, {0: [str(tmp_path / f"{use_staged}")]}, use_staged_transfer=use_staged
        )
        worker.write([2], [1])
        assert worker.manager.totals["io_calls"] == calls
        straight = not use_staged or (backend == 1 and worker.manager.totals["launches"] == 0)
        assert (worker.manager.staging_bytes == 0) == straight
        worker.close()


def test_the_two_variables_and_their_defaults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Section "settings": by default staging is on, with 64 blocks. One environment variable turns staging off with 0.
    The other one sets 128 blocks. Arguments override the two variables."""
    # The pool has two blocks, because the layers of a single block would be contiguous, and would need no staging if
    # their address happened to be aligned.
    rank, files = RawRank(2, 2, 4096), RawFileLayout.dense(2, 4096, blocks_per_file=1)

    def worker(**arguments: object) -> tuple[bool, int, int]:
        made = GDSTransferWorker(rank.pool, files, {0: [str(tmp_path / "kv")]}, **arguments)  # type: ignore[arg-type]
        found = made.use_staged_transfer, made.max_staging_blocks, made.manager.staging_slots
        made.close()
        return found

    assert worker() == (True, 64, 64)
    monkeypatch.setenv("FLEXKV_GDS_MAX_STAGING_BLOCKS", "128")
    assert worker() == (True, 128, 128)
    monkeypatch.setenv("FLEXKV_GDS_USE_STAGED_TRANSFER", "0")
    assert worker() == (False, 128, 0)
    assert worker(use_staged_transfer=True, max_staging_blocks=7) == (True, 7, 7)


# --- tokens and blocks of a connector ---


def paged_layers(layers: int, blocks: int) -> tuple[PagedLayers, list[NDArray[np.int32]]]:
    """Returns paged memory [layer][K, V][block][token][head][width], and a list with the array of each layer."""
    memory = [np.zeros((2, blocks, BLOCK_TOKENS, 1, 4), np.int32) for _ in range(layers)]
    return PagedLayers([list(layer) for layer in memory]), memory


def test_300_tokens_go_to_slots_1600_and_3200() -> None:
    """Section "an example of the conversion": 300 tokens need 19 blocks of 16 tokens. The request's blocks 0, 1 and 18
    are the engine's blocks 100, 200 and 50.

    Token 0 has slot 1600, token 16 has slot 3200, and the last token, 299, has slot 50 * 16 + 11. Two chunks of up to
    256 tokens cover the tokens: [0, 256) and [256, 300).
    """
    count = 300
    assert -(-count // BLOCK_TOKENS) == 19
    others = [number for number in range(201) if number not in (100, 200, 50)]
    table = np.array([100, 200, *others[:16], 50], np.int64)
    slots = (table[:, None] * BLOCK_TOKENS + np.arange(BLOCK_TOKENS)).reshape(-1)[:count]
    assert (slots[0], slots[16], slots[299]) == (1600, 3200, 50 * 16 + 11)

    layers = 2
    paged, memory = paged_layers(layers, 201)
    chunks = ChunkSet([Chunk(0, 256), Chunk(256, 300)])
    assert (chunks.rows, chunks.gaps.size) == (300, 0)
    device = HostDevice(one_thread=True)
    try:
        steps = LoadPipeline(device, paged, slots, chunks).run()
        rows = [
            np.arange(2 * 300 * 4, dtype=np.int32).reshape(2, 300, 1, 4) + 10_000 * n for n in range(layers)
        ]
        next(steps)
        for layer in range(layers):
            steps.send([PageRows([rows[layer][:, :256]]), PageRows([rows[layer][:, 256:]])])
        report = next(steps)
        assert report is not None
        assert report.quiet
        steps.close()
    finally:
        assert device.close(GENEROUS_S)
    for layer in range(layers):
        for plane in (0, 1):
            by_slot = memory[layer][plane].reshape(-1, 1, 4)
            assert (by_slot[slots] == rows[layer][plane]).all()
            assert (by_slot[1600] == rows[layer][plane][0]).all()
            assert (by_slot[3200] == rows[layer][plane][16]).all()
            untouched = np.setdiff1d(np.arange(201 * BLOCK_TOKENS), slots)
            assert not by_slot[untouched].any()


def test_missing_tokens_name_their_blocks() -> None:
    """Section "errors and recomputing": the engine recomputes the blocks with the slots of tokens that did not arrive.

    With the blocks of the previous example: tokens 17 and 290 are missing, so the engine's blocks 200 and 50 are
    recomputed.
    """
    table = np.array([100, 200, *range(16), 50], np.int64)
    slots = (table[:, None] * BLOCK_TOKENS + np.arange(BLOCK_TOKENS)).reshape(-1)[:300]
    paged = PagedLayers([[np.zeros((201, BLOCK_TOKENS, 1, 4), np.int32)]])
    blocks, _ = paged.split(slots[[17, 290]])
    assert sorted(set(blocks.tolist())) == [50, 200]
