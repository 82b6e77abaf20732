"""Ranks with a pool each, and one disk tier. Each rank moves its stripe with a GDS lane. The manager's transfer engine
seals the same pages, and can read and write them through host slots.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexkv import c_ext
from flexkv.config import GdsConfig
from flexkv.storage.base import DiskGroup, DiskOptions
from flexkv.storage.group_tables import codec_of
from flexkv.storage.striped_slabs import StripedSlabs
from flexkv.storage.tags import make_tags
from flexkv.transfer.engine import TransferEngine
from flexkv.transfer.gds_lane import make_gds_lane
from flexkv.transfer.graph import (
    NO_DIGESTS,
    OpId,
    OpKind,
    OpResult,
    Priority,
    RunDigests,
    TransferGraph,
    TransferOp,
)
from flexkv.transfer.host_pool import HostPool
from tests.unit.storage.disk_world import BLOCK_TOKENS, GENEROUS_S, IDENTITY, ids


def keys_of(places: Sequence[int]) -> NDArray[np.uint8]:
    return np.stack([np.frombuffer(place.to_bytes(16, "big", signed=True), np.uint8) for place in places])


class Rank:
    """A rank's pool of runs [layers * kv][blocks], or [blocks][layers * kv] if `block_first`, in plain memory."""

    def __init__(self, layers: int, kv: int, run: int, blocks: int, block_first: bool, seed: int) -> None:
        self.runs, self.blocks, self.run = layers * kv, blocks, run
        size = self.runs * blocks * run
        raw = np.zeros(size + 4096, np.uint8)
        start = -raw.ctypes.data % 4096
        self.raw = raw
        flat = raw[start : start + size]
        shape = (blocks, self.runs, run) if block_first else (self.runs, blocks, run)
        self.memory = flat.reshape(shape)
        self.by_block = self.memory if block_first else self.memory.transpose(1, 0, 2)
        self.memory[:] = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
        stride, step = (self.runs * run, run) if block_first else (run, blocks * run)
        base = flat.ctypes.data
        rows = [[base + i * step, stride, run, i * run, i // kv] for i in range(self.runs)]
        self.view = c_ext.KvView(np.array(rows, np.int64), blocks, self.runs * run)


class SlabWorld:
    def __init__(
        self,
        folders: Sequence[Path],
        layers: int = 3,
        kv: int = 2,
        run: int = 4096,
        ranks: int = 1,
        blocks: int = 12,
        block_first: bool = False,
        staged: bool | None = None,
        staging_blocks: int | None = 3,
        device: int | None = None,
        make_rank: Callable[[int, int, int, int, bool, int], Any] = Rank,
    ) -> None:
        self.stream: int | None = None
        table = np.array([(i * run, run, i // kv) for i in range(layers * kv)], np.int64)
        group = DiskGroup(
            "test", (layers * kv * run,) * ranks, (table,) * ranks, BLOCK_TOKENS, "uint8", False
        )
        self.codec = codec_of(group)
        self.blocks = blocks
        options = DiskOptions(32 * self.codec.image_bytes, preallocate=False)
        self.unit = StripedSlabs.open(folders, IDENTITY, [group], options)
        self.pool = HostPool(self.codec.image_bytes, 16)
        assert self.pool.wait_ready(16, GENEROUS_S)
        self.manager = TransferEngine(lanes=[self.unit.lane([self.pool])])
        self.slabs = self.unit.slab_map()
        self.op_ids = itertools.count(1)
        self.ranks: list[Any] = []
        self.engines: list[TransferEngine] = []
        self.lanes: list[c_ext.GdsLane] = []
        for number in range(ranks):
            rank = make_rank(layers, kv, run, blocks, block_first, number)
            lane = make_gds_lane(
                self.slabs, number, device, GdsConfig(), staged, staging_blocks, views=[rank.view]
            )
            engine = TransferEngine(lanes=[lane], device=device)
            engine.attach_view(
                0,
                rank.view,
                self.pool,
                self.codec.stripe_offset(number),
                owners=[rank.raw],
            )
            self.ranks.append(rank)
            self.engines.append(engine)
            self.lanes.append(lane)
        self.generations = self.unit.next_generations(64)

    def tags(self, places: Sequence[int], **change: int) -> NDArray[np.uint8]:
        given = SimpleNamespace(
            **{"epoch": self.unit.epoch, "later": 0, "tokens": BLOCK_TOKENS, "key": 0, "expiry": 0, **change}
        )
        generations = self.generations[list(places)] + np.uint64(given.later)
        return make_tags(
            keys_of([place + given.key for place in places]),
            given.epoch,
            generations,
            given.tokens,
            given.expiry,
        )

    def op(
        self,
        kind: OpKind,
        places: Sequence[int],
        blocks: Sequence[int] = (),
        slots: Sequence[int] = (),
        digests: RunDigests = NO_DIGESTS,
        **change: int,
    ) -> TransferOp:
        priority = Priority.LOAD if kind in (OpKind.GDS_READ, OpKind.DISK_READ) else Priority.STORE
        return TransferOp(
            OpId(next(self.op_ids)),
            kind,
            0,
            priority,
            ids(blocks),
            ids(slots),
            False,
            ids(places),
            self.tags(places, **change),
            digests,
        )

    def run(self, engine: TransferEngine, *ops: TransferOp) -> list[OpResult]:
        ticket = engine.submit(TransferGraph(ops), stream=self.stream if engine in self.engines else None)
        assert ticket is not None
        assert engine.wait(ticket, GENEROUS_S)
        return engine.poll()

    def write_stripes(self, places: Sequence[int], blocks: Sequence[int]) -> list[OpResult]:
        return [self.run(e, self.op(OpKind.GDS_WRITE, places, blocks))[0] for e in self.engines]

    def seal(self, places: Sequence[int], digests: RunDigests, **change: int) -> OpResult:
        return self.run(self.manager, self.op(OpKind.DISK_SEAL, places, (), (), digests, **change))[0]

    def store(self, places: Sequence[int], blocks: Sequence[int], **change: int) -> None:
        """Makes every rank write its stripe of the pages. Then makes the manager's lane write the pages' trailers."""
        written = self.write_stripes(places, blocks)
        assert [result.reason for result in written] == [""] * len(written)
        digests = np.concatenate([result.digests for result in written], axis=1)
        sealed = self.seal(places, digests, **change)
        assert sealed.reason == ""

    def load(self, rank: int, places: Sequence[int], blocks: Sequence[int], **change: int) -> OpResult:
        return self.run(
            self.engines[rank], self.op(OpKind.GDS_READ, places, blocks, (), NO_DIGESTS, **change)
        )[0]

    def flip(self, place: int, offset: int) -> None:
        """Flips a bit in the slot image of a page on disk, at `offset` in the image."""
        at = self.image_at(place) + offset
        with open(self.slabs.disks[place % self.unit.disks][0].path, "r+b") as slab:
            slab.seek(at)
            byte = slab.read(1)[0]
            slab.seek(at)
            slab.write(bytes([byte ^ 4]))
            slab.flush()
            os.fsync(slab.fileno())

    def image_at(self, place: int) -> int:
        """Returns the offset of the slot image of disk slot `place` in its disk's slab."""
        row = self.slabs.disks[place % self.unit.disks][0]
        return row.header_bytes + place // self.unit.disks * row.slot_bytes

    def close(self) -> None:
        for engine in [*self.engines, self.manager]:
            assert engine.close(GENEROUS_S)
        assert self.unit.close(GENEROUS_S)
        self.pool.close()
