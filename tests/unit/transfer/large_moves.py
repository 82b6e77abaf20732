"""Functions that check moves between a host pool and an engine's pool, in memory of the CPU or of a GPU: large moves,
moves between blocks that are far apart, and moves with digests. The same code runs for CPU and GPU memory.

The argument `device` is the number of a CUDA device, or None for plain memory.
"""

from __future__ import annotations

import itertools
import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexkv import c_ext
from flexkv.transfer.engine import TransferEngine
from flexkv.transfer.graph import OpId, OpKind, OpResult, OpStatus, Priority, TransferGraph, TransferOp
from flexkv.transfer.host_pool import HostPool, PoolDescriptor

LONG_S = 120.0
DIGEST_BYTES = 8
Bytes = NDArray[np.uint8]


def pattern(block: int, layer: int, run_bytes: int, salt: int = 0) -> Bytes:
    return np.random.default_rng([block, layer, salt]).integers(0, 256, run_bytes, np.uint8)


def pool_for(page_bytes: int, runs: int, slots: int, shared: bool = False) -> HostPool:
    """Returns a host pool whose slots have space behind the page for one digest per run."""
    return HostPool(-(-(page_bytes + runs * DIGEST_BYTES) // 4096) * 4096, slots, shared=shared)


class MovesWorld:
    """A layer-first pool of `blocks` blocks, a host pool, and a transfer engine between them.

    Args:
        verify: whether stores make digests and loads check them.
        pool: a host pool that the caller has made; if None, this class makes one with `slots` slots.
    """

    def __init__(
        self,
        device: int | None,
        layers: int,
        run_bytes: int,
        blocks: int,
        slots: int,
        verify: bool = False,
        kernel: bool = True,
        pool: HostPool | None = None,
    ) -> None:
        self.device, self.layers, self.run, self.blocks = device, layers, run_bytes, blocks
        total, page = layers * blocks * run_bytes, layers * run_bytes
        self.memory: Any
        if device is None:
            self.memory = np.zeros(total, np.uint8)
            base = self.memory.ctypes.data
        else:
            import torch

            self.memory = torch.zeros(total, dtype=torch.uint8, device=f"cuda:{device}")
            torch.cuda.synchronize(device)
            base = self.memory.data_ptr()
        rows = [
            [base + layer * blocks * run_bytes, run_bytes, run_bytes, layer * run_bytes, layer]
            for layer in range(layers)
        ]
        self.view = c_ext.KvView(np.array(rows, np.int64), blocks, page)
        self._owns_pool = pool is None
        self.pool = pool_for(page, layers, slots) if pool is None else pool
        self.wait_pinned(slots)
        self.engine = TransferEngine(device=device, copy_kernel=kernel)
        offset = -(-page // DIGEST_BYTES) * DIGEST_BYTES
        self.engine.attach_view(
            0, self.view, self.pool, digest_offset=offset if verify else None, owners=[self.memory]
        )
        self._ids = itertools.count(1)

    def wait_pinned(self, slots: int) -> None:
        """Waits until `slots` slots are pinned. The copy kernel uses only pinned memory, so its tests must wait."""
        if self.device is not None:
            self.pool.pin(self.device)
        assert self.pool.wait_ready(slots, LONG_S), self.pool.stopped_reason
        ends_s = time.monotonic() + LONG_S
        while self.device is not None and self.pool.pinned_slots < slots:
            assert time.monotonic() < ends_s, f"{self.pool.pinned_slots} of {slots} slots are pinned"
            time.sleep(0.01)

    def _range(self, block: int, layer: int) -> slice:
        start = (layer * self.blocks + block) * self.run
        return slice(start, start + self.run)

    def write(self, block: int, salt: int = 0) -> None:
        for layer in range(self.layers):
            given = pattern(block, layer, self.run, salt)
            if self.device is None:
                self.memory[self._range(block, layer)] = given
            else:
                import torch

                self.memory[self._range(block, layer)].copy_(torch.from_numpy(given))
                torch.cuda.synchronize(self.device)

    def holds(self, block: int, of: int | None, salt: int = 0) -> bool:
        """Returns whether `block` has the bytes that `write` gave to block `of`, or only zeros if `of` is None."""
        for layer in range(self.layers):
            run = self.memory[self._range(block, layer)]
            there = run if self.device is None else run.cpu().numpy()
            wanted = np.zeros(self.run, np.uint8) if of is None else pattern(of, layer, self.run, salt)
            if not np.array_equal(there, wanted):
                return False
        return True

    def stream(self) -> int | None:
        if self.device is None:
            return None
        import torch

        return int(torch.cuda.current_stream(self.device).cuda_stream)

    def run_op(
        self, kind: OpKind, blocks: Sequence[int], slots: Sequence[int], stream: Any = None
    ) -> OpResult:
        priority = Priority.LOAD if kind is OpKind.H2D else Priority.STORE
        places = np.array(blocks, np.int32), np.array(slots, np.int32)
        op = TransferOp(OpId(next(self._ids)), kind, 0, priority, *places)
        ticket = self.engine.submit(TransferGraph((op,)), stream=self.stream() if stream is None else stream)
        assert ticket is not None
        assert self.engine.wait(ticket, LONG_S)
        (result,) = self.engine.poll()
        return result

    def move(self, kind: OpKind, blocks: Sequence[int], slots: Sequence[int], stream: Any = None) -> None:
        result = self.run_op(kind, blocks, slots, stream)
        assert result.status is OpStatus.OK, result.reason

    def paths(self) -> dict[str, int]:
        """Returns the number of bytes that each copy path of the GPU has moved, by path. For plain memory, returns an
        empty dict."""
        lane = self.engine.cuda_lane
        return {} if lane is None else {path: moved for path, _, moved, _ in lane.counts() if moved}

    def close(self) -> None:
        assert self.engine.close(LONG_S)
        if self._owns_pool:
            self.pool.close()


def check_runs(device: int | None, run_bytes: int, kernel: bool = True) -> dict[str, int]:
    """Moves blocks to host memory and back into other blocks. Checks that the bytes are equal and that nothing else has
    changed. Returns the number of bytes that each path moved.
    """
    world = MovesWorld(device, 3, run_bytes, 6, 4, kernel=kernel)
    for block in (0, 1, 5):
        world.write(block)
    world.move(OpKind.D2H, [0, 1, 5], [3, 0, 2])
    world.move(OpKind.H2D, [2, 4], [2, 3])
    assert [world.holds(block, of) for block, of in ((0, 0), (1, 1), (2, 5), (3, None), (4, 0), (5, 5))] == [
        True
    ] * 6
    found = world.paths()
    assert sum(found.values()) == (0 if device is None else 5 * 3 * run_bytes)
    world.close()
    return found


def check_far_blocks(device: int | None) -> None:
    """Checks moves in a pool of more than 4 GiB, whose last blocks are beyond the range of a 32-bit offset."""
    run_bytes, blocks = 1 << 20, 2200
    world = MovesWorld(device, 2, run_bytes, blocks, 4)
    assert 2 * blocks * run_bytes > 1 << 32
    last = blocks - 1
    for block in (0, last):
        world.write(block)
    world.move(OpKind.D2H, [0, last], [0, 1])
    world.move(OpKind.H2D, [last - 1, 1], [1, 0])
    # An offset that wraps around would lead to a block 2 GiB or 4 GiB before the last one.
    for block, of in ((last, last), (last - 1, last), (1, 0), (0, 0), (2, None), (last - 2, None)):
        assert world.holds(block, of), block
    world.close()


def check_digests(device: int | None, verify: bool) -> None:
    """Checks that a load with digests finds a flipped byte in host memory. As a control, a load without digests
    delivers the flipped byte.
    """
    world = MovesWorld(device, 4, 4096, 6, 3, verify=verify)
    for block in (0, 1, 2):
        world.write(block)
    world.move(OpKind.D2H, [0, 1, 2], [0, 1, 2])
    world.pool.slot(1)[4096 + 17] ^= 0x40
    result = world.run_op(OpKind.H2D, [3, 4, 5], [0, 1, 2])
    assert result.failed.tolist() == ([1] if verify else [])
    assert (world.holds(3, 0), world.holds(5, 2)) == (True, True)
    assert not world.holds(4, 1)
    world.close()


SECOND_LAYERS, SECOND_RUN, SECOND_BLOCKS = 4, 8192, 4


def _second_process(connection: Connection, descriptor: PoolDescriptor, device: int | None) -> None:
    """Runs in the second process: stores this process's own blocks, then loads the first process's bytes from the
    slots, and reports whether the loaded bytes are right.
    """
    pool = HostPool.attach(descriptor)
    world = MovesWorld(device, SECOND_LAYERS, SECOND_RUN, 2 * SECOND_BLOCKS, SECOND_BLOCKS, pool=pool)
    slots = list(range(SECOND_BLOCKS))
    for block in slots:
        world.write(block, salt=1)
    world.move(OpKind.D2H, slots, slots)
    connection.send("stored")
    assert connection.recv() == "written"
    world.move(OpKind.H2D, [SECOND_BLOCKS + slot for slot in slots], slots)
    connection.send([world.holds(SECOND_BLOCKS + slot, slot, salt=2) for slot in slots])
    world.close()
    pool.close()


def check_second_process(device: int | None) -> None:
    """Checks that a process can attach another process's pool, and can move its own memory to and from this pool. Also
    checks that the two processes see the same bytes.
    """
    page = SECOND_LAYERS * SECOND_RUN
    pool = pool_for(page, SECOND_LAYERS, SECOND_BLOCKS, shared=True)
    assert pool.wait_ready(SECOND_BLOCKS, LONG_S)

    def slot_bytes(slot: int, salt: int) -> Bytes:
        return np.concatenate([pattern(slot, layer, SECOND_RUN, salt) for layer in range(SECOND_LAYERS)])

    spawn = multiprocessing.get_context("spawn")
    mine, theirs = spawn.Pipe()
    child = spawn.Process(target=_second_process, args=(theirs, pool.descriptor(), device), daemon=True)
    child.start()
    theirs.close()
    try:
        assert mine.poll(LONG_S), "the second process stored nothing"
        assert mine.recv() == "stored"
        for slot in range(SECOND_BLOCKS):
            assert np.array_equal(pool.slot(slot)[:page], slot_bytes(slot, 1))
            pool.slot(slot)[:page] = slot_bytes(slot, 2)
        mine.send("written")
        assert mine.poll(LONG_S), "the second process loaded nothing"
        assert mine.recv() == [True] * SECOND_BLOCKS
    finally:
        child.join(LONG_S)
        if child.is_alive():
            child.kill()
            child.join(LONG_S)
    assert child.exitcode == 0
    pool.close()
