"""The native core. One section an area, kept by whoever keeps csrc/bindings/bind_<area>.cpp."""

from collections.abc import Sequence
from typing import Protocol, TypedDict

import numpy as np
from numpy.typing import NDArray

class Buffer(Protocol):
    """Any object with the C-contiguous buffer protocol (numpy arrays, bytearray, memoryview, mmap)."""

# --- module -------------------------------------------------------------------------------------------------

__variant__: str
"""`cpu` or `cuda`, with `-address` or `-thread` for a sanitizer build."""

def build_info() -> dict[str, bool | str | int]:
    """What this module was built with: cuda, sanitizer, compiler, cpp_standard."""

# --- layout -------------------------------------------------------------------------------------------------

class KvView:
    """Where the runs of every block of one KV group lie in one rank's pool. Holds addresses, not memory.

    `runs`, `segments` and `segments_of_layers` are int64 [n, 5]: base, block_stride, run_bytes, page_offset,
    layer.
    """

    def __init__(
        self, runs: NDArray[np.int64], num_blocks: int, stripe_bytes: int, first_block: int = 0
    ) -> None:
        """Raises GeometryError unless the runs fill the stripe exactly and no two blocks share a byte."""
    @property
    def runs(self) -> NDArray[np.int64]: ...
    @property
    def segments(self) -> NDArray[np.int64]: ...
    def segments_of_layers(self, lo: int, hi: int) -> NDArray[np.int64]: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def first_block(self) -> int: ...
    @property
    def stripe_bytes(self) -> int: ...
    def check(self) -> None: ...

class SlotImage:
    """Geometry of a slot image: stripes and trailer, each from a 4 KiB boundary. Offsets and sizes in
    bytes.
    """

    def __init__(self, stripe_bytes: list[int], trailer_bytes: int = 0) -> None: ...
    def stripe_offset(self, rank: int) -> int: ...
    def stripe_bytes(self, rank: int) -> int: ...
    @property
    def ranks(self) -> int: ...
    @property
    def trailer_offset(self) -> int: ...
    @property
    def trailer_bytes(self) -> int: ...
    @property
    def total_bytes(self) -> int: ...

def gather(view: KvView, block: int, stripe: Buffer) -> None:
    """Copies a block from a host-memory pool to `stripe` (exactly view.stripe_bytes bytes, writable)."""

def scatter(view: KvView, block: int, stripe: Buffer) -> None:
    """Copies `stripe` to a block of a host-memory pool."""

def gather_layers(view: KvView, lo: int, hi: int, block: int, stripe: Buffer) -> None:
    """Copies layers [lo, hi) of a block; the rest of the stripe is left alone."""

def scatter_layers(view: KvView, lo: int, hi: int, block: int, stripe: Buffer) -> None:
    """Copies layers [lo, hi) of the stripe to a block; the block's other layers are left alone."""

def run_digest(run: Buffer) -> int:
    """The 64-bit digest of a run's bytes (docs/digest.md)."""

def page_digests(view: KvView, stripe: Buffer) -> NDArray[np.uint64]:
    """One digest for each of `view.runs`, of their bytes in `stripe` (exactly view.stripe_bytes bytes)."""

# --- pool ---------------------------------------------------------------------------------------------------

class HostPool:
    """Native host pool; use `flexkv.transfer.host_pool.HostPool`."""

    def __init__(
        self, slot_bytes: int, slots: int, shared: bool, extent_bytes: int, huge_pages: bool
    ) -> None: ...
    @staticmethod
    def attach(
        pid: int, fd: int, token: bytes, file_bytes: int, slot_bytes: int, slots: int, extent_bytes: int
    ) -> HostPool: ...
    @property
    def slot_bytes(self) -> int: ...
    @property
    def slots(self) -> int: ...
    @property
    def extent_bytes(self) -> int: ...
    @property
    def shared(self) -> bool: ...
    @property
    def attached(self) -> bool: ...
    @property
    def closed(self) -> bool: ...
    @property
    def settled(self) -> bool:
        """Bring-up has ended, complete or not."""
    @property
    def ready_slots(self) -> int: ...
    @property
    def stopped_reason(self) -> str: ...
    def wait_ready(self, slots: int, deadline_s: float) -> bool: ...
    def address(self) -> tuple[int, int, bytes, int]:
        """pid, fd, token, file_bytes."""
    def report(self) -> list[tuple[int, int, str, int, float, bool]]:
        """index, bytes, pages_kind, huge_bytes, bring_up_s, registered of each extent."""
    def slot(self, slot: int) -> NDArray[np.uint8]: ...
    def close(self) -> None: ...

def available_memory(proc_root: str = "/proc", cgroup_root: str = "/sys/fs/cgroup") -> tuple[int, str]:
    """Bytes this process may still take, and the limit that binds."""

class CudaInfo(TypedDict):
    built: bool
    driver: int
    device_count: int
    reason: str

def cuda_info() -> CudaInfo:
    """Whether built with CUDA, driver version (13000 is 13.0; 0 for none), devices, and why none can be used."""

# --- transfer -----------------------------------------------------------------------------------------------

class PageMover:
    """Moves pages of host lanes. Safe to share between engines."""

class HostMover(PageMover):
    """Copies between an engine pool in plain memory and the host pool."""

    def __init__(self) -> None: ...

class CountingMover(PageMover):
    """Counts what `inner` moves."""

    def __init__(self, inner: PageMover) -> None: ...
    def count(self, kind: int) -> tuple[int, int, int, float]:
        """moves that ended OK (a layerwise page is one a layer), failed ones, bytes of the OK ones, busy seconds."""

class FaultRule:
    """What a FaultyMover does to calls that meet every condition given. Actions: 0 fail with `reason`, 1 delay by
    `delay_s`, 2 stall until `release()`, 3 corrupt the first `corrupt_bytes` (0: all) that arrived. `nth_op` counts
    ops (of `kind` if given) from 0 as the mover first sees them; `times` bounds how often it acts (-1: always).
    """

    def __init__(
        self,
        action: int,
        *,
        kind: int | None = None,
        nth_op: int | None = None,
        page: int | None = None,
        layer: int | None = None,
        block: int | None = None,
        slot: int | None = None,
        reason: str = "injected fault",
        delay_s: float = 0.0,
        corrupt_bytes: int = 0,
        times: int = -1,
    ) -> None: ...

class FaultyMover(PageMover):
    """Injects faults around `inner`: the first rule that matches a call acts."""

    def __init__(self, inner: PageMover, rules: list[FaultRule]) -> None: ...
    def release(self) -> None:
        """Lets stalled calls go on and disables stall rules."""
    def wait_stalled(self, count: int, deadline_s: float) -> bool: ...
    @property
    def calls(self) -> int: ...
    @property
    def acted(self) -> int: ...
    @property
    def stalled(self) -> int: ...

class TransferEngine:
    """Native engine; use `flexkv.transfer.engine.TransferEngine`."""

    def __init__(
        self, mover: PageMover | None, queue_ops: int, copy_threads: int, op_stuck_s: float
    ) -> None: ...
    def attach_view(
        self, group: int, view: KvView, pool: HostPool, stripe_offset: int, digest_offset: int
    ) -> None: ...
    def detach_view(self, group: int) -> None: ...
    def submit(
        self,
        ops: Sequence[tuple[int, int, int, int, NDArray[np.int32], NDArray[np.int32], bool]],
        edges: Sequence[tuple[int, int, int]],
    ) -> int | None:
        """ops: op_id, kind, group, priority, blocks, slots, layerwise. edges: before, after, kind."""
    def poll(self, max_results: int) -> list[tuple[int, int, int, NDArray[np.int32], str]]:
        """op_id, ticket, status, failed positions, reason of each."""
    @property
    def event_fd(self) -> int: ...
    def wait(self, ticket: int, deadline_s: float) -> bool: ...
    def wait_layer(
        self, ticket: int, layer: int, deadline_s: float
    ) -> tuple[bool, list[tuple[int, NDArray[np.int32]]]]:
        """in time, and (op_id, failed positions) of the ops that have any."""
    def cancel(self, ticket: int) -> int: ...
    def lanes(self) -> list[tuple[int, str, bool, str, int, int, list[int]]]:
        """kind, lane, up, reason, open ops, held places, stuck op ids."""
    def close(self, deadline_s: float) -> bool: ...
