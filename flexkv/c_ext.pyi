"""Types of the native core, one section per area. A change of csrc/bindings/bind_<area>.cpp must be made here too."""

from collections.abc import Mapping, Sequence
from typing import Protocol, TypedDict

import numpy as np
from numpy.typing import NDArray

from flexkv.transfer.graph import Edge, TransferOp

class Buffer(Protocol):
    """Any object that supports the buffer protocol and is C-contiguous (numpy array, bytearray, memoryview, mmap)."""

# --- module -------------------------------------------------------------------------------------------------

__variant__: str
"""`cpu` or `cuda`, with `-address` or `-thread` for a sanitizer build."""

__interface__: str
"""Digest of this stub file when the module was built. `flexkv/native_core.py` compares it with the package's file."""

def build_info() -> dict[str, bool | str | int]:
    """Returns what this module was built with: cuda, sanitizer, compiler, cpp_standard."""

def load_nvtx(library: str) -> None:
    """Makes lane threads annotate their work for a profiler, with the NVTX functions of `library`, a name or a path.

    Does nothing if a library was loaded before: it cannot be replaced, because threads may be inside a range.

    Raises:
        ConfigError: the library cannot be loaded, or lacks nvtxRangePushA or nvtxRangePop.
    """

# --- layout -------------------------------------------------------------------------------------------------

class KvView:
    """Where the runs of each block of one KV group are in one rank's pool. Contains addresses and owns no memory.

    `runs`, `segments` and `segments_of_layers` are int64 [n, 5] with the columns base, block_stride, run_bytes,
    page_offset and layer.
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

class PageConversion:
    """Converts stripes between two layouts, in which the elements of K and V have different orders.

    Args:
        counts: numbers of layers, tokens, heads, and elements per head; the last is 1 if a head's row is contiguous in
            both layouts.
        element_bytes: bytes that are moved as a unit: an element, or a head's row if the last count is 1.
        source, target: the strides in bytes of layers, tokens, heads and elements, for K and for V; then V's offset.

    Raises:
        GeometryError: in one of the layouts, elements overlap or leave gaps.
    """

    def __init__(
        self,
        counts: tuple[int, int, int, int],
        element_bytes: int,
        source: tuple[tuple[int, int, int, int], tuple[int, int, int, int], int],
        target: tuple[tuple[int, int, int, int], tuple[int, int, int, int], int],
    ) -> None: ...
    @property
    def stripe_bytes(self) -> int: ...
    def convert(self, source: Buffer, target: Buffer) -> None:
        """Converts the stripe in `source` and writes it to `target`. Raises GeometryError if one of them does not have
        `stripe_bytes` bytes, or if they overlap."""

class SlotImage:
    """Geometry of a slot image. Stripes and trailer each begin at a 4 KiB boundary. Offsets and sizes are in bytes."""

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
    """Copies a block from a host-memory pool to `stripe`, which is writable and has view.stripe_bytes bytes."""

def scatter(view: KvView, block: int, stripe: Buffer) -> None:
    """Copies `stripe` to a block of a host-memory pool."""

def gather_layers(view: KvView, lo: int, hi: int, block: int, stripe: Buffer) -> None:
    """Copies layers [lo, hi) of a block to the stripe; the stripe's other layers are not changed."""

def scatter_layers(view: KvView, lo: int, hi: int, block: int, stripe: Buffer) -> None:
    """Copies layers [lo, hi) of the stripe to a block; the block's other layers are not changed."""

def run_digest(run: Buffer) -> int:
    """Returns the 64-bit digest of a run's bytes (docs/digest.md)."""

def page_digests(view: KvView, stripe: Buffer) -> NDArray[np.uint64]:
    """Returns the digest of each run in `view.runs`, from its bytes in `stripe`, which has view.stripe_bytes bytes."""

# --- pool ---------------------------------------------------------------------------------------------------

class HostPool:
    """The native host pool. Python code uses it through `flexkv.transfer.host_pool.HostPool`."""

    def __init__(
        self,
        slot_bytes: int,
        slots: int,
        shared: bool,
        extent_bytes: int,
        huge_pages: bool,
        numa_node: int = -1,
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
        """Whether bring-up has ended, even if not all slots could be brought up."""
    @property
    def ready_slots(self) -> int: ...
    @property
    def stopped_reason(self) -> str: ...
    @property
    def creator_gone(self) -> bool:
        """For an attached pool, whether the process that created it has ended or has closed the pool."""
    def pin(self, device: int) -> None: ...
    @property
    def pinned_slots(self) -> int: ...
    @property
    def registration_error(self) -> str:
        """The first slots that the GPU's driver refused to register at every try, and why; empty if none."""
    def wait_ready(self, slots: int, deadline_s: float) -> bool: ...
    def address(self) -> tuple[int, int, bytes, int]:
        """Returns the pool's pid, fd, token and file_bytes, which `attach` needs."""
    @property
    def file_layout(self) -> tuple[int, int, int]:
        """For a shared pool: offset of slot 0 in its file, slots per extent, and bytes from one extent to the next."""
    def report(self) -> list[tuple[int, int, str, int, float, bool, int]]:
        """Returns index, bytes, pages_kind, huge_bytes, bring_up_s, registered and numa_node of each extent."""
    def extent_of(self, slot: int) -> NDArray[np.uint8]: ...
    def slot(self, slot: int) -> NDArray[np.uint8]: ...
    def settle(self, slots: NDArray[np.int32], read: int, verified: bool) -> None:
        """Reports the end of read `read` for these slots' pages. Loads that wait for the pages continue or fail."""
    def close(self) -> None: ...

class SlotBoard:
    """Shared memory that shows peers the pages in one tier's slots (csrc/share/slot_board.h). Not thread-safe.

    Raises:
        CapacityError: there is not enough memory. BlockRangeError: `slots` is 0.
    """

    def __init__(self, slots: int) -> None: ...
    @property
    def fd(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    def note(
        self,
        slots: NDArray[np.int32],
        tokens: NDArray[np.uint32],
        generations: NDArray[np.uint64],
        expiries: NDArray[np.uint64],
        epoch: int,
    ) -> None:
        """Records data of the pages in these slots, for their rows when they are published; empty arrays mean zeros.

        Raises:
            BlockRangeError: there is no such slot. ContractError: the arrays differ in length.
        """
    def hide(self, slots: NDArray[np.int32]) -> None:
        """Hides the pages in these slots, so that peers do not find them any more. The slots keep the pages.

        Raises:
            BlockRangeError: there is no such slot.
        """
    def show(self, slots: NDArray[np.int32], group: int, keys: NDArray[np.uint8]) -> None:
        """Publishes pages that `hide` has hidden. Preconditions: each slot contains the page with its key and is not
        being written, and `note` was called for it.

        Raises:
            BlockRangeError: there is no such slot. ContractError: there is not one key per slot.
        """
    def retire(self) -> None:
        """Withdraws all pages permanently, and makes peers stop reading the board."""

class PeerDirectory:
    """The pages that peers have, and their slots (csrc/share/peer_directory.h). Thread-safe."""

    def __init__(self) -> None: ...
    def add(
        self,
        board: tuple[int, int],
        pool: tuple[int, int, int, int, int, int] | None = None,
        formats: Sequence[tuple[Sequence[tuple[int, int, int]], Sequence[tuple[int, int, int, int]]]] = (
            ((), ()),
        ),
    ) -> int:
        """Maps a peer's memory read-only, and returns the peer's number.

        Args:
            board: file descriptor and bytes.
            pool: file descriptor, bytes of the file, offset of slot 0, bytes per slot, slots per extent, bytes from one
                extent to the next.
            formats: for each of the peer's KV groups, the pieces of a page (offset in the peer's slot, offset in ours,
                bytes; empty if the caller converts pages) and its runs (offset in our slot, bytes, offset of the digest
                in the peer's slot and in ours, -1 for none). Pages of further groups are ignored.

        Raises:
            ClosedError: a file is not as described. CapacityError: a file cannot be mapped.
        """
    def drop(self, peer: int, keep: bool = False) -> None:
        """Removes a peer and its pages. With `keep`, its pages stay known as they were last seen."""
    def follow(self) -> int:
        """Reads the changes on all peers' boards, and returns how many rows it examined."""
    @property
    def has_news(self) -> bool: ...
    def take(
        self, most: int
    ) -> tuple[
        NDArray[np.uint8], NDArray[np.uint32], NDArray[np.uint32], NDArray[np.uint64], NDArray[np.bool_]
    ]:
        """Removes and returns the changes of up to `most` pages: keys, groups, tokens, expiries, and whether a peer has
        the page now. Lost pages come first. A page that was lost and that a peer has again is returned twice.
        """
    def take_of(
        self, group: int, keys: NDArray[np.uint8]
    ) -> (
        tuple[
            NDArray[np.uint8],
            NDArray[np.uint32],
            NDArray[np.uint32],
            NDArray[np.uint64],
            NDArray[np.bool_],
        ]
        | None
    ):
        """Removes and returns the changes of these pages, like `take`; None if there are none."""
    def bring(
        self,
        pool: HostPool,
        group: int,
        keys: NDArray[np.uint8],
        tokens: NDArray[np.uint32],
        expiries: NDArray[np.uint64],
        slots: NDArray[np.int32],
    ) -> tuple[NDArray[np.uint8], NDArray[np.int32], NDArray[np.int32]]:
        """Copies pages to slots of `pool`. Returns each page's outcome (0 copied, 1 absent, 2 changed meanwhile, 3 bad
        digest, 4 other format), and for 4 the peer and its slot. Pages that expire before `expiries` count as absent.

        Raises:
            BlockRangeError: a slot is not up. ContractError: the arrays differ in length.
        """
    def read(
        self,
        peer: int,
        slot: int,
        group: int,
        key: NDArray[np.uint8],
        tokens: int,
        expiry: int,
        image: NDArray[np.uint8],
    ) -> int:
        """Copies the start of a peer's slot to `image`, in the peer's own format. Returns the outcome as in `bring`.

        Raises:
            ContractError: `key` is not one key.
        """
    def find(
        self, group: int, keys: NDArray[np.uint8], without: NDArray[np.int32] = ...
    ) -> tuple[
        NDArray[np.int32], NDArray[np.int32], NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64]
    ]:
        """Returns, for each key, a peer not in `without` that has its page (-1 if none), and the page's slot,
        generation, expiry and epoch there."""
    def retired(self, peer: int) -> bool: ...
    def counts(self, peer: int) -> tuple[int, int, int, int, int]:
        """Returns how many copies from the peer ended in each way: copied, absent, changed, digest, another format."""
    def pages(self, peer: int) -> int: ...
    @property
    def overruns(self) -> int:
        """How often all rows of a peer's board were read again because too many had changed since the last time."""

def available_memory(proc_root: str = "/proc", cgroup_root: str = "/sys/fs/cgroup") -> tuple[int, str]:
    """Returns how many bytes this process may still allocate, and which limit determines this number."""

class CudaInfo(TypedDict):
    built: bool
    driver: int
    device_count: int
    reason: str

def cuda_info() -> CudaInfo:
    """Whether CUDA is built in, the driver version (13000 is 13.0, 0: none), devices, and why none can be used."""

def cuda_identity(device: int) -> tuple[str, str]:
    """Returns a device's UUID ("GPU-...") and its PCI address ("0000:17:00.0"). Does not create a CUDA context.

    Raises:
        ConfigError: there is no such device, or no driver.
    """

# --- transfer -----------------------------------------------------------------------------------------------

class PageMover:
    """Moves pages for host lanes. Engines may share one. A mover around more than 64 others raises ContractError."""

class HostMover(PageMover):
    """A mover that copies between an engine's pool in plain memory and the host pool."""

    def __init__(self) -> None: ...

class Lane:
    """Executes the ops of some kinds. Passing a lane to a second TransferEngine raises ContractError."""

class StreamPoint:
    """A point in the work of a device stream; `TransferEngine.record` makes it."""

class CudaLane(Lane):
    """The lane that copies between a GPU and the host pool."""

    def __init__(
        self,
        device: int,
        batch: bool,
        kernel: bool,
        digest_threads: int,
        load_kernel_below: int | None = None,
        store_kernel_below: int | None = None,
    ) -> None:
        """
        Args:
            digest_threads: 1 to 16.
            load_kernel_below, store_kernel_below: the kernel copies runs of fewer bytes; None for built-in limits.

        Raises:
            ConfigError: there is no such device, or an argument is out of range.
        """
    @property
    def ways(self) -> dict[str, str]:
        """For "h2d" and "d2h", a description of which runs the kernel copies and what copies the other runs."""
    @property
    def notes(self) -> str:
        """The paths that are not used for copies, and why; empty if all are used."""
    @property
    def failed_launches(self) -> int:
        """Number of failed launches, after the self-test, of the kernel that copies or the kernel that waits for a
        layer. After its first failure, a kernel is not used any more.
        """
    def counts(self) -> list[tuple[str, int, int, int]]:
        """Returns name, pieces, bytes and driver calls of each path."""

class DeviceMemory:
    """Memory of a GPU, for measurements. Raises ConfigError if there is no such device."""

    def __init__(self, device: int, bytes: int) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def multiprocessors(self) -> int: ...
    def time_copies(self, to_device: bool, call_bytes: int, calls: int) -> float:
        """Returns how many seconds `calls` copies of `call_bytes` bytes to or from pinned host memory take. Each copy
        is one driver call."""

CUDA_THRESHOLDS: dict[str, int]
"""The limits that decide how bytes are copied to and from a GPU. csrc/cuda/copy_ways.h says where most come from."""

class OpResult:
    """The result of an op. `flexkv.transfer.graph.OpResult` describes the fields."""

    @property
    def op_id(self) -> int: ...
    @property
    def ticket(self) -> int: ...
    @property
    def status(self) -> int: ...
    @property
    def failed(self) -> NDArray[np.int32]: ...
    @property
    def reason(self) -> str: ...
    @property
    def digests(self) -> NDArray[np.uint64]: ...
    @property
    def causes(self) -> NDArray[np.uint8]: ...

class TransferEngine:
    """The native transfer engine. Python code uses it through `flexkv.transfer.engine.TransferEngine`."""

    def __init__(
        self,
        mover: PageMover | None,
        queue_ops: int,
        copy_threads: int,
        op_stuck_s: float,
        lanes: list[Lane],
    ) -> None: ...
    def attach_view(
        self, group: int, view: KvView, pool: HostPool, stripe_offset: int, digest_offset: int
    ) -> None: ...
    def detach_view(self, group: int) -> int: ...
    def released_views(self) -> list[int]: ...
    def submit(
        self,
        ops: Sequence[TransferOp],
        edges: Sequence[Edge],
        stream: int | None = None,
        gated: bool = False,
        after: StreamPoint | None = None,
    ) -> int | None:
        """Submits a graph. Reads the fields of each op and edge by name.

        Raises:
            ContractError: a field is missing, or its type or value is not allowed.
        """
    def record(self, stream: int) -> StreamPoint: ...
    def order_after(self, ticket: int, deadline_s: float, stream: int | None = None) -> bool: ...
    def open_layers(self, tickets: Sequence[int], layers: int, stream: int | None = None) -> None: ...
    def poll(self, max_results: int) -> list[OpResult]: ...
    @property
    def event_fd(self) -> int: ...
    def wait(self, ticket: int, deadline_s: float) -> bool: ...
    def wait_layer(
        self, ticket: int, layer: int, deadline_s: float, stream: int | None = None
    ) -> tuple[bool, list[tuple[int, NDArray[np.int32]]]]:
        """Returns whether the layer arrived in time, and (op_id, failed positions) of each op with failed pages."""
    def cancel(self, ticket: int) -> int: ...
    def lanes(self) -> list[tuple[int, str, bool, str, int, int, list[int], int]]:
        """Returns, per kind of op: kind, lane, up, reason, open ops, used queue entries, stuck op ids, times down."""
    def close(self, deadline_s: float) -> bool: ...

# --- storage ------------------------------------------------------------------------------------------------

PAGE_VERSION: int

def uring_refusal() -> str:
    """Returns why io_uring cannot be used; empty if it can."""

class PageCodec:
    """Writes and checks a KV group's slot images: stripes, and a trailer that verifies them (docs/disk-format.md).

    Args:
        runs: each rank's runs, int64 [n, 3]: offset in the stripe, bytes, layer; ascending, without gaps.
        host_digests: whether images already contain the run digests when they are sealed.
        group: number of the KV group, in [0, 2**32). It is written to trailers, and a page of another group is a miss.

    Raises:
        GeometryError: the runs do not fill the stripes.
    """

    def __init__(
        self,
        stripe_bytes: list[int],
        runs: list[NDArray[np.int64]],
        host_digests: bool = False,
        group: int = 0,
    ) -> None: ...
    @property
    def group(self) -> int: ...
    @property
    def image_bytes(self) -> int: ...
    @property
    def trailer_offset(self) -> int: ...
    @property
    def trailer_bytes(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def ranks(self) -> int: ...
    def stripe_offset(self, rank: int) -> int: ...
    def digest_offset(self, rank: int) -> int: ...
    def seal(self, image: Buffer, slab_id: int, slot: int, tag: bytes, written: int) -> None:
        """Writes the page's trailer into `image`, which is writable and has image_bytes bytes."""

    def check(
        self, image: Buffer, slab_id: int, slot: int, tag: bytes | None, now: int, data: bool = True
    ) -> tuple[str, str]:
        """Returns `("none", "")` if the page is good, otherwise the name of the miss and the reason. If `tag` is None,
        any page is accepted. If `data` is False, checks only the trailer, and not the bytes of the runs."""

    def seal_apart(
        self, image: Buffer, trailer: Buffer, slab_id: int, slot: int, tag: bytes, written: int
    ) -> None:
        """Writes a page's trailer into `trailer`, which is writable and has trailer_bytes bytes. The page's stripes are
        in `image`, which has at least trailer_offset bytes, or with host_digests image_bytes with the run digests."""

    def check_apart(
        self, image: Buffer, trailer: Buffer, slab_id: int, slot: int, tag: bytes | None, now: int
    ) -> tuple[str, str]:
        """Like `check`, for a page with its stripes in `image` (writable) and its trailer in `trailer`. If the page is
        good and host_digests is set, writes the run digests into `image`."""

    def trailer(self, image: Buffer) -> tuple[int, int, bytes, int]:
        """Returns slab_id, slot, tag and written from the trailer, without checking them."""

class SlabFile:
    """An open slab. `lock_fd` is the folder's lock, which is kept as long as I/O may be in flight.

    Raises:
        DiskError: the slab cannot be opened. GeometryError: the sizes are not those of a slab.
    """

    def __init__(
        self,
        path: str,
        header_bytes: int,
        slot_bytes: int,
        slots: int,
        id: int,
        lock_fd: int = -1,
        read_only: bool = False,
    ) -> None: ...
    @property
    def direct(self) -> bool:
        """Whether I/O bypasses the page cache."""
    @property
    def buffered_because(self) -> str:
        """Why I/O goes through the page cache; empty if it bypasses the cache."""
    @property
    def fd(self) -> int: ...
    @property
    def row(self) -> tuple[str, int, int, int, int]:
        """Path, header bytes, slot bytes, slots, id."""
    @property
    def in_place(self) -> bool:
        """Whether the path still refers to this file."""
    def offset(self, slot: int) -> int: ...
    def sync(self) -> int:
        """Waits until everything written is on the disk. Returns 0, or -errno if that failed."""

class QueueWrapper:
    """Abstract base of objects that wrap the I/O queue of each disk in another queue."""

class DiskCounts(TypedDict):
    read_pages: int
    read_bytes: int
    written_pages: int
    written_bytes: int
    zeroed_bytes: int
    write_errors: int
    misses: dict[str, int]

class DiskLane(Lane):
    """The lane for the DISK_READ, DISK_WRITE and DISK_SEAL ops of one ownership unit; `StripedSlabs.lane` makes it.

    Args:
        slabs: each disk's slabs, one per group; groups that share a slab have the same one.
        zero_fill: whether idle disks write zeros to allocated slots that were never written, before pages come.
        register_buffers: whether io_uring registers the pools' memory; if the kernel refuses, I/O works without.

    Raises:
        GeometryError: the slots of a pool or slab do not have the size of the group's images.
        ConfigError: `io` or `depth` is not allowed. DiskError: io_uring is requested but cannot be used.
    """

    def __init__(
        self,
        codecs: list[PageCodec],
        pools: list[HostPool],
        slabs: list[list[SlabFile]],
        io: str,
        depth: int,
        stuck_s: float,
        wrapper: QueueWrapper | None = None,
        zero_fill: bool = False,
        register_buffers: bool = False,
    ) -> None: ...
    def take_out(self, disk: int, reason: str) -> None:
        """Takes a disk out of use. Raises BlockRangeError if the lane has no such disk."""
    @property
    def zero_fill(self) -> bool:
        """Whether idle disks write zeros to allocated slots that were never written."""
    @property
    def files_closed(self) -> bool:
        """Whether the slabs were closed, because the lane's engine was closed and no I/O is in flight."""
    def states(self) -> list[tuple[bool, str, str, str]]:
        """Returns, for each disk: whether it is lost, why, its I/O backend, and why that is not the requested one."""
    def full_reasons(self) -> list[str]:
        """Returns, for each disk, why it accepts no page in slots without allocated space; empty if it accepts them."""
    def counts(self, disk: int) -> DiskCounts: ...

# --- rope ---------------------------------------------------------------------------------------------------

def rotate_rows(
    src: object,
    dst: object,
    src_offsets: object,
    dst_offsets: object,
    turn_of_row: object,
    turns: object,
    *,
    dtype: str,
    pairing: str,
    heads: int,
    head_dim: int,
    rotary_dim: int,
    src_head_stride: int,
    dst_head_stride: int,
    stream: int = 0,
) -> None:
    """Rotates rows of keys and copies them from `src` to `dst`, in one pass (csrc/rope/rotation.h).

    Head h of row r is read at byte `src_offsets[r] + h * src_head_stride` of `src` and written at byte
    `dst_offsets[r] + h * dst_head_stride` of `dst`. Tensors are contiguous, of any library, all in host memory or all
    on the current GPU. Rows must not overlap in `dst`. In host memory, this returns when the rows are written; on a
    GPU, when the kernel is enqueued. The tables must then have passed `check_rotation` before they were copied to the
    GPU, and must exist until the kernel has run.

    Args:
        src_offsets, dst_offsets: int64 [rows], bytes.
        turn_of_row: int32 [rows], index into `turns`; -1 writes zeros, -2 copies the row unchanged.
        turns: the rotations, float32 [turns, 2, rotary_dim / 2], cosines and sines.
        dtype: dtype of the keys: float32, bfloat16 or float16.
        pairing: neox or gptj.
        src_head_stride, dst_head_stride: bytes.
        stream: cudaStream_t as a number.

    Raises:
        GeometryError: dimensions, strides or dtypes are not possible, or `src` and `dst` overlap.
        BlockRangeError: a row is outside its memory, or an index into `turns` is out of range.
        TransferError: the GPU refused the launch. ConfigError: the module was built without CUDA.
    """

def check_rotation(
    src: object,
    dst: object,
    src_offsets: object,
    dst_offsets: object,
    turn_of_row: object,
    turns: object,
    *,
    dtype: str,
    pairing: str,
    heads: int,
    head_dim: int,
    rotary_dim: int,
    src_head_stride: int,
    dst_head_stride: int,
) -> None:
    """Checks the arguments of `rotate_rows` without moving bytes, before the tables are copied to a GPU.

    `src` and `dst` may be on the GPU; the tables are in host memory.

    Raises:
        GeometryError, BlockRangeError: as for `rotate_rows`.
    """

# --- index: hashes and key chains -------------------------------------------------------------------------------------

def sha256(data: bytes, portable: bool = False) -> bytes:
    """Returns the SHA-256 of `data`. With `portable`, does not use the CPU's SHA instructions."""

def sha256_is_native() -> bool:
    """Whether `sha256` uses the CPU's SHA instructions."""

def tail_keys(
    namespace: bytes,
    group: int,
    parent_key: bytes | None,
    extra: bytes,
    tokens: object,
    longest: int,
    shortest: int,
    base_block: int,
) -> NDArray[np.uint8]:
    """Returns the keys of partial blocks with the first `longest`, ..., `shortest` of `tokens`, shape
    [longest - shortest + 1, 16]. `namespace`: see `EngineKeyChain`."""

class EngineKeyChain:
    """The index keys of one request's blocks, made from the engine's own block keys as their number grows.

    Args:
        namespace: 32 bytes from `namespace_digest`. A mark of 2 bytes may follow; each key then ends with it.
        group: number of the KV group.

    Raises:
        KeySchemeError: the namespace has a different length.
    """

    def __init__(self, namespace: bytes, group: int) -> None: ...
    def extend(self, engine_keys: object, start: int = 0) -> int:
        """Appends the keys of new blocks, and returns their number. Blocks that the chain already has cost nothing.

        Args:
            engine_keys: list or tuple of bytes, or uint8 [blocks, bytes], from block `start` on. Usually the request's
                complete list.

        Raises:
            KeySchemeError: a key is not 16 to 64 bytes of a cryptographic hash. Nothing is appended.
            ContractError: `start` is beyond the chain's end.
        """

    def truncate(self, blocks: int) -> None:
        """Removes all but the first `blocks` keys. Arrays that `keys` returned before do not change."""

    @property
    def keys(self) -> NDArray[np.uint8]:
        """The keys, uint8 [blocks, 16]: a read-only view without keys that are appended later."""

    def __len__(self) -> int: ...

class TokenChain:
    """Chained SHA-256 digests of blocks of tokens, equal to SGLang's page hashes.

    Args:
        seed: empty, or 32 bytes that are hashed before the first block.
        bigram: whether each token is hashed with the token after it (EAGLE), the last one of a block with the first of
            the next block.

    Raises:
        ConfigError: `block_tokens` is 0. KeySchemeError: the seed has a different length.
    """

    def __init__(self, block_tokens: int, seed: bytes = b"", bigram: bool = False) -> None: ...
    def extend(self, tokens: object, start: int = 0) -> int:
        """Appends new whole blocks, and returns their number. Does not read tokens of blocks that the chain has.

        Args:
            tokens: list, tuple or int32/int64/uint32 array, from the request's token `start` on. Tokens after the last
                whole block are not kept and must be passed again.

        Raises:
            TokenError: a token is not an integer in [0, 2**32), or is a bool; the message names its position and value.
                Or there are more than 2**27 tokens. Nothing is appended.
            ContractError: `start` is beyond the chain's end.
        """

    def truncate(self, blocks: int) -> None: ...
    @property
    def digests(self) -> NDArray[np.uint8]:
        """The digests, uint8 [blocks, 32]: a read-only view."""

    @property
    def block_tokens(self) -> int: ...
    def __len__(self) -> int: ...

# --- index: blocks ----------------------------------------------------------------------------------------------------

def in_a_row(slots: NDArray[np.int32]) -> bool:
    """Whether the slots are consecutive and ascending, and there is at least one."""

def eviction_policies() -> list[str]:
    """Returns the names of the policies that `BlockIndex` accepts, the default first."""

class BlockIndex:
    """The blocks in a tier, and their slots. Contracts: csrc/index/block_index.h.

    Keys are uint8 [blocks, 16]; entries are uint32 [blocks], 0xFFFFFFFF for none; flags are uint8 [blocks].

    Raises:
        ConfigError: there are no groups or too many, or `shared_with` or the policy is not allowed.
        CapacityError: there are too many slots.
    """

    def __init__(self, group_slots: list[int], policy: str = "lru", shared_with: list[int] = []) -> None:
        """
        Args:
            shared_with: for each group, the group whose slots it shares, itself or an earlier one; empty if no groups
                share slots. Methods that take a group and concern its slots, or its evicted or coldest blocks, then
                concern all groups that share the slots.
        """
    def grow(self, group: int, slots: int) -> None: ...
    def tell(self, board: SlotBoard) -> None:
        """Shows the ready blocks on `board`, and from now on every change of a slot.

        Raises:
            ContractError: the groups do not share their slots.
            BlockRangeError: the index has more slots than the board.
        """
    def match_prefix(self, group: int, keys: NDArray[np.uint8]) -> NDArray[np.uint32]: ...
    def match_and_pin(
        self, group: int, keys: NDArray[np.uint8]
    ) -> tuple[NDArray[np.uint32], NDArray[np.int32]]:
        """Leases each entry that `match_prefix` finds; returns the entries and their slots."""

    def find(self, group: int, keys: NDArray[np.uint8], ready_only: bool = True) -> NDArray[np.uint32]: ...
    def find_marked(self, group: int, mark: bytes) -> NDArray[np.uint32]:
        """Returns the entries of a group, ready or pending, whose keys end with the 2 bytes `mark`. Takes milliseconds
        per million entries.

        Raises:
            KeySchemeError: the mark has a different length.
        """

    def pin(self, entries: NDArray[np.uint32]) -> NDArray[np.int32]: ...
    def pin_found(
        self, group: int, keys: NDArray[np.uint8], entries: NDArray[np.uint32]
    ) -> NDArray[np.int32]:
        """Like `pin`, for entries that a lookup found earlier. Each must still belong to the key at its position.

        Raises:
            ContractError: an entry no longer holds the ready block of its key; the message names it. Nothing is leased.
        """
    def pin_coming(self, entries: NDArray[np.uint32]) -> NDArray[np.int32]:
        """Like `pin`, for entries that are ready, or pending and leased by the op that fills them."""
    def unpin(self, entries: NDArray[np.uint32], hit: bool = False) -> None:
        """Ends one lease of each entry. `hit`: whether a request found these blocks and has used them."""
    def keep_leases(self, leased: NDArray[np.uint32]) -> int:
        """Ends all leases except those in `leased` (one element per lease), and returns the number of ended leases.

        For a caller that was interrupted before it recorded its leases. Removes pending entries without a lease.
        O(all entries).

        Raises:
            ContractError: an entry has fewer leases than elements in `leased`; nothing has changed.
        """
    def touch(self, entries: NDArray[np.uint32], hits: int = 0) -> None:
        """Marks entries as used, in the order of their request. The first `hits` of them count as hits."""
    def insert(
        self,
        group: int,
        keys: NDArray[np.uint8],
        max_new: int,
        filler: int = 0,
        leases: int = 0,
        spare: bool = False,
    ) -> tuple[NDArray[np.uint32], NDArray[np.uint32], NDArray[np.int32], NDArray[np.uint8], int, int]:
        """Inserts blocks. Returns the new blocks' positions, entries and slots, the evicted keys, and the numbers of
        blocks that were known already and that got no slot.

        Args:
            filler: number of the op that fills the new blocks, for which requests may wait; 0 if they may not wait.
            leases: number of leases that each new entry gets in addition to the insert's own. `finish` ends only the
                insert's own.
            spare: whether the new blocks are evicted first while spare blocks have more than their share of the slots.
                A block is no longer spare when a request hits it or it is inserted without `spare`.
        """

    def spare(self, entries: NDArray[np.uint32]) -> NDArray[np.uint8]: ...
    def fillers(self, entries: NDArray[np.uint32]) -> NDArray[np.int64]:
        """Returns the number of the op that fills each pending entry; 0 for other entries."""

    def set_expiry(self, entries: NDArray[np.uint32], expiries: NDArray[np.uint64]) -> None:
        """Sets the Unix time in seconds at which blocks become misses for a TierLookup; 0 for never.

        Raises:
            ContractError: an entry is not in use. Nothing is set.
        """

    def expiries(self, entries: NDArray[np.uint32]) -> NDArray[np.uint64]: ...
    def count_ready(self, group: int, keys: NDArray[np.uint8], entries: NDArray[np.uint32]) -> int:
        """Returns how many leading entries are ready, leased, and still belong to the key at the same position.

        Raises:
            ContractError: there is not one entry per key.
        """

    def evict(self, group: int, count: int) -> NDArray[np.uint8]:
        """Evicts up to `count` blocks without leases, and returns their keys."""

    def gone_groups(self) -> NDArray[np.uint32]:
        """Returns the group of each block that the last `insert`, `evict` or `retire` has removed; empty if no groups
        share slots.
        """

    def groups_of(self, entries: NDArray[np.uint32]) -> NDArray[np.uint32]: ...
    def finish(
        self, entries: NDArray[np.uint32], ok: NDArray[np.uint8], leases: int = 0
    ) -> NDArray[np.uint8]: ...
    def remove(self, entries: NDArray[np.uint32]) -> NDArray[np.uint8]: ...
    def ready(self, entries: NDArray[np.uint32]) -> NDArray[np.uint8]: ...
    def adopt(
        self,
        group: int,
        keys: NDArray[np.uint8],
        slots: NDArray[np.int32],
        groups: NDArray[np.uint32] | None = None,
    ) -> NDArray[np.uint8]:
        """Makes ready entries for blocks that slots already contain, oldest first. Returns which were accepted.

        Args:
            groups: the group of each block, if other groups share the slots; None if not.
        """

    def take_coldest(self, group: int, count: int) -> NDArray[np.uint32]:
        """Leases up to `count` blocks without leases, those that would be evicted first, and returns them."""

    def retire(self, group: int, gone: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Takes the slots marked in `gone` out of use permanently. Returns the keys of the ready blocks in them."""

    def slots_of(self, entries: NDArray[np.uint32]) -> NDArray[np.int32]: ...
    def pins_of(self, entries: NDArray[np.uint32]) -> NDArray[np.uint32]: ...
    def clear(self) -> int: ...
    def keys_of(self, entries: NDArray[np.uint32]) -> NDArray[np.uint8]: ...
    def __len__(self) -> int: ...
    def free_slots(self, group: int) -> int: ...
    def up_slots(self, group: int) -> int: ...
    def idle_slots(self, group: int) -> int:
        """Returns the number of slots that are free or contain a block without leases: an `insert` of this many unknown
        keys gives slots to all. In a pool with retired slots there may be more.
        """

    @property
    def evictions(self) -> int: ...
    def check_integrity(self, pinned: NDArray[np.uint32]) -> None: ...

class Found:
    """Result of `TierLookup.look`: the pages that the lookup over all tiers found, each leased in its tier.

    If this object is deleted before `TierLookup.release` or `detach`, the pages stay leased. Entries and slots are
    read-only views of its memory. Page numbers count from the lookup's `start_block`.
    """

    @property
    def blocks(self) -> int:
        """Number of blocks that all groups can restore."""
    @property
    def ready_blocks(self) -> int:
        """Number of leading blocks that are ready in host memory."""
    @property
    def cut(self) -> bool:
        """Whether `room_pages` ended the prefix although the next block was found too."""
    @property
    def leased(self) -> bool:
        """Whether the pages are leased by this object: False after `release` and `detach`."""
    @property
    def groups(self) -> int: ...
    @property
    def expired(self) -> list[tuple[int, int, NDArray[np.uint32]]]:
        """Tier, group and entries of pages that are misses because they have expired. The tier has to remove them."""
    def entries(self, group: int) -> NDArray[np.uint32]:
        """Returns the entry of each page in the index of its tier."""
    def slots(self, group: int) -> NDArray[np.int32]: ...
    def runs(self, group: int) -> NDArray[np.int32]:
        """Returns where the pages are, int32 [runs, 4]: tier, state (0 ready, 1 being fetched), first page, pages."""
    def detach(self) -> None:
        """Passes the leases to the caller, who ends them with `BlockIndex.unpin`.

        Raises:
            ContractError: the leases were ended or passed on before.
        """

class TierLookup:
    """Looks pages up in the indexes of all tiers, host memory first. Contracts: csrc/index/tier_lookup.h.

    Args:
        presences: at most 32 different indexes, each of `groups` groups.

    Raises:
        ConfigError: there is no index, or too many.
        ContractError: an index is given twice, or has a different number of groups.
    """

    def __init__(self, presences: Sequence[BlockIndex], groups: int) -> None: ...
    @property
    def tiers(self) -> int: ...
    @property
    def groups(self) -> int: ...
    def look(
        self,
        keys: Sequence[NDArray[np.uint8]],
        start_block: int,
        room_pages: int,
        tiers_mask: int,
        now_s: int,
        coming: bool = True,
    ) -> Found:
        """Finds and leases the longest prefix from `start_block` on that all groups can restore.

        Args:
            keys: per group, the keys of the complete request.
            room_pages: maximum number of pages of all groups together; a negative number counts as 0.
            tiers_mask: bit t is set if tier t may be used.
            now_s: Unix time; pages that expire at this time or earlier are misses.
            coming: whether pages that are being fetched to host memory count; if not, other tiers are searched for
                them. A page that is being stored in host memory ends the prefix.

        Raises:
            BlockRangeError, ContractError, KeySchemeError: an argument is not valid. Nothing is leased.
        """

    def trim(self, found: Found, blocks: int) -> None:
        """Ends the leases of all but the first `blocks` blocks.

        Raises:
            BlockRangeError: fewer blocks were found. ContractError: `found` is not leased or is of another lookup.
        """

    def release(self, found: Found) -> None:
        """Ends all leases. `found` has no pages afterwards."""

    def count_ready(self, found: Found) -> int:
        """Returns how many leading blocks are ready in host memory now. Precondition: the pages are leased, by `found`
        or by the caller that detached it.
        """

    def present(self, group: int, keys: NDArray[np.uint8], tiers_mask: int, now_s: int) -> NDArray[np.uint8]:
        """Returns, per key, 1 plus the first tier in the mask that has its page ready and not expired; 0 for none."""

class GroupRule:
    """Which pages of one group a hit needs, so that the engine can continue after the hit.

    Args:
        kind: "full", all pages; "window", the last `reach` pages; "chunk", the pages from the start of the chunk of
            `reach` tokens in which the hit ends; "state", the page that ends where the hit ends.
        block_tokens: tokens per page.

    Raises:
        ConfigError: the kind is unknown, `block_tokens` is 0, or `reach` does not fit the kind (0 for full and state).
    """

    def __init__(self, kind: str, block_tokens: int, reach: int = 0) -> None: ...

class FoundLengths:
    """Hits that all groups can restore, and the pages that any of them needs, each leased in its tier;
    `BoundaryLookup.look` makes it. Behaves like `Found`. Pages are numbered from the start of the lookup on.
    """

    @property
    def start_tokens(self) -> int:
        """Number of tokens before the start of the lookup."""
    @property
    def lengths(self) -> list[int]:
        """Lengths of the hits in tokens from the request's start, longest first; empty if nothing can be restored."""
    @property
    def ready(self) -> bool:
        """Whether all leased pages are in host memory."""
    @property
    def shared_tokens(self) -> int:
        """Number of leading tokens for which the "full" groups have all pages, whatever the other groups have;
        `start_tokens` if there is no such group.
        """
    @property
    def cut(self) -> bool:
        """Whether `room_pages` ended the longest hit although there are further keys."""
    @property
    def leased(self) -> bool: ...
    @property
    def groups(self) -> int: ...
    @property
    def expired(self) -> list[tuple[int, int, NDArray[np.uint32]]]: ...
    def first_page(self, group: int) -> int:
        """Returns the number of the first page in `entries` and `slots`."""
    def entries(self, group: int) -> NDArray[np.uint32]:
        """Returns the entry of each page from `first_page` on, in the index of its tier; 2**32 - 1 for a page that no
        hit needs.
        """
    def slots(self, group: int) -> NDArray[np.int32]:
        """Returns the slot of each page from `first_page` on; -1 for a page that no hit needs."""
    def runs(self, group: int) -> NDArray[np.int32]: ...
    def detach(self) -> None: ...

class BoundaryLookup:
    """Looks pages up in all tiers, for groups that need different pages. Contracts: csrc/index/boundary_lookup.h.

    Args:
        rules: one for each group of `tiers`.
        alignment_tokens: the length of every hit is a multiple of this; a multiple of every group's block size.

    Raises:
        ConfigError: there is not one rule per group, or the alignment is not allowed.
    """

    def __init__(self, tiers: TierLookup, rules: Sequence[GroupRule], alignment_tokens: int) -> None: ...
    @property
    def groups(self) -> int: ...
    def look(
        self,
        keys: Sequence[NDArray[np.uint8]],
        start_tokens: int,
        room_pages: int,
        tiers_mask: int,
        now_s: int,
        coming: bool = True,
        most: int = 1,
    ) -> FoundLengths:
        """Finds the `most` longest hits of more than `start_tokens` tokens, and leases the pages that they need.

        Args:
            keys: per group, the keys of the complete request.
            start_tokens: number of tokens that the engine has itself: whole blocks of every group.
            room_pages: maximum number of pages of a hit, over all groups; chunk groups count with a full chunk.
            tiers_mask, now_s, coming: as for `TierLookup.look`.
            most: 1 to 64.

        Raises:
            BlockRangeError, ContractError, KeySchemeError: an argument is not valid. Nothing is leased.
        """

    def keep(self, found: FoundLengths, tokens: int) -> None:
        """Ends the leases of pages that a hit of `tokens` tokens does not need.

        Raises:
            ContractError: `tokens` is not in `found.lengths`, or `found` is not leased or is of another lookup.
        """

    def release(self, found: FoundLengths) -> None:
        """Ends all leases. `found` has no pages afterwards."""

# --- gds ----------------------------------------------------------------------------------------------------

class GdsTotals(TypedDict):
    """Totals of a manager since it was made. `bounced_calls` are the `io_calls` that went through another buffer. For
    `unknown_calls` nothing shows whether they did. The bytes of `straight_pages` did not pass through a staging slot,
    although their digests may have."""

    transfers: int
    pages: int
    straight_pages: int
    failed_pages: int
    io_calls: int
    bounced_calls: int
    unknown_calls: int
    io_bytes: int
    launches: int

class PoolState(TypedDict):
    """The part of an engine's pool on a GPU that is registered, so that its blocks move straight to and from disk.

    `regions`, `pieces` and `bytes` count what is registered now. `registered` and `released` count how many pieces were
    registered and released so far. `refusal` says why blocks pass through staging. It is empty if none does, and for
    plain memory, which needs no registration.
    """

    regions: int
    pieces: int
    bytes: int
    registered: int
    released: int
    refusal: str

class GDSManager:
    """Files on one or more disks, the threads that read and write them, and the staging memory for one device.

    One manager serves all transfers, and is thread-safe. Files are created readable only by this user, and stay open
    until `close`.
    """

    def __init__(
        self,
        ssd_files: Mapping[int, Sequence[str]],
        num_devices: int,
        round_robin: int = 1,
        *,
        threads_per_device: int = 4,
        use_staged_transfer: bool = True,
        max_staging_blocks: int = 64,
        max_staging_bytes: int = 2 << 30,
        gpu_device_id: int | None = None,
        engine_stream: int = 0,
        deadline_s: float = 600,
        stuck_s: float = 60,
        io: str = "auto",
        register_pool: str = "auto",
    ) -> None:
        """
        Args:
            ssd_files: paths by device number, 0 to `num_devices` - 1; per device, enough files for all blocks.
            round_robin: number of consecutive file blocks on one device before the next device follows.
            gpu_device_id: the GPU of the pool; -1 for a pool in plain memory; None for the current GPU, if any.
            engine_stream: the engine's cudaStream_t as a number; 0 is the legacy default stream.
            deadline_s: seconds for one transfer; pages whose I/O has not begun by then fail.
            stuck_s: if I/O makes no progress for this many seconds, the manager takes no more transfers, and leaves its
                staging memory to that I/O.
            io: how to access plain memory, or copy through it: "uring", "threads" (POSIX calls), or "auto", which is
                "uring" if the kernel allows it.
            register_pool: `gds.register_pool`: "off", "auto" or "on".

        Raises:
            ConfigError: a file cannot be opened or is given twice, or an option is not allowed.
        """
    @property
    def num_devices(self) -> int: ...
    @property
    def round_robin(self) -> int: ...
    @property
    def files(self) -> dict[int, list[str]]: ...
    @property
    def threads(self) -> int:
        """Number of threads started so far. The threads of a disk start with its first I/O."""
    @property
    def staging_bytes(self) -> int:
        """Bytes of the manager's own staging memory; 0 before it is reserved or a transfer needs it."""
    @property
    def staging_slots(self) -> int:
        """Number of slots in the manager's own staging memory; 0 if there is none."""
    @property
    def staging_slot_bytes(self) -> int: ...
    @property
    def down_reason(self) -> str:
        """Why the manager takes no more transfers; empty if it takes them."""
    @property
    def totals(self) -> GdsTotals: ...
    def describe(self) -> str:
        """Returns a description of the kind of I/O and of the memory to which it goes."""
    @property
    def pool(self) -> PoolState: ...
    def register_pool(self, address: int, blocks: int, block_stride: int, block_bytes: int) -> None:
        """Registers contiguous blocks, so that they move straight between disk and pool if possible; see `pool`.

        Args:
            address: address of the first block. The blocks are in one allocation, `block_stride` bytes apart.
            block_bytes: number of bytes that move, from each block's start.

        Raises:
            GeometryError: there are no blocks, they overlap, or exceed the address space. ClosedError: it is closed.
        """
    def release_pool(self) -> None:
        """Ends the registrations, before the pool's memory is freed. The next transfer or `restore_pool` makes them
        again. Idempotent.

        Raises:
            ContractError: a transfer is in flight.
        """
    def restore_pool(self) -> None: ...
    def cancel(self) -> None:
        """Cancels the pages of transfers in flight whose I/O has not begun."""
    def close(self) -> None:
        """Cancels transfers, waits for I/O in flight, and closes the files. Files whose I/O never ends stay open.
        Idempotent.
        """

def time_transform(
    gpu_device_id: int,
    layers: int,
    run_bytes: int,
    blocks: int,
    into_pool: bool,
    whole_device: bool,
    repeats: int,
) -> list[tuple[float, float]]:
    """Measures the layout transform. Returns, per repeat, the seconds of the transform with digests, and of the
    device's own copy of the same number of bytes.

    Args:
        gpu_device_id: number of the GPU; -1 for plain memory.
        into_pool: True to move slots into a layer-first pool and check digests; False to fill slots and make digests.
        whole_device: whether to use all multiprocessors instead of the few that transfers use.

    Raises:
        ConfigError: there is no such device. CapacityError: there is not enough memory.
    """

def gpudirect_refusal() -> str:
    """Returns why GPUDirect Storage cannot move any file of this machine to a GPU's memory; empty if it may. For files
    that a lane has opened, `GdsLane.direct_refusal` says more.
    """

def set_cufile_wheels(paths: list[str]) -> None:
    """Sets paths of libcufile in wheels. It is loaded from there if neither this process nor the loader has it."""

def find_cufile() -> tuple[str, str, str, str]:
    """Loads libcufile without opening its driver; needs no GPU.

    Returns:
        The library's path, how it was found ("already loaded", "by the loader" or "in a wheel"), its version such as
        "1.20", and why it was not found, with the paths searched. Values that do not apply are empty.
    """

class GdsLane(Lane):
    """The lane for one rank's GDS_READ and GDS_WRITE ops; `flexkv.transfer.gds_lane.make_gds_lane` makes it.

    Args:
        codecs: one per group.
        stripe: number of the rank whose stripe of each slot image is moved.
        slabs: each disk's slabs, one per group: path, header bytes, slot bytes, slots, id. Empty for a lost disk.
        gpu_device_id: the GPU of the pool; -1 for a pool in plain memory.

    Raises:
        ConfigError: a slab cannot be opened, or an option is not allowed.
        GeometryError: a slab's slots do not have the size of the group's images.
    """

    def __init__(
        self,
        codecs: list[PageCodec],
        stripe: int,
        slabs: Sequence[Sequence[tuple[str, int, int, int, int]]],
        *,
        threads_per_device: int = 4,
        use_staged_transfer: bool = True,
        max_staging_blocks: int = 64,
        max_staging_bytes: int = 2 << 30,
        gpu_device_id: int = -1,
        io: str = "auto",
        register_pool: str = "auto",
    ) -> None: ...
    def describe(self) -> str:
        """Returns a description of the kind of I/O and of the memory to which it goes."""
    @property
    def direct_refusal(self) -> str:
        """Why no slab can be moved directly to the pool's device; empty if one can, or if this is unknown for one."""
    @property
    def totals(self) -> GdsTotals: ...
    @property
    def staging_bytes(self) -> int: ...
    @property
    def staging_slots(self) -> int:
        """Number of slots in the staging memory; 0 before it is allocated."""
    @property
    def staging_slot_bytes(self) -> int: ...
    def reserve_staging(self, group: int, view: KvView) -> None:
        """Registers the memory of `view`, the view of `group`, as `gds.register_pool` says, and allocates the staging
        memory through which its blocks pass.

        Raises:
            CapacityError: there is not enough memory, or a limit leaves no slot; says which settings to change.
            ContractError: there is no such group. GeometryError: the runs of the slabs and of `view` differ.
            ClosedError: the lane is closed. DiskError: a disk does not answer.
        """
    @property
    def pool(self) -> PoolState: ...
    def release_pool(self) -> None:
        """Ends the registrations, before the pool's memory is freed. The next op or `restore_pool` makes them again.
        Idempotent.

        Raises:
            ContractError: an op is in flight.
        """
    def restore_pool(self) -> None: ...
    def close(self) -> None:
        """Closes the slabs, ends registrations and frees the staging memory; later ops fail. Only for a lane that was
        not passed to a transfer engine, which closes its own lanes. Idempotent.
        """
    def counts(self) -> DiskCounts: ...

def transfer_kv_blocks_gds_staged(
    gds_manager: GDSManager,
    gpu_layer_id_list: object,
    gpu_layer_ptrs_tensor: object,
    gds_block_ids: object,
    gpu_block_ids: object,
    gpu_kv_stride_in_bytes: int,
    gpu_block_stride_in_bytes: int,
    gpu_layer_stride_in_bytes: int,
    gds_layer_stride_in_bytes: int,
    gds_block_stride_in_bytes: int,
    gds_kv_stride_in_bytes: int,
    block_size_in_bytes: int,
    gds_copy_off_inside_chunks: int,
    num_blocks_per_file: int,
    total_layers: int,
    is_read: bool,
    verbose: bool = False,
    is_mla: bool = False,
    gpu_block_type: int = 0,
    staging_buffer: object | None = None,
) -> None:
    """Moves blocks between raw files and a pool through staging slots, with one I/O call per block whose bytes in the
    file are contiguous.

    Moves block gpu_block_ids[i] of the pool to block gds_block_ids[i] of the files, or back if `is_read`. Returns when
    all bytes have moved. Tensors are contiguous, of any library that has torch's `data_ptr()` or DLPack.

    Args:
        gpu_layer_id_list: int32, the layers to move; other layers are not changed.
        gpu_layer_ptrs_tensor: int64 addresses: of each layer (vLLM), of the pool (TensorRT-LLM), or of K of all layers,
            then V of all layers (SGLang).
        gds_block_ids, gpu_block_ids: int64, equally many; no block is written twice. They and the layers are in host
            memory.
        block_size_in_bytes: bytes of K, or of V, of one block in one layer.
        gds_copy_off_inside_chunks: offset of this rank's bytes in a chunk of the file that ranks share.
        is_mla: whether K and V are stored as one.
        gpu_block_type: 0 vLLM, 1 TensorRT-LLM, 2 SGLang.
        staging_buffer: contiguous, in memory of the pool's kind, for at least one block; None for the manager's own.

    Raises:
        TransferError: some blocks did not arrive; names them. All others did.
        GeometryError: sizes, strides, dtypes or addresses are not possible.
        BlockRangeError: a layer, block or file does not exist, or a block is given twice.
        CapacityError: the staging buffer is too small for one block.
        ClosedError: the manager is closed.
    """

def transfer_kv_blocks_gds(
    gds_manager: GDSManager,
    gpu_layer_id_list: object,
    gpu_layer_ptrs_tensor: object,
    gds_block_ids: object,
    gpu_block_ids: object,
    gpu_kv_stride_in_bytes: int,
    gpu_block_stride_in_bytes: int,
    gpu_layer_stride_in_bytes: int,
    gds_layer_stride_in_bytes: int,
    gds_block_stride_in_bytes: int,
    gds_kv_stride_in_bytes: int,
    block_size_in_bytes: int,
    gds_copy_off_inside_chunks: int,
    num_blocks_per_file: int,
    total_layers: int,
    is_read: bool,
    verbose: bool = False,
    is_mla: bool = False,
    gpu_block_type: int = 0,
) -> None:
    """Like `transfer_kv_blocks_gds_staged`, without staging: one I/O call for each part of a block that is contiguous
    in the pool and in the file."""

def reserve_gds_staging(
    gds_manager: GDSManager,
    gpu_layer_id_list: object,
    gpu_layer_ptrs_tensor: object,
    gds_block_ids: object,
    gpu_block_ids: object,
    gpu_kv_stride_in_bytes: int,
    gpu_block_stride_in_bytes: int,
    gpu_layer_stride_in_bytes: int,
    gds_layer_stride_in_bytes: int,
    gds_block_stride_in_bytes: int,
    gds_kv_stride_in_bytes: int,
    block_size_in_bytes: int,
    gds_copy_off_inside_chunks: int,
    num_blocks_per_file: int,
    total_layers: int,
    is_read: bool,
    verbose: bool = False,
    is_mla: bool = False,
    gpu_block_type: int = 0,
) -> None:
    """Allocates the manager's own staging memory for transfers with these arguments, so that they need not do so.

    The blocks serve only as examples: two are enough to show how all blocks are aligned. No block is moved. Nothing is
    allocated if such blocks bypass staging.

    Raises:
        CapacityError: there is not enough memory, or a limit leaves no slot; says which settings to change.
        ClosedError, GeometryError, BlockRangeError: see `transfer_kv_blocks_gds_staged`.
    """
