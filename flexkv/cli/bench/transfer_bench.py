"""Measures copies between an engine's pool and a host pool: the lanes of `flexkv bench transfer`."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from flexkv import c_ext
from flexkv.cli.bench.event_clock import EventClock
from flexkv.config import TransferConfig
from flexkv.errors import ContractError
from flexkv.transfer.engine import TransferEngine
from flexkv.transfer.graph import OpId, OpKind, OpStatus, Priority, TransferGraph, TransferOp
from flexkv.transfer.host_pool import HostPool
from flexkv.transfer.ways_file import CopyWays, ways_of

RUN_BYTES = tuple(4096 << i for i in range(11))
"""Lengths of a block's contiguous runs, 4 KiB to 4 MiB."""

LAYERS = 8
STORE_RUN_BYTES = 1 << 20
"""Run length, in bytes, of a store that runs while something else is measured. The runs are long, so that the copy
engine is busy.
"""
WAIT_S = 120.0
NULL_STREAM = 0
DIRECTIONS = {"H2D": OpKind.H2D, "D2H": OpKind.D2H}


@dataclass(frozen=True, slots=True)
class TransferRow:
    """One measurement of a lane.

    Attributes:
        direction: "H2D", "D2H", or "both" at once.
        path: the path that copied most of the bytes.
        path_bytes: bytes that each path copied, over all copies of this row; empty for plain memory.
        pinned: whether the GPU had registered all slots of the host pool; True for plain memory.
        multiprocessors: number of multiprocessors that the path takes from the engine's kernels.
        gbps: median rate in 1e9 bytes per second; for "both", of the two directions together.
        share_of_limit: the rate divided by the rate of one contiguous copy of as many bytes; for "both", by the rate of
            two such copies at once, one in each direction. None if that rate was not measured.
        share_of_one_way: for "both", the rate divided by that of the faster direction alone; otherwise None.
        single_calls_gbps: rate in 1e9 bytes per second with one driver call per run; None without a GPU, and for
            "both".
    """

    run_bytes: int
    direction: str
    path: str
    multiprocessors: int
    gbps: float
    share_of_limit: float | None
    share_of_one_way: float | None
    single_calls_gbps: float | None
    path_bytes: dict[str, int] = field(default_factory=dict)
    pinned: bool = True


def copy_path(engine: TransferEngine) -> tuple[str, int]:
    """Returns the path that copied most of the engine's bytes, and the number of multiprocessors that this path takes
    for loads.
    """
    return chosen_path(path_bytes(engine), "H2D")


def path_bytes(engine: TransferEngine) -> dict[str, int]:
    """Returns the bytes that each path of the engine's GPU has copied; empty without a GPU."""
    if engine.cuda_lane is None:
        return {}
    return {path: moved for path, _, moved, _ in engine.cuda_lane.counts()}


def chosen_path(moved: Mapping[str, int], direction: str) -> tuple[str, int]:
    """Returns the path with the most bytes, and the number of multiprocessors that this path takes for "H2D", "D2H" or
    "both".
    """
    if not moved:
        return "cpu", 0
    path = max(moved, key=lambda name: moved[name])
    if path != "kernel":
        return path, 0
    loads, stores = (c_ext.CUDA_THRESHOLDS[f"{way}_multiprocessors"] for way in ("load", "store"))
    return path, {"H2D": loads, "D2H": stores}.get(direction, loads + stores)


def engine_of(
    device: int | None,
    settings: TransferConfig,
    lanes: Sequence[c_ext.Lane] = (),
    ways: CopyWays | None = None,
) -> TransferEngine:
    """Makes a transfer engine that may use the copy paths that the settings allow.

    Args:
        ways: table of the runs that the kernel copies, in place of the table that the settings name; None for the
            settings' table.
    """
    return TransferEngine(
        lanes=lanes,
        device=device,
        batch_copies=settings.batch_copies,
        copy_kernel=settings.copy_kernel,
        ways=ways or ways_of(settings, device),
    )


@contextmanager
def pooled_engine(
    device: int | None,
    settings: TransferConfig,
    base: int,
    run_bytes: int,
    layers: int,
    blocks: int,
    ways: CopyWays | None = None,
) -> Iterator[tuple[TransferEngine, bool]]:
    """Yields a transfer engine between a layer-first pool at `base` and a host pool with as many slots as `blocks`.

    Also yields whether the GPU has registered all these slots; True for plain memory. Copies of slots that are not
    registered may use another path, so this function first waits, at most `WAIT_S` seconds, until the GPU has
    registered or refused every slot.

    Args:
        base: address of the pool's memory on `device`, which has `layers` x `blocks` x `run_bytes` bytes.
        ways: see `engine_of`.

    Raises:
        CapacityError: there is not enough host memory.
        ContractError: the host memory was not mapped within `WAIT_S`.
    """
    page = run_bytes * layers
    segments = [
        [base + layer * blocks * run_bytes, run_bytes, run_bytes, layer * run_bytes, layer]
        for layer in range(layers)
    ]
    view = c_ext.KvView(np.array(segments, dtype=np.int64), blocks, page)
    pool = HostPool(page, blocks)
    engine = engine_of(device, settings, ways=ways)
    try:
        if device is not None:
            pool.pin(device)
        if not pool.wait_ready(blocks, WAIT_S):
            raise ContractError(f"the host pool was not mapped: {pool.stopped_reason}")
        ends_s = time.monotonic() + WAIT_S
        while device is not None and pool.pinned_slots < blocks and time.monotonic() < ends_s:
            time.sleep(0.01)
        engine.attach_view(0, view, pool)
        # The copy kernel reaches only registered memory. If part of the pool is not, result rows have `pinned` False.
        registered = device is None or (pool.pinned_slots >= blocks and not pool.native.registration_error)
        yield engine, registered
    finally:
        engine.close(WAIT_S)
        pool.close()


class TransferBench:
    """Measures copies of `total_bytes` of layer-first blocks to and from a host pool, for each run length.

    Args:
        device: the CUDA device; None for plain memory.
        settings: the copy paths that the device's lane may use.
        ways: see `engine_of`.

    Raises:
        ConfigError: there is no such device, or the settings' table of copy paths is not valid for it.
        CapacityError: there is not enough memory.
    """

    def __init__(
        self,
        device: int | None,
        total_bytes: int,
        repeats: int,
        settings: TransferConfig,
        ways: CopyWays | None = None,
    ) -> None:
        self._device, self._total, self._repeats = device, total_bytes, repeats
        self._settings, self._ways = settings, ways or ways_of(settings, device)
        self._memory = np.zeros(total_bytes, np.uint8) if device is None else None
        self._device_memory = None if device is None else c_ext.DeviceMemory(device, total_bytes)
        self._ids = itertools.count(1)
        self._pinned = True
        self.limit_gbps = {name: self._limit(name) for name in DIRECTIONS}
        """Rate of one contiguous copy, for "H2D" and "D2H". A caller may add "both": one copy each way at once."""

    @property
    def copies(self) -> dict[str, str]:
        """Maps each direction to a description of how the GPU's lane copies; empty without a GPU."""
        if self._device is None:
            return {}
        engine = engine_of(self._device, self._settings, ways=self._ways)
        try:
            assert engine.cuda_lane is not None
            return engine.cuda_lane.ways
        finally:
            engine.close(WAIT_S)

    @property
    def multiprocessors(self) -> int:
        """Number of multiprocessors of the GPU; 0 without a GPU."""
        return 0 if self._device_memory is None else self._device_memory.multiprocessors

    def run(self) -> Iterator[list[TransferRow]]:
        """Yields the rows of each run length in turn."""
        for run_bytes in RUN_BYTES:
            blocks = self._total // (run_bytes * LAYERS)
            if blocks >= 1:
                yield self._measure(run_bytes, blocks)

    def _median(self, once: Callable[[], float]) -> float:
        once()  # the first call touches memory and starts threads
        return statistics.median(once() for _ in range(self._repeats))

    def _limit(self, direction: str) -> float:
        """Measures the rate of one contiguous copy, in 1e9 bytes per second."""
        if self._device_memory is not None:
            memory = self._device_memory
            return (
                self._total
                / self._median(lambda: memory.time_copies(direction == "H2D", self._total, 1))
                / 1e9
            )
        assert self._memory is not None
        # `other` is filled, because untouched pages all map to one page of zeros, which stays in the CPU's cache.
        other = np.full_like(self._memory, 1)
        source, target = (other, self._memory) if direction == "H2D" else (self._memory, other)

        def copy() -> float:
            start = time.perf_counter()
            np.copyto(target, source)
            return time.perf_counter() - start

        return self._total / self._median(copy) / 1e9

    @contextmanager
    def _engine(self, run_bytes: int, blocks: int) -> Iterator[TransferEngine]:
        """Yields a transfer engine between this measurement's memory, as a layer-first pool, and a host pool."""
        base = self._device_memory.address if self._device_memory is not None else self._memory.ctypes.data  # type: ignore[union-attr]
        with pooled_engine(self._device, self._settings, base, run_bytes, LAYERS, blocks, self._ways) as (
            engine,
            pinned,
        ):
            self._pinned = pinned
            yield engine

    def _measure(self, run_bytes: int, blocks: int) -> list[TransferRow]:
        with self._engine(run_bytes, blocks) as engine:
            rows = [self._row(engine, name, [kind], run_bytes, blocks) for name, kind in DIRECTIONS.items()]
            if blocks > 1:
                both = self._row(engine, "both", list(DIRECTIONS.values()), run_bytes, blocks)
                one_way = max(row.gbps for row in rows)
                rows.append(dataclasses.replace(both, share_of_one_way=both.gbps / one_way))
            return rows

    def one_way_gbps(self, run_bytes: int) -> dict[str, float] | None:
        """Measures the rate of each direction alone, "H2D" and "D2H"; None if one block has more bytes than are moved.

        Raises:
            ContractError: the GPU refused part of the host pool's memory, or had not registered all of it after
                `WAIT_S` seconds. The kernel cannot copy unregistered memory.
        """
        blocks = self._total // (run_bytes * LAYERS)
        if blocks < 1:
            return None
        share = [np.random.default_rng(0).permutation(blocks).astype(np.int32)]
        moved = blocks * run_bytes * LAYERS
        with self._engine(run_bytes, blocks) as engine:
            if not self._pinned:
                raise ContractError(f"the GPU refused memory of a host pool of {moved} bytes")
            return {
                name: moved / self._median(lambda kind=kind: self._transfer(engine, [kind], share)) / 1e9  # type: ignore[misc]
                for name, kind in DIRECTIONS.items()
            }

    def loads_by_events(self, run_bytes: int, clock: EventClock) -> tuple[float, str, int] | None:
        """Measures a layerwise load from the end of the stream's work before it to the start of the work after it.
        Returns GB/s, the path and the path's multiprocessors; None if one block has more bytes than are moved.

        Raises:
            DriverRefused: the clock cannot be read.
            ContractError: a copy failed.
        """
        blocks = self._total // (run_bytes * LAYERS)
        if blocks < 1:
            return None
        order = np.random.default_rng(0).permutation(blocks).astype(np.int32)
        with self._engine(run_bytes, blocks) as engine:

            def once() -> float:
                ids = order.copy(), order.copy()
                op = TransferOp(OpId(next(self._ids)), OpKind.H2D, 0, Priority.LOAD, *ids, layerwise=True)
                clock.start()
                ticket = engine.submit(TransferGraph((op,), ()), stream=clock.stream)
                if ticket is None:
                    raise ContractError("a load found its queue full")
                # The stream waits for the copies; this thread waits only until they are enqueued.
                found = engine.wait_layer(ticket, LAYERS - 1, WAIT_S, stream=clock.stream)
                clock.stop()
                if not found.ok or not engine.wait(ticket, WAIT_S):
                    raise ContractError(f"a load of {self._total} bytes did not arrive: {found}")
                for result in engine.poll():
                    if result.status is not OpStatus.OK:
                        raise ContractError(f"a load failed: {result.reason}")
                return clock.seconds()

            gbps = blocks * run_bytes * LAYERS / self._median(once) / 1e9
            return (gbps, *copy_path(engine))

    @contextmanager
    def storing(self) -> Iterator[Callable[[], None]]:
        """Yields a function that stores all bytes once, in runs of `STORE_RUN_BYTES`. It is called while something else
        is measured."""
        run_bytes = min(STORE_RUN_BYTES, self._total // LAYERS)
        blocks = self._total // (run_bytes * LAYERS)

        def store() -> None:
            self._transfer(engine, [OpKind.D2H], [np.arange(blocks, dtype=np.int32)])

        with self._engine(run_bytes, blocks) as engine:
            yield store

    def _row(
        self, engine: TransferEngine, direction: str, kinds: list[OpKind], run_bytes: int, blocks: int
    ) -> TransferRow:
        share = np.array_split(np.random.default_rng(0).permutation(blocks).astype(np.int32), len(kinds))
        before = path_bytes(engine)
        seconds = self._median(lambda: self._transfer(engine, kinds, share))
        gbps = blocks * run_bytes * LAYERS / seconds / 1e9
        moved = {path: count - before[path] for path, count in path_bytes(engine).items()}
        path, multiprocessors = chosen_path(moved, direction)
        limit = self.limit_gbps.get(direction)
        single = None
        if self._device_memory is not None and direction in DIRECTIONS:
            memory, calls = self._device_memory, blocks * LAYERS
            once = self._median(lambda: memory.time_copies(direction == "H2D", run_bytes, calls))
            single = calls * run_bytes / once / 1e9
        return TransferRow(
            run_bytes,
            direction,
            path,
            multiprocessors,
            gbps,
            share_of_limit=gbps / limit if limit else None,
            share_of_one_way=None,
            single_calls_gbps=single,
            path_bytes={path: count for path, count in moved.items() if count},
            pinned=self._pinned,
        )

    def _transfer(self, engine: TransferEngine, kinds: list[OpKind], share: list[np.ndarray]) -> float:
        ops = tuple(
            # Both directions have the same priority, because a store of lower priority would pause for the load.
            TransferOp(OpId(next(self._ids)), kind, 0, Priority.LOAD, ids.copy(), ids.copy(), False)
            for kind, ids in zip(kinds, share, strict=True)
        )
        start = time.perf_counter()
        ticket = engine.submit(TransferGraph(ops, ()), stream=None if self._device is None else NULL_STREAM)
        if ticket is None or not engine.wait(ticket, WAIT_S):
            raise ContractError(f"a copy of {self._total} bytes did not end in {WAIT_S:.0f} s")
        seconds = time.perf_counter() - start
        for result in engine.poll():
            if result.status is not OpStatus.OK:
                raise ContractError(f"a copy failed: {result.reason}")
        return seconds
