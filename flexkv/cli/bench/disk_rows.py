"""Measures every method that moves pages from disk to the engine's pool: `flexkv bench transfer --folder`."""

from __future__ import annotations

import functools
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flexkv import c_ext
from flexkv.cli.bench.bare_reads import CALL_BYTES as BARE_CALL_BYTES
from flexkv.cli.bench.bare_reads import THREADS as BARE_THREADS
from flexkv.cli.bench.bare_reads import BareReads
from flexkv.cli.bench.base import PAGE_LAYERS, PAGE_RUN_BYTES, ComparisonRow
from flexkv.cli.bench.transfer_bench import NULL_STREAM, WAIT_S, copy_path, engine_of
from flexkv.config import TransferConfig, load_config
from flexkv.errors import ContractError
from flexkv.storage.base import DiskGroup, DiskIdentity, DiskOptions
from flexkv.storage.group_tables import codec_of
from flexkv.storage.striped_slabs import StripedSlabs
from flexkv.storage.tags import make_tags
from flexkv.transfer.engine import TransferEngine
from flexkv.transfer.gds_lane import make_gds_lane
from flexkv.transfer.graph import (
    Edge,
    EdgeKind,
    OpId,
    OpKind,
    OpStatus,
    Priority,
    TransferGraph,
    TransferOp,
)
from flexkv.transfer.host_pool import HostPool

KV = 2
"""Runs per layer: K and V."""
BLOCK_TOKENS = 16
NO_IDS = np.empty(0, np.int32)

Ids = NDArray[np.int32]


def disk_rows(
    device: int | None,
    multiprocessors: int,
    folder: Path,
    total_bytes: int,
    repeats: int,
    settings: TransferConfig,
) -> list[ComparisonRow]:
    """Reads the same pages with each method in turn, into a pool with the layout that the method needs.

    Args:
        device: the CUDA device with the pools; None for plain memory.
        multiprocessors: number of multiprocessors of the device; 0 for plain memory.
        folder: a folder on the disk to be measured. Files that are made in it are removed.
        total_bytes: bytes moved per read, or the bytes of two pages if that is more.
        settings: the copy paths that the device's lane may use.

    Raises:
        ConfigError: the folder or the device cannot be used.
        CapacityError: there is not enough memory or disk space.
    """
    rows = []
    for run_bytes in PAGE_RUN_BYTES:
        # At least two pages: in a pool of one block all layers are contiguous, which is the block-first layout.
        pages = max(2, total_bytes // (PAGE_LAYERS * KV * run_bytes))
        with tempfile.TemporaryDirectory(dir=folder, prefix="flexkv-bench-") as made:
            ways = _DiskWays(Path(made), device, multiprocessors, run_bytes, pages, settings)
            try:
                rows += ways.measure(repeats)
            finally:
                ways.close()
    return rows


@dataclass(frozen=True, slots=True)
class _Way:
    """One method of reading the pages into the engine's pool.

    Attributes:
        once: runs one round and returns its seconds.
        count: returns the number of I/O calls so far.
        path: returns what moved the bytes, and the multiprocessors that this takes; called after all rounds.
        note: returns the conditions of the measurement; called after all rounds, because only the calls of cuFile show
            how cuFile reaches a file.
    """

    what: str
    once: Callable[[], float]
    count: Callable[[], int]
    path: Callable[[], tuple[str, int]] = lambda: ("", 0)
    note: Callable[[], str] = lambda: ""


class _DiskWays:
    """A disk tier of `pages` pages, which are written once, and a transfer engine for each method of reading them."""

    def __init__(
        self,
        folder: Path,
        device: int | None,
        multiprocessors: int,
        run_bytes: int,
        pages: int,
        settings: TransferConfig,
    ) -> None:
        self._settings = settings
        self._device, self._run, self._pages = device, run_bytes, pages
        self._multiprocessors = multiprocessors
        self._stripe = PAGE_LAYERS * KV * run_bytes
        runs = np.array([(i * run_bytes, run_bytes, i // KV) for i in range(PAGE_LAYERS * KV)], np.int64)
        group = DiskGroup("benchmark", (self._stripe,), (runs,), BLOCK_TOKENS)
        image = codec_of(group).image_bytes
        options = DiskOptions(pages * image, preallocate=False)
        self._unit = StripedSlabs.open([folder], DiskIdentity("benchmark", bytes(32)), [group], options)
        self._pool = HostPool(image, pages)
        self._engines: list[TransferEngine] = []
        self._memory: list[object] = []
        self._op_ids = itertools.count(1)
        self._slots = np.arange(pages, dtype=np.int32)
        self._order = np.random.default_rng(0).permutation(pages).astype(np.int32)
        generations = self._unit.next_generations(pages)
        keys = np.random.default_rng(1).integers(0, 256, (pages, 16), dtype=np.uint8)
        self._tags = make_tags(keys, self._unit.epoch, generations, BLOCK_TOKENS)
        if device is not None:
            self._pool.pin(device)
        if not self._pool.wait_ready(pages, WAIT_S):
            raise ContractError(f"the host pool was not mapped: {self._pool.stopped_reason}")
        for slot in range(pages):
            self._pool.slot(slot)[:] = slot % 251
        self._bare = BareReads(folder, pages * self._stripe)
        self._disk_lane = self._unit.lane([self._pool])
        self._through_host = self._engine(self._disk_lane, block_first=False)
        self._run_graph(
            self._through_host,
            TransferGraph((self._op(OpKind.DISK_WRITE, NO_IDS, self._slots, self._slots),)),
        )

    def measure(self, repeats: int) -> list[ComparisonRow]:
        ways = [
            self._through_lane("disk to pool, staged", staged=True, block_first=False),
            self._through_lane("disk to pool, a call a run", staged=False, block_first=False),
            self._through_lane("disk to pool, block-first", staged=True, block_first=True),
            self._through_host_way(),
        ]
        bare = _Way("bare reads of 2 MiB", self._bare.once, lambda: 0)
        seconds: dict[str, list[float]] = {way.what: [] for way in (bare, *ways)}
        calls: dict[str, int] = {}
        for number in range(repeats + 1):
            for way in (bare, *ways):
                before, taken = way.count(), way.once()
                calls[way.what] = way.count() - before
                if number:  # round 0 touches memory and starts threads, so it does not count
                    seconds[way.what].append(taken)
        # The rate of the best round counts as the disk's limit. Otherwise, the rate of another method might exceed this
        # limit.
        limit = self._bare.bytes / min(seconds[bare.what]) / 1e9
        cached = "" if self._bare.direct else ", through the page cache: the file system refuses O_DIRECT"
        rows = [
            ComparisonRow(
                bare.what,
                "disk to host",
                BARE_CALL_BYTES,
                limit,
                self._bare.calls,
                path="threads",
                note=f"the disk's rate: the best of {repeats} times, {BARE_THREADS} reads at a time{cached}",
            )
        ]
        moved = self._pages * self._stripe
        for way in ways:
            gbps = moved / statistics.median(seconds[way.what]) / 1e9
            path, multiprocessors = way.path()
            rows.append(
                ComparisonRow(
                    way.what,
                    "disk to pool",
                    self._run,
                    gbps,
                    calls[way.what],
                    path=path,
                    multiprocessors=multiprocessors,
                    share=gbps / limit,
                    note=f"{way.note()}; share of the bare reads",
                )
            )
        return rows

    def _through_lane(self, what: str, *, staged: bool, block_first: bool) -> _Way:
        """Returns the method that reads with the lane between disk and the engine's pool."""
        gds = load_config().gds
        lane = make_gds_lane(self._unit.slab_map(), 0, self._device, gds, use_staged_transfer=staged)
        engine = self._engine(lane, block_first)
        read = TransferGraph((self._op(OpKind.GDS_READ, self._slots, NO_IDS, self._order),))
        taken = min(self._multiprocessors, c_ext.CUDA_THRESHOLDS["transform_multiprocessors"])
        return _Way(
            what,
            self._timed(engine, read),
            functools.partial(_io_calls, lane),
            functools.partial(_path_of, lane, taken),
            lane.describe,
        )

    def _through_host_way(self) -> _Way:
        """Returns the method that reads the pages to host memory with the disk tier's lane, and then copies them to the
        engine's pool."""

        def path() -> tuple[str, int]:
            backends = ", ".join(sorted({backend for _, _, backend, _ in self._disk_lane.states()}))
            copied_by, multiprocessors = copy_path(self._through_host)
            return f"{backends}, then {copied_by}", multiprocessors

        return _Way(
            "disk to host page to pool",
            self._timed(self._through_host, self._through_host_graph()),
            lambda: self._disk_lane.counts(0)["read_pages"],
            path,
            lambda: "the disk tier's lane, a call a page",
        )

    def close(self) -> None:
        for engine in self._engines:
            engine.close(WAIT_S)
        self._bare.close()
        self._unit.close(WAIT_S)
        self._pool.close()

    def _engine(self, lane: c_ext.Lane, block_first: bool) -> TransferEngine:
        """Makes a transfer engine with a separate pool: [block][run] if `block_first`, otherwise [run][block]."""
        total = self._pages * self._stripe
        if self._device is None:
            memory = np.zeros(total + 4096, np.uint8)
            base = memory.ctypes.data + -memory.ctypes.data % 4096
            self._memory.append(memory)
        else:
            on_device = c_ext.DeviceMemory(self._device, total)
            base = on_device.address
            self._memory.append(on_device)
        run, stride = self._run, self._stripe if block_first else self._run
        step = run if block_first else self._pages * run
        segments = [[base + i * step, stride, run, i * run, i // KV] for i in range(PAGE_LAYERS * KV)]
        engine = engine_of(self._device, self._settings, [lane])
        self._engines.append(engine)
        engine.attach_view(
            0, c_ext.KvView(np.array(segments, np.int64), self._pages, self._stripe), self._pool
        )
        return engine

    def _op(self, kind: OpKind, blocks: Ids, slots: Ids, places: Ids) -> TransferOp:
        priority = Priority.STORE if kind is OpKind.DISK_WRITE else Priority.LOAD
        return TransferOp(
            OpId(next(self._op_ids)),
            kind,
            0,
            priority,
            blocks,
            slots,
            places=places,
            tags=self._tags[places],
        )

    def _through_host_graph(self) -> TransferGraph:
        read = self._op(OpKind.DISK_READ, NO_IDS, self._slots, self._order)
        load = TransferOp(OpId(next(self._op_ids)), OpKind.H2D, 0, Priority.LOAD, self._slots, self._slots)
        return TransferGraph((read, load), (Edge(0, 1, EdgeKind.STREAM),))

    def _timed(self, engine: TransferEngine, graph: TransferGraph) -> Callable[[], float]:
        def once() -> float:
            start = time.perf_counter()
            self._run_graph(engine, graph)
            return time.perf_counter() - start

        return once

    def _run_graph(self, engine: TransferEngine, graph: TransferGraph) -> None:
        ticket = engine.submit(graph, stream=None if self._device is None else NULL_STREAM)
        if ticket is None or not engine.wait(ticket, WAIT_S):
            raise ContractError(f"{self._pages} pages did not move in {WAIT_S:.0f} s")
        for result in engine.poll():
            if result.status is not OpStatus.OK:
                raise ContractError(f"pages of {self._stripe} bytes: {result.reason}")


def _io_calls(lane: c_ext.GdsLane) -> int:
    return lane.totals["io_calls"]


def _path_of(lane: c_ext.GdsLane, multiprocessors: int) -> tuple[str, int]:
    """Returns the path that the pages of all rounds took, according to the lane's counters, and the number of
    multiprocessors that this path takes.

    The layout transform's kernel takes multiprocessors. The same kernel checks the digests of pages whose bytes need no
    transform, so its multiprocessors count if the lane launched any kernel.

    Args:
        multiprocessors: multiprocessors that a transform takes; 0 for plain memory.
    """
    totals = lane.totals
    return path_of_totals(totals), multiprocessors if totals["launches"] else 0


def path_of_totals(totals: c_ext.GdsTotals) -> str:
    """Says how the bytes moved: "direct" only if every byte of every page went directly between disk and pool, "not
    known" if cuFile does not say whether its calls went through another buffer."""
    if not totals["straight_pages"]:
        return "staged"
    if totals["straight_pages"] < totals["pages"]:
        return "staged in part"
    if totals["bounced_calls"]:
        return "bounced"
    return "not known" if totals["unknown_calls"] else "direct"
