"""The two systems that benchmarks/disk.py measures: a disk tier with a host pool and a transfer engine, and the raw I/O
loop.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import subprocess
import tempfile
import time
from collections import deque
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from build_support.preflight import compiler
from flexkv import c_ext
from flexkv.storage.base import DiskGroup, DiskIdentity, DiskOptions
from flexkv.storage.group_tables import codec_of
from flexkv.storage.header import read_header
from flexkv.storage.striped_slabs import StripedSlabs
from flexkv.storage.tags import make_tags
from flexkv.transfer.base import Ticket
from flexkv.transfer.engine import TransferEngine
from flexkv.transfer.graph import OpId, OpKind, OpStatus, Priority, TransferGraph, TransferOp
from flexkv.transfer.host_pool import HostPool

KIB, MIB = 1 << 10, 1 << 20
BATCH_BYTES = 128 * MIB
"""Bytes that one graph moves. IN_FLIGHT graphs are in flight at a time."""
IN_FLIGHT = 2
BLOCK_TOKENS = 16
LAYERS = 16
DEPTH = 32
WAIT_S = 300.0
IDENTITY = DiskIdentity("benchmark", bytes(32))


@functools.cache
def raw_loop() -> ctypes.CDLL:
    """Compiles raw_loop.cpp, which is not part of the product, together with the I/O queues of csrc/io, and loads the
    library.
    """
    root = Path(__file__).resolve().parents[1]
    library = Path(tempfile.mkdtemp()) / "raw_loop.so"
    sources = [root / "benchmarks/raw_loop.cpp"]
    sources += [root / f"csrc/io/{name}.cpp" for name in ("uring", "uring_queue", "thread_queue")]
    command = [*(compiler() or "g++").split(), "-std=c++20", "-O3", "-shared", "-fPIC", f"-I{root / 'csrc'}"]
    subprocess.run([*command, "-o", str(library), *map(str, sources), "-lpthread"], check=True)
    return ctypes.CDLL(str(library))


def group_of(page_bytes: int) -> DiskGroup:
    """Returns a KV group of LAYERS layers whose pages are `page_bytes` long. Each layer has a contiguous run of K and
    one of V.
    """
    run = page_bytes // (2 * LAYERS)
    runs = np.array([(i * run, run, i // 2) for i in range(2 * LAYERS)], np.int64)
    return DiskGroup("benchmark", (page_bytes,), (runs,), BLOCK_TOKENS)


class Rig:
    """A tier of `slots` pages on one disk, a host pool of `host_slots` slots, and a transfer engine that moves pages
    between them. Arguments named `places` are disk slots.
    """

    def __init__(
        self,
        folder: Path,
        page_bytes: int,
        slots: int,
        host_slots: int | None = None,
        preallocate: bool = True,
        register_buffers: bool = False,
    ) -> None:
        self.page_bytes, self.slots = page_bytes, slots
        self.batch = min(slots, BATCH_BYTES // page_bytes)
        host_slots = host_slots or IN_FLIGHT * self.batch
        self.group = group_of(page_bytes)
        image = codec_of(self.group).image_bytes
        options = DiskOptions(
            slots * image, depth=DEPTH, preallocate=preallocate, register_buffers=register_buffers
        )
        self.unit = StripedSlabs.open([folder], IDENTITY, [self.group], options)
        self.pool = HostPool(image, host_slots)
        assert self.pool.wait_ready(host_slots, WAIT_S)
        for slot in range(host_slots):
            self.pool.slot(slot)[:] = slot % 251
        self.lane = self.unit.lane([self.pool])
        self.engine = TransferEngine(lanes=[self.lane])
        self.op_ids = itertools.count(1)
        self.generations = np.zeros(slots, np.uint64)
        self.written_s = np.zeros(slots)
        """Time by `time.monotonic`, for each disk slot, at which the program noticed the end of the latest write to the
        slot."""
        self.lags_s: list[NDArray[np.float64]] = []
        """Seconds from the end of a page's write until a poll reported the page as durable; one array per report."""
        self.keys = np.random.default_rng(0).integers(0, 256, (slots, 16), dtype=np.uint8)
        slab = next(folder.rglob("group0.slab"))
        header = read_header(str(slab))
        self.slab = c_ext.SlabFile(str(slab), header.header_bytes, image, slots, header.slab_id)

    def submit(
        self, kind: OpKind, places: NDArray[np.int32], slots: NDArray[np.int32], layerwise: bool = False
    ) -> Ticket:
        priority = Priority.LOAD if kind is OpKind.DISK_READ else Priority.STORE
        tags = make_tags(self.keys[places], self.unit.epoch, self.generations[places], BLOCK_TOKENS)
        none = np.empty(0, np.int32)
        op = TransferOp(OpId(next(self.op_ids)), kind, 0, priority, none, slots, layerwise, places, tags)
        ticket = self.engine.submit(TransferGraph((op,)))
        assert ticket is not None
        return ticket

    def finish(self, ticket: Ticket) -> None:
        assert self.engine.wait(ticket, WAIT_S)
        for result in self.engine.poll():
            assert result.status is OpStatus.OK, result.reason

    def _batches(self, kind: OpKind, places: NDArray[np.int32]) -> None:
        """Reads or writes the pages in the disk slots `places` in batches, with IN_FLIGHT batches in flight."""
        moving: deque[tuple[Ticket, NDArray[np.int32]]] = deque()
        parts = [places[first : first + self.batch] for first in range(0, len(places), self.batch)]
        for number, part in enumerate(parts):
            if len(moving) == IN_FLIGHT:
                self._end(kind, *moving.popleft())
            slots = np.arange(len(part), dtype=np.int32) + np.int32(number % IN_FLIGHT * self.batch)
            moving.append((self.submit(kind, part, slots), part))
        while moving:
            self._end(kind, *moving.popleft())

    def _end(self, kind: OpKind, ticket: Ticket, part: NDArray[np.int32]) -> None:
        self.finish(ticket)
        if kind is OpKind.DISK_WRITE:
            tokens = np.full(len(part), BLOCK_TOKENS, np.int32)
            self.written_s[part] = time.monotonic()
            assert self.unit.record_publish(0, self.keys[part], part, self.generations[part], tokens)
            self._hear()

    def _hear(self) -> int:
        """Polls the tier, and records the time from each page's write until it was durable. Returns how many pages
        became durable since the last poll."""
        events, now_s = self.unit.poll(), time.monotonic()
        assert not events.lost, events.lost
        self.lags_s += [now_s - self.written_s[pages.places] for pages in events.durable]
        return sum(len(pages.places) for pages in events.durable)

    def write(self, places: NDArray[np.int32]) -> None:
        """Writes the pages in the disk slots `places`, and returns when all of them are durable."""
        self.generations[places] = self.unit.next_generations(len(places))
        before = len(self.lags_s)
        self._batches(OpKind.DISK_WRITE, places)
        left, deadline = len(places) - sum(map(len, self.lags_s[before:])), time.monotonic() + WAIT_S
        while left:
            left -= self._hear()
            assert time.monotonic() < deadline
            if left:
                time.sleep(0.0005)

    def read(self, places: NDArray[np.int32]) -> None:
        self._batches(OpKind.DISK_READ, places)

    def load(self, places: NDArray[np.int32], layerwise: bool) -> tuple[float, float]:
        """Reads all `places` with one op. Returns the seconds until the first layer of all pages is verified in host
        memory, and until all layers are.
        """
        slots = np.arange(len(places), dtype=np.int32)
        start = time.perf_counter()
        ticket = self.submit(OpKind.DISK_READ, places, slots, layerwise)
        assert self.engine.wait_layer(ticket, 0, WAIT_S).ok
        first = time.perf_counter() - start
        self.finish(ticket)
        return first, time.perf_counter() - start

    def bare(self, places: NDArray[np.int32], write: bool) -> None:
        """Reads or writes the pages in the disk slots `places` with one call of the raw I/O loop. A write ends with one
        fdatasync."""
        host = self.pool.slots
        buffers = np.array([self.pool.slot(i % host).ctypes.data for i in range(len(places))], np.uint64)
        offsets = np.array([self.slab.offset(place) for place in places.tolist()], np.int64)
        addresses = (ctypes.c_void_p(buffers.ctypes.data), ctypes.c_void_p(offsets.ctypes.data))
        count, size = ctypes.c_int64(len(places)), ctypes.c_int64(self.page_bytes)
        assert raw_loop().raw_loop(self.slab.fd, *addresses, count, size, int(write), DEPTH) == 0
        if write:
            assert self.slab.sync() == 0

    def clear_ahead(self) -> None:
        """Writes one page, and then waits until the idle disk has cleared all other slots."""
        self.write(np.zeros(1, np.int32))
        known, quiet, deadline = -1, 0, time.monotonic() + WAIT_S
        while quiet < 5:
            now = self.lane.counts(0)["zeroed_bytes"]
            quiet = quiet + 1 if now == known and now > 0 else 0
            known = now
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def close(self) -> None:
        assert self.engine.close(WAIT_S)
        self.unit.close(WAIT_S)
        self.pool.close()
