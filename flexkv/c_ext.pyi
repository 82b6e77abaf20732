"""The native core, one section per area. Whoever changes csrc/bindings/bind_<area>.cpp keeps its section in step."""

from collections.abc import Mapping, Sequence
from typing import Protocol, TypedDict

import numpy as np
from numpy.typing import NDArray

from flexkv.transfer.graph import Edge, TransferOp

class Buffer(Protocol):
    """Any object with the C-contiguous buffer protocol (numpy arrays, bytearray, memoryview, mmap)."""

# --- module -------------------------------------------------------------------------------------------------

__variant__: str
"""`cpu` or `cuda`, with `-address` or `-thread` for a sanitizer build."""

__interface__: str
"""A digest of this file as it was at the build; `flexkv/native_core.py` compares it with the package's file."""

def build_info() -> dict[str, bool | str | int]:
    """What this module was built with: cuda, sanitizer, compiler, cpp_standard."""

def load_nvtx(library: str) -> None:
    """Makes the lanes' threads name their work to a profiler, by the NVTX of `library`, a name or a path.

    This is permanent, because threads may be inside a range: if a library was loaded before, nothing changes.

    Raises:
        ConfigError: the library cannot be loaded, or lacks nvtxRangePushA or nvtxRangePop.
    """

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

class PageConversion:
    """Rewrites stripes from one order of the elements of K and V into another.

    Args:
        counts: layers, tokens, heads, elements of a head; the last is 1 if both orders keep a head's row together.
        element_bytes: bytes of the unit that is moved unchanged: an element, or the row.
        source, target: for K and V, bytes from one layer, token, head and element to the next; and the offset at which
        V begins.

    Raises:
        GeometryError: the elements of one of the orders leave gaps or overlap.
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
        """Rewrites `source` to `target`. Raises GeometryError unless both hold `stripe_bytes` bytes and share none."""

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
    """Copies layers [lo, hi) of a block; the rest of the stripe is not changed."""

def scatter_layers(view: KvView, lo: int, hi: int, block: int, stripe: Buffer) -> None:
    """Copies layers [lo, hi) of the stripe to a block; the block's other layers are not changed."""

def run_digest(run: Buffer) -> int:
    """The 64-bit digest of a run's bytes (docs/digest.md)."""

def page_digests(view: KvView, stripe: Buffer) -> NDArray[np.uint64]:
    """One digest for each of `view.runs`, from the runs' bytes in `stripe` (exactly view.stripe_bytes bytes)."""

# --- pool ---------------------------------------------------------------------------------------------------

class HostPool:
    """Native host pool; use `flexkv.transfer.host_pool.HostPool`."""

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
        """Whether bring-up has ended, complete or not."""
    @property
    def ready_slots(self) -> int: ...
    @property
    def stopped_reason(self) -> str: ...
    @property
    def creator_gone(self) -> bool:
        """For an attached pool, whether its creator has ended or closed it."""
    def pin(self, device: int) -> None: ...
    @property
    def pinned_slots(self) -> int: ...
    @property
    def registration_error(self) -> str:
        """The first slots that the GPU refused at every try, and why; empty if there are none."""
    def wait_ready(self, slots: int, deadline_s: float) -> bool: ...
    def address(self) -> tuple[int, int, bytes, int]:
        """pid, fd, token, file_bytes."""
    @property
    def file_layout(self) -> tuple[int, int, int]:
        """Offset of slot 0 in the file of a shared pool, slots per extent, bytes from one extent to the next."""
    def report(self) -> list[tuple[int, int, str, int, float, bool, int]]:
        """index, bytes, pages_kind, huge_bytes, bring_up_s, registered, numa_node of each extent."""
    def extent_of(self, slot: int) -> NDArray[np.uint8]: ...
    def slot(self, slot: int) -> NDArray[np.uint8]: ...
    def settle(self, slots: NDArray[np.int32], read: int, verified: bool) -> None:
        """Reports that a read from disk has ended for these slots' pages: loads that wait for it continue or fail."""
    def close(self) -> None: ...

class SlotBoard:
    """What a unit tells other units about one tier's slots: csrc/share/slot_board.h. Not thread-safe.

    Raises:
        CapacityError: there is no memory for so many slots. BlockRangeError: no slot.
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
        """Records what the pages' rows will say once they are published; empty arrays stand for zeros.

        Raises:
            BlockRangeError: there is no such slot. ContractError: arrays of other lengths.
        """
    def hide(self, slots: NDArray[np.int32]) -> None:
        """Withdraws the slots' pages: peers do not find them any more, although the slots still hold them.

        Raises:
            BlockRangeError: there is no such slot.
        """
    def show(self, slots: NDArray[np.int32], group: int, keys: NDArray[np.uint8]) -> None:
        """Publishes pages that `hide` has withdrawn. Precondition: each slot holds the page of its key, `note` has
        given the page's other facts, and the slot is not being written.

        Raises:
            BlockRangeError: there is no such slot. ContractError: not one key per slot.
        """
    def retire(self) -> None:
        """Makes every reader leave permanently."""

class PeerDirectory:
    """Which pages other units have, and where: csrc/share/peer_directory.h. Thread-safe."""

    def __init__(self) -> None: ...
    def add(
        self,
        board: tuple[int, int],
        pool: tuple[int, int, int, int, int, int] | None = None,
        formats: Sequence[tuple[Sequence[tuple[int, int, int]], Sequence[tuple[int, int, int, int]]]] = (
            ((), ()),
        ),
    ) -> int:
        """Maps a peer's memory, to be read only; returns the peer's number.

        Args:
            board: descriptor and bytes.
            pool: descriptor, bytes of the file, offset of slot 0, bytes of a slot, slots per extent, bytes from one
                extent to the next.
            formats: for each of the peer's KV groups the pieces of its pages (offset in the peer's slot, offset in
                ours, bytes; none if the caller converts them) and their runs (offset in our slot, bytes, offset of the
                digest in the peer's slot and in ours; -1 for none). Pages of other groups are not known.

        Raises:
            ClosedError: a file is not what was announced. CapacityError: it cannot be mapped.
        """
    def drop(self, peer: int, keep: bool = False) -> None:
        """Forgets a peer. `keep`: its pages stay known, as last seen."""
    def follow(self) -> int:
        """Reads what has changed; returns how many rows it looked at."""
    @property
    def has_news(self) -> bool: ...
    def take(
        self, most: int
    ) -> tuple[
        NDArray[np.uint8], NDArray[np.uint32], NDArray[np.uint32], NDArray[np.uint64], NDArray[np.bool_]
    ]:
        """News of up to `most` pages: keys, groups, tokens, expiries, and whether a peer has the page now. Lost pages
        come first, each once; a page that came back is also among those that are there.
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
        """The same for only these pages; None if there is no news."""
    def bring(
        self,
        pool: HostPool,
        group: int,
        keys: NDArray[np.uint8],
        tokens: NDArray[np.uint32],
        expiries: NDArray[np.uint64],
        slots: NDArray[np.int32],
    ) -> tuple[NDArray[np.uint8], NDArray[np.int32], NDArray[np.int32]]:
        """Copies pages to slots; returns for each how it ended (0 copied, 1 absent, 2 changed, 3 digest, 4 another
        format), and for 4 the peer and its slot. A page that expires before the time given counts as absent.

        Raises:
            BlockRangeError: a slot is not up. ContractError: arrays of other lengths.
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
        """Copies the start of a page's slot in the peer's own format; returns how that ended, as `bring`.

        Raises:
            ContractError: not one key.
        """
    def find(
        self, group: int, keys: NDArray[np.uint8], without: NDArray[np.int32] = ...
    ) -> tuple[
        NDArray[np.int32], NDArray[np.int32], NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64]
    ]:
        """For each key a peer that has it, other than those in `without` (-1: none), its slot, generation, expiry and
        epoch."""
    def retired(self, peer: int) -> bool: ...
    def counts(self, peer: int) -> tuple[int, int, int, int, int]:
        """Number of pages requested from the peer, by outcome."""
    def pages(self, peer: int) -> int: ...
    @property
    def overruns(self) -> int:
        """How often all rows of a peer were read again, because too many had changed."""

def available_memory(proc_root: str = "/proc", cgroup_root: str = "/sys/fs/cgroup") -> tuple[int, str]:
    """Bytes that this process may still take, and the limit that decides them."""

class CudaInfo(TypedDict):
    built: bool
    driver: int
    device_count: int
    reason: str

def cuda_info() -> CudaInfo:
    """Whether built with CUDA, driver version (13000 is 13.0; 0 for none), devices, and why none can be used."""

def cuda_identity(device: int) -> tuple[str, str]:
    """A device's UUID ("GPU-...") and its PCI address ("0000:17:00.0"). Makes no context.

    Raises:
        ConfigError: there is no such device, or no driver.
    """

# --- transfer -----------------------------------------------------------------------------------------------

class PageMover:
    """Moves pages of host lanes. Safe to share between engines. At most 64 others may wrap one (ContractError)."""

class HostMover(PageMover):
    """Copies between an engine pool in plain memory and the host pool."""

    def __init__(self) -> None: ...

class Lane:
    """Executes the ops of some kinds. Belongs permanently to one TransferEngine: a second one raises ContractError."""

class StreamPoint:
    """A point in a device stream's work, made by `TransferEngine.record`."""

class CudaLane(Lane):
    """Copies between a GPU and the host pool. Raises ConfigError if there is no such device, and unless 1 <=
    digest_threads <= 16.
    """

    def __init__(
        self,
        device: int,
        batch: bool,
        kernel: bool,
        digest_threads: int,
        load_kernel_below: int | None = None,
        store_kernel_below: int | None = None,
    ) -> None:
        """`load_kernel_below`, `store_kernel_below`: the kernel copies runs of fewer bytes; None: the built-in limits.

        Raises:
            ConfigError: there is no such device, or an argument is out of range.
        """
    @property
    def ways(self) -> dict[str, str]:
        """A description, for "h2d" and "d2h", of which runs the kernel copies and what copies the others."""
    @property
    def notes(self) -> str:
        """The ways that are not used, and why; empty if all are used."""
    @property
    def failed_launches(self) -> int:
        """Number of launches that failed after the self-test, of the kernel that copies or of the kernel that waits for
        a layer. The first failure of either ends its use.
        """
    def counts(self) -> list[tuple[str, int, int, int]]:
        """path, pieces, bytes, driver calls of each path."""

class DeviceMemory:
    """Memory of a GPU, for measurements. Raises ConfigError where there is no such device."""

    def __init__(self, device: int, bytes: int) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def multiprocessors(self) -> int: ...
    def time_copies(self, to_device: bool, call_bytes: int, calls: int) -> float:
        """Seconds of `calls` copies of `call_bytes` to or from pinned memory, one driver call each."""

CUDA_THRESHOLDS: dict[str, int]
"""The numbers that decide how a GPU's bytes are copied; csrc/cuda/copy_plan.h says where they come from."""

class OpResult:
    """How an op ended; `flexkv.transfer.graph.OpResult` says what the fields mean."""

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
    """Native engine; use `flexkv.transfer.engine.TransferEngine`."""

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
        """Reads each op and edge by the names of its fields.

        Raises:
            ContractError: a field is missing, not of its type, or its value is refused.
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
        """Whether the layer was in time, and (op_id, failed positions) of the ops with failed pages."""
    def cancel(self, ticket: int) -> int: ...
    def lanes(self) -> list[tuple[int, str, bool, str, int, int, list[int], int]]:
        """kind, lane, up, reason, open ops, held places, stuck op ids, times down."""
    def close(self, deadline_s: float) -> bool: ...

# --- storage ------------------------------------------------------------------------------------------------

PAGE_VERSION: int

def uring_refusal() -> str:
    """Why io_uring cannot be used; empty if it can."""

class PageCodec:
    """The slot image of a KV group: stripes, and the trailer that identifies and verifies them (docs/disk-format.md).

    Args:
        runs: each rank's runs, int64 [n, 3]: offset in the stripe, bytes, layer; ascending, filling the stripe.
        host_digests: `seal` finds the run digests in the image and keeps them.
        group: number of the KV group, in [0, 2**32): its pages name it, and a page that names another is a miss.

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
        """Writes the trailer into `image` (image_bytes bytes, writable)."""

    def check(
        self, image: Buffer, slab_id: int, slot: int, tag: bytes | None, now: int, data: bool = True
    ) -> tuple[str, str]:
        """`("none", "")`, or the name of the miss and the reason. Without `tag`, any page is accepted."""

    def seal_apart(
        self, image: Buffer, trailer: Buffer, slab_id: int, slot: int, tag: bytes, written: int
    ) -> None:
        """Writes a page's trailer into `trailer` (trailer_bytes bytes, writable). The page's stripes lie in `image`
        (trailer_offset bytes or more; with host_digests image_bytes, which include the run digests)."""

    def check_apart(
        self, image: Buffer, trailer: Buffer, slab_id: int, slot: int, tag: bytes | None, now: int
    ) -> tuple[str, str]:
        """Like `check`, for stripes in `image` (writable) and their trailer elsewhere. With host_digests it writes the
        run digests into `image` if the page passes."""

    def trailer(self, image: Buffer) -> tuple[int, int, bytes, int]:
        """slab_id, slot, tag and written from the trailer, unchecked."""

class SlabFile:
    """An open slab. `lock_fd`: the folder's lock, kept for as long as an I/O may be under way.

    Raises:
        DiskError: it cannot be opened. GeometryError: the sizes describe no slab.
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
        """Why I/O goes through the page cache; empty if it does not."""
    @property
    def fd(self) -> int: ...
    @property
    def row(self) -> tuple[str, int, int, int, int]:
        """Path, header bytes, slot bytes, slots, id."""
    @property
    def in_place(self) -> bool:
        """Whether the path still leads to this file."""
    def offset(self, slot: int) -> int: ...
    def sync(self) -> int:
        """0 when everything written is on the disk, else -errno."""

class QueueWrapper:
    """Wraps the I/O queue of each disk in a queue of its own. Abstract."""

class DiskCounts(TypedDict):
    read_pages: int
    read_bytes: int
    written_pages: int
    written_bytes: int
    zeroed_bytes: int
    write_errors: int
    misses: dict[str, int]

class DiskLane(Lane):
    """Executes DISK_READ, DISK_WRITE and DISK_SEAL of one ownership unit; made by `StripedSlabs.lane`.

    Args:
        slabs: each disk's slabs, one per group; the same one for groups that share it.
        zero_fill: clears slots that have space and were never written, ahead of the pages, while a disk is idle.
        register_buffers: io_uring keeps the pools' pages pinned; if the kernel refuses that, I/O goes on without.

    Raises:
        GeometryError: a pool's or slab's slots are not images of its group. ConfigError: `io` or `depth` is not
            allowed. DiskError: io_uring is requested and refused.
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
        """Takes a disk out. Raises BlockRangeError for a disk that the lane does not have."""
    @property
    def zero_fill(self) -> bool:
        """Whether idle disks write zeros to slots that have space and were never written."""
    @property
    def files_closed(self) -> bool:
        """Whether the slabs were closed, because the lane's engine was closed and nothing moves."""
    def states(self) -> list[tuple[bool, str, str, str]]:
        """For each disk: whether it is lost, why, its backend, and why that is not the requested one."""
    def full_reasons(self) -> list[str]:
        """For each disk: why it accepts no page in slots without space of their own; empty while it does."""
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
    """Rotates rows of keys and writes them to their places, in one pass (csrc/rope/rotation.h).

    Head h of row r is read at byte `src_offsets[r] + h * src_head_stride` of `src` and written at byte
    `dst_offsets[r] + h * dst_head_stride` of `dst`. Tensors are contiguous, of any library, all in host memory or all
    on the current GPU. No two rows may be written to the same place. On the host it returns when done; on a GPU the
    launch is enqueued. The tables must have passed `check_rotation` before they were copied to the GPU, and must exist
    until the launch has run.

    Args:
        src_offsets, dst_offsets: int64 [rows], bytes.
        turn_of_row: int32 [rows], index into `turns`; -1 writes zeros, -2 copies the row unchanged.
        turns: float32 [turns, 2, rotary_dim / 2], cosines and sines.
        dtype: dtype of the keys: float32, bfloat16 or float16.
        pairing: neox or gptj.
        src_head_stride, dst_head_stride: bytes.
        stream: cudaStream_t as a number.

    Raises:
        GeometryError: impossible dimensions, strides or dtypes, or memory that source and destination share.
        BlockRangeError: a row outside its memory, or a turn that does not exist.
        TransferError: the GPU refused the launch. ConfigError: a build without CUDA.
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
    """Checks all that `rotate_rows` checks, and moves no byte: for tables that are then taken to a GPU.

    `src` and `dst` may lie on the GPU; the tables lie in host memory.

    Raises:
        GeometryError, BlockRangeError: as for `rotate_rows`.
    """

# --- index: hashes and key chains -------------------------------------------------------------------------------------

def sha256(data: bytes, portable: bool = False) -> bytes:
    """The SHA-256 of `data`; with `portable`, without the CPU's SHA instructions."""

def sha256_is_native() -> bool:
    """Whether the CPU's SHA instructions are used."""

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
    """Keys of the first `longest`, ..., `shortest` tokens as partial blocks, shape [longest - shortest + 1, 16].
    `namespace` as in `EngineKeyChain`."""

class EngineKeyChain:
    """Index keys of one request's blocks, made from the engine's own block keys as they grow.

    Args:
        namespace: 32 bytes, from `namespace_digest`; or with a mark of 2 bytes after them, with which each key ends.
        group: KV group.

    Raises:
        KeySchemeError: the namespace has another length.
    """

    def __init__(self, namespace: bytes, group: int) -> None: ...
    def extend(self, engine_keys: object, start: int = 0) -> int:
        """Appends the keys of new blocks; returns their number. Blocks that the chain has cost nothing.

        Args:
            engine_keys: list or tuple of bytes, or uint8 [blocks, bytes]; element 0 is block `start`. Usually the whole
                list of the request.

        Raises:
            KeySchemeError: a key is not 16 to 64 bytes of a cryptographic hash. Nothing is appended.
            ContractError: `start` lies beyond the chain's end.
        """

    def truncate(self, blocks: int) -> None:
        """Keeps the first `blocks` keys. Arrays returned before do not change."""

    @property
    def keys(self) -> NDArray[np.uint8]:
        """uint8 [blocks, 16], read-only, not a copy; it does not grow with the chain."""

    def __len__(self) -> int: ...

class TokenChain:
    """Chained SHA-256 block digests from tokens, equal to the page hashes that SGLang makes.

    Args:
        seed: empty, or 32 bytes that stand before the first block.
        bigram: hash each token with its successor (EAGLE); a block then reads one token of the next.

    Raises:
        ConfigError: `block_tokens` is 0. KeySchemeError: a seed of another length.
    """

    def __init__(self, block_tokens: int, seed: bytes = b"", bigram: bool = False) -> None: ...
    def extend(self, tokens: object, start: int = 0) -> int:
        """Appends new whole blocks; returns their number. Reads no token of a block that the chain has.

        Args:
            tokens: list, tuple or int32/int64/uint32 array; element 0 is token `start` of the request. Tokens after the
                last whole block are not kept and must be given again.

        Raises:
            TokenError: a token is not an integer in [0, 2**32) (a bool is not one), and the message names position and
                value; or there are more than 2**27 tokens. Nothing is appended.
            ContractError: `start` lies beyond the chain's end.
        """

    def truncate(self, blocks: int) -> None: ...
    @property
    def digests(self) -> NDArray[np.uint8]:
        """uint8 [blocks, 32], read-only, not a copy."""

    @property
    def block_tokens(self) -> int: ...
    def __len__(self) -> int: ...

# --- index: blocks ----------------------------------------------------------------------------------------------------

def in_a_row(slots: NDArray[np.int32]) -> bool:
    """Whether there is a slot, and each further one follows the slot before it."""

def eviction_policies() -> list[str]:
    """The names that `BlockIndex` takes, the default first."""

class BlockIndex:
    """Which blocks a tier holds, and in which slots. Contracts: csrc/index/block_index.h.

    Keys are uint8 [blocks, 16]; entries are uint32 [blocks], 0xFFFFFFFF for none; flags are uint8 [blocks].

    Raises:
        ConfigError: no group, too many, or an unknown policy. CapacityError: too many slots.
    """

    def __init__(self, group_slots: list[int], policy: str = "lru", shared_with: list[int] = []) -> None:
        """
        Args:
            shared_with: for each group the group whose slots it shares, itself or an earlier one; empty if none share.
                Methods about a group's slots, and about its evicted or cold blocks, then concern all groups that share
                them.
        """
    def grow(self, group: int, slots: int) -> None: ...
    def tell(self, board: SlotBoard) -> None:
        """Publishes on `board` the blocks that are ready, and from now on every change to a slot.

        Raises:
            ContractError: the groups have slots of their own.
            BlockRangeError: the index has more slots than the board.
        """
    def match_prefix(self, group: int, keys: NDArray[np.uint8]) -> NDArray[np.uint32]: ...
    def match_and_pin(
        self, group: int, keys: NDArray[np.uint8]
    ) -> tuple[NDArray[np.uint32], NDArray[np.int32]]:
        """Leases each entry that `match_prefix` finds; returns the entries and their slots."""

    def find(self, group: int, keys: NDArray[np.uint8], ready_only: bool = True) -> NDArray[np.uint32]: ...
    def find_marked(self, group: int, mark: bytes) -> NDArray[np.uint32]:
        """The entries of a group, ready or pending, whose keys end with `mark`, 2 bytes. Takes some milliseconds per
        million entries.

        Raises:
            KeySchemeError: the mark has another length.
        """

    def pin(self, entries: NDArray[np.uint32]) -> NDArray[np.int32]: ...
    def pin_found(
        self, group: int, keys: NDArray[np.uint8], entries: NDArray[np.uint32]
    ) -> NDArray[np.int32]:
        """`pin` for entries that a lookup found, which must still be those of `keys`.

        Raises:
            ContractError: one is not, and the message names it. Nothing is leased.
        """
    def pin_coming(self, entries: NDArray[np.uint32]) -> NDArray[np.int32]:
        """`pin` for entries that are ready, or pending and leased by their filler."""
    def unpin(self, entries: NDArray[np.uint32], hit: bool = False) -> None:
        """Ends one lease on each; `hit`: a request found these blocks and has used them."""
    def keep_leases(self, leased: NDArray[np.uint32]) -> int:
        """Ends every lease but these, one element per lease; returns how many ended.

        For a caller that was interrupted before it had recorded its leases. Pending entries without a lease are
        removed. O(all entries).

        Raises:
            ContractError: an entry is leased less often than it is named; nothing has changed.
        """
    def touch(self, entries: NDArray[np.uint32], hits: int = 0) -> None:
        """Marks entries as used, in the order of their request; a request found the leading `hits` of them."""
    def insert(
        self,
        group: int,
        keys: NDArray[np.uint8],
        max_new: int,
        filler: int = 0,
        leases: int = 0,
        spare: bool = False,
    ) -> tuple[NDArray[np.uint32], NDArray[np.uint32], NDArray[np.int32], NDArray[np.uint8], int, int]:
        """Inserts blocks. Returns positions, entries and slots of the new ones, evicted keys, and numbers of known and
        dropped.

        Args:
            filler: the op that fills the new blocks, for which requests may wait; with 0 no request may wait for them.
            leases: pins on each new entry beside the insert's own, which `finish` keeps.
            spare: the new blocks are evicted first if spare ones have more than their share of the slots, until a
                request hits them, or they are offered without this.
        """

    def spare(self, entries: NDArray[np.uint32]) -> NDArray[np.uint8]: ...
    def fillers(self, entries: NDArray[np.uint32]) -> NDArray[np.int64]:
        """The op that fills each entry that is pending; 0 for all others."""

    def set_expiry(self, entries: NDArray[np.uint32], expiries: NDArray[np.uint64]) -> None:
        """Sets the Unix time, in seconds, from which on blocks are misses for a TierLookup; 0: never.

        Raises:
            ContractError: an entry is not in use. Nothing is set.
        """

    def expiries(self, entries: NDArray[np.uint32]) -> NDArray[np.uint64]: ...
    def count_ready(self, group: int, keys: NDArray[np.uint8], entries: NDArray[np.uint32]) -> int:
        """How many of the leading entries are ready, leased, and the blocks of `keys`.

        Raises:
            ContractError: not one entry per key.
        """

    def evict(self, group: int, count: int) -> NDArray[np.uint8]:
        """Evicts up to `count` blocks without leases; returns their keys."""

    def gone_groups(self) -> NDArray[np.uint32]:
        """The group of each block that the last `insert`, `evict` or `retire` removed; empty if no groups share
        slots.
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
        """Makes ready entries for blocks that exist already, oldest first; returns which were taken.

        Args:
            groups: each block's group, if others share the group's slots.
        """

    def take_coldest(self, group: int, count: int) -> NDArray[np.uint32]:
        """Leases up to `count` blocks without leases, those that would be evicted first; returns them."""

    def retire(self, group: int, gone: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Permanently takes the slots marked in `gone` out of use; returns the keys of the ready blocks lost with
        them.
        """

    def slots_of(self, entries: NDArray[np.uint32]) -> NDArray[np.int32]: ...
    def pins_of(self, entries: NDArray[np.uint32]) -> NDArray[np.uint32]: ...
    def clear(self) -> int: ...
    def keys_of(self, entries: NDArray[np.uint32]) -> NDArray[np.uint8]: ...
    def __len__(self) -> int: ...
    def free_slots(self, group: int) -> int: ...
    def up_slots(self, group: int) -> int: ...
    def idle_slots(self, group: int) -> int:
        """Number of slots that are free or hold a block without leases: an `insert` of this many unknown keys has room
        for all. In a pool with retired slots it may have room for more.
        """

    @property
    def evictions(self) -> int: ...
    def check_integrity(self, pinned: NDArray[np.uint32]) -> None: ...

class Found:
    """The pages that a lookup over all tiers found, each leased in its tier. Made by `TierLookup.look`.

    If it is dropped without `TierLookup.release` or `detach`, the pages stay leased. Entries and slots are read-only
    views of its memory. Pages are numbered from the start of the lookup on.
    """

    @property
    def blocks(self) -> int:
        """Blocks that every group can restore."""
    @property
    def ready_blocks(self) -> int:
        """How many leading ones of these blocks are ready in host memory."""
    @property
    def cut(self) -> bool:
        """Whether the room ended the prefix although the next block is found too."""
    @property
    def leased(self) -> bool:
        """False after `release` and `detach`."""
    @property
    def groups(self) -> int: ...
    @property
    def expired(self) -> list[tuple[int, int, NDArray[np.uint32]]]:
        """Tier, group and entries of pages that are misses because they have expired: their owner removes them."""
    def entries(self, group: int) -> NDArray[np.uint32]:
        """The entry of each page in the index of its tier."""
    def slots(self, group: int) -> NDArray[np.int32]: ...
    def runs(self, group: int) -> NDArray[np.int32]:
        """The places of the pages, int32 [runs, 4]: tier, state (0 ready, 1 being filled by an op), first page,
        pages.
        """
    def detach(self) -> None:
        """Hands the leases over to the caller, who ends them with the indexes' `unpin`.

        Raises:
            ContractError: the leases were ended or handed over before.
        """

class TierLookup:
    """One lookup over the indexes of all tiers, host memory first. Contracts: csrc/index/tier_lookup.h.

    Args:
        presences: at most 32 different indexes, each of `groups` groups.

    Raises:
        ConfigError: no tier, or too many. ContractError: an index named twice, or with another number of groups.
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
        """Leases the longest prefix after `start_block` that every group can restore.

        Args:
            keys: per group, the keys of the whole request.
            room_pages: most pages of all groups together; a negative number counts as no room.
            tiers_mask: bit t: tier t may be used.
            now_s: Unix time; what expires then or earlier is a miss.
            coming: host pages that ops are filling count. Otherwise another tier may have them. Host pages that are
                being stored end the prefix.

        Raises:
            BlockRangeError, ContractError, KeySchemeError: nothing is leased.
        """

    def trim(self, found: Found, blocks: int) -> None:
        """Ends the leases on all but the first `blocks` blocks.

        Raises:
            BlockRangeError: more than were found. ContractError: `found` is not leased, or another lookup's.
        """

    def release(self, found: Found) -> None:
        """Ends all leases. `found` has no page any more."""

    def count_ready(self, found: Found) -> int:
        """How many leading blocks are ready in host memory now. `found` is leased, by itself or by the caller that
        detached it.
        """

    def present(self, group: int, keys: NDArray[np.uint8], tiers_mask: int, now_s: int) -> NDArray[np.uint8]:
        """Per key, the first tier of the mask in which it is ready and has not expired, plus 1; 0: none."""

class GroupRule:
    """Which pages of one group a hit needs, so that the engine can go on after it.

    Args:
        kind: "full", every page; "window", the last `reach` pages; "chunk", those from the start of the chunk of
            `reach` tokens that the hit ends in; "state", the page that ends where the hit ends.
        block_tokens: tokens of a page.

    Raises:
        ConfigError: an unknown kind, a block without tokens, a reach for a kind without one, or none for another.
    """

    def __init__(self, kind: str, block_tokens: int, reach: int = 0) -> None: ...

class FoundLengths:
    """Hits that every group can restore; the pages that any of them needs are leased. Made by `BoundaryLookup.look`.

    Like `Found`; pages are numbered from the start of the lookup on.
    """

    @property
    def start_tokens(self) -> int:
        """Tokens after which the lookup began."""
    @property
    def lengths(self) -> list[int]:
        """Lengths in tokens from the start of the request, the longest first; empty if nothing can be restored."""
    @property
    def ready(self) -> bool:
        """Whether all leased pages are in host memory."""
    @property
    def shared_tokens(self) -> int:
        """Number of tokens for which the groups of full attention have all pages, whatever the others have;
        `start_tokens` if there is no such group.
        """
    @property
    def cut(self) -> bool:
        """Whether the room ended the longest hit although further keys follow."""
    @property
    def leased(self) -> bool: ...
    @property
    def groups(self) -> int: ...
    @property
    def expired(self) -> list[tuple[int, int, NDArray[np.uint32]]]: ...
    def first_page(self, group: int) -> int:
        """The number of the first page in `entries` and `slots`."""
    def entries(self, group: int) -> NDArray[np.uint32]:
        """The entry of each page from `first_page` on, in the index of its tier; 2**32 - 1 for a page that is not
        needed.
        """
    def slots(self, group: int) -> NDArray[np.int32]:
        """The slot of each of these pages; -1 for a page that is not needed."""
    def runs(self, group: int) -> NDArray[np.int32]: ...
    def detach(self) -> None: ...

class BoundaryLookup:
    """One lookup over all tiers for groups that need different pages. Contracts: csrc/index/boundary_lookup.h.

    Args:
        rules: one for each group of `tiers`.
        alignment_tokens: every hit is a multiple of this, and this is a multiple of every group's block.

    Raises:
        ConfigError: not one rule per group, or an alignment that is not allowed.
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
        """Leases the pages that the `most` longest hits of more than `start_tokens` need.

        Args:
            keys: per group, the keys of the whole request.
            start_tokens: tokens that the engine has itself, whole blocks of every group.
            room_pages: pages that a hit may need over all groups; for a chunk group a whole chunk counts.
            tiers_mask, now_s, coming: as for `TierLookup.look`.
            most: 1 to 64.

        Raises:
            BlockRangeError, ContractError, KeySchemeError: nothing is leased.
        """

    def keep(self, found: FoundLengths, tokens: int) -> None:
        """Ends the leases on pages that a hit of `tokens` does not need.

        Raises:
            ContractError: `tokens` is none of the lengths, or `found` is not leased, or another lookup's.
        """

    def release(self, found: FoundLengths) -> None:
        """Ends all leases. `found` has no page any more."""

# --- gds ----------------------------------------------------------------------------------------------------

class GdsTotals(TypedDict):
    """Totals of a manager since it was made. `bounced_calls` are the `io_calls` that went through another buffer; for
    `unknown_calls` cuFile does not say whether they did. `straight_pages` passed through no staging slot; their digests
    may have."""

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
    """The registered part of an engine's pool on a GPU, whose blocks move straight between disk and pool.

    `regions`, `pieces` and `bytes` are registered now; `registered` and `released` count pieces so far. `refusal` says
    why blocks pass through staging; empty if none does, and for plain memory, which needs no registration.
    """

    regions: int
    pieces: int
    bytes: int
    registered: int
    released: int
    refusal: str

class GDSManager:
    """Files on one or more disks, the threads that serve them, and the staging memory for one device.

    Made once and used for every transfer; safe to use from several threads. Files are opened (and created) only for
    this user and stay open until `close`.
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
            ssd_files: paths by device number, 0 to `num_devices` - 1; as many files per device as blocks need.
            round_robin: file blocks in a row on one device before the next device's turn.
            gpu_device_id: the GPU that holds the pool, -1 for a pool in plain memory; None: the current GPU, if there
                is one.
            engine_stream: the engine's cudaStream_t as a number; 0 is the legacy default stream.
            deadline_s: seconds for one transfer; pages that were not issued by then fail.
            stuck_s: seconds that I/O may stand still before the manager gives up its staging and goes out of service.
            io: for plain memory and copies through it: "uring", "threads" (POSIX calls), or "auto", which is "uring" if
                the kernel allows it.
            register_pool: `gds.register_pool`: "off", "auto" or "on".

        Raises:
            ConfigError: a file that cannot be opened or is given twice, or an option that is not allowed.
        """
    @property
    def num_devices(self) -> int: ...
    @property
    def round_robin(self) -> int: ...
    @property
    def files(self) -> dict[int, list[str]]: ...
    @property
    def threads(self) -> int:
        """Threads started so far: they start with the first I/O of their disk."""
    @property
    def staging_bytes(self) -> int:
        """Bytes of the manager's own staging: 0 until it is reserved, or a transfer needs it."""
    @property
    def staging_slots(self) -> int:
        """Slots of the manager's own staging; 0 while there is none."""
    @property
    def staging_slot_bytes(self) -> int: ...
    @property
    def down_reason(self) -> str:
        """Why the manager takes no transfer any more; empty while it does."""
    @property
    def totals(self) -> GdsTotals: ...
    def describe(self) -> str:
        """Says what the I/O is and which memory it goes to."""
    @property
    def pool(self) -> PoolState: ...
    def register_pool(self, address: int, blocks: int, block_stride: int, block_bytes: int) -> None:
        """Makes contiguous blocks move straight between disk and pool; `pool` says whether they do.

        Args:
            address: of the first block. The blocks lie in one allocation, `block_stride` bytes apart.
            block_bytes: how many bytes move, from each block's start.

        Raises:
            GeometryError: no blocks, blocks that overlap, or more than the address space holds. ClosedError.
        """
    def release_pool(self) -> None:
        """Ends the registrations, before the pool's memory goes away. The next transfer makes them again, or
        `restore_pool`. Idempotent.

        Raises:
            ContractError: a transfer is under way.
        """
    def restore_pool(self) -> None: ...
    def cancel(self) -> None:
        """Cancels the pages of transfers under way that were not issued yet."""
    def close(self) -> None:
        """Cancels, waits for I/O in flight, closes the files. Idempotent.

        I/O that never ends keeps its files open.
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
    """Seconds of the layout transform with digests, and of the device's own copy of as many bytes, per repeat.

    Args:
        gpu_device_id: -1 for plain memory.
        into_pool: from slots into a layer-first pool, checking digests; else into the slots, making them.
        whole_device: uses every multiprocessor instead of the few that transfers use.

    Raises:
        ConfigError: no such device. CapacityError: there is not enough memory.
    """

def gpudirect_refusal() -> str:
    """Why no file of this machine reaches a GPU's memory by GPUDirect Storage; empty if one may. A lane that has
    opened a file knows this for the file (`GdsLane.direct_refusal`).
    """

def set_cufile_wheels(paths: list[str]) -> None:
    """Sets paths of libcufile in wheels: one is loaded from there if neither this process nor the loader has it."""

def find_cufile() -> tuple[str, str, str, str]:
    """Loads libcufile without opening its driver; needs no GPU.

    Returns:
        Its path, how it was found ("already loaded", "by the loader", "in a wheel") and its version such as "1.20"; and
        why it was not found, with the places searched. Values that do not apply are empty.
    """

class GdsLane(Lane):
    """Executes GDS_READ and GDS_WRITE of one rank; made by `flexkv.transfer.gds_lane.make_gds_lane`.

    Args:
        codecs: one per group.
        stripe: the rank whose stripe of a slot image is moved.
        slabs: each disk's slabs, one per group: path, header bytes, slot bytes, slots, id. Empty for a lost disk.
        gpu_device_id: the GPU that holds the pool, -1 for a pool in plain memory.

    Raises:
        ConfigError: a slab that cannot be opened, or an option that is not allowed.
        GeometryError: a slab's slots are not images of its group.
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
        """Says what the I/O is and which memory it goes to."""
    @property
    def direct_refusal(self) -> str:
        """Why no slab reaches the pool's device directly; empty if one does, or if the route of one is unknown."""
    @property
    def totals(self) -> GdsTotals: ...
    @property
    def staging_bytes(self) -> int: ...
    @property
    def staging_slots(self) -> int:
        """Slots into which the staging is divided; 0 before there is any."""
    @property
    def staging_slot_bytes(self) -> int: ...
    def reserve_staging(self, group: int, view: KvView) -> None:
        """Registers the memory of `view`, the view of `group`, as `gds.register_pool` says, and allocates the staging
        through which its blocks will pass.

        Raises:
            CapacityError: there is no memory for it, or a limit leaves no slot; says which settings to change.
            ContractError: no such group. GeometryError: the slabs have other runs in the stripe.
            ClosedError: the lane is closed. DiskError: a disk does not answer.
        """
    @property
    def pool(self) -> PoolState: ...
    def release_pool(self) -> None:
        """Ends the registrations, before the pool's memory goes away. The next op makes them again, or `restore_pool`.
        Idempotent.

        Raises:
            ContractError: an op is under way.
        """
    def restore_pool(self) -> None: ...
    def close(self) -> None:
        """Closes the slabs, ends registrations and frees the staging. For a lane that no transfer engine received: an
        engine closes its own lanes. Later ops fail. Idempotent.
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
    """Moves blocks between raw files and a pool through staging slots, one I/O call per block whose bytes are dense.

    Blocks gpu_block_ids[i] and gds_block_ids[i] belong together. Returns when every byte has moved. Tensors are
    contiguous and of any library: with `data_ptr()` as torch has it, or with DLPack.

    Args:
        gpu_layer_id_list: int32, the layers to move; only their bytes are touched.
        gpu_layer_ptrs_tensor: int64 addresses: one per layer (vLLM), one (TensorRT-LLM), K of every layer and then V of
            every layer (SGLang).
        gds_block_ids, gpu_block_ids: int64, as many of each; none is written to twice. These and the layers are in host
            memory.
        block_size_in_bytes: bytes of one layer's K or V of a block.
        gds_copy_off_inside_chunks: where this rank's bytes lie in a chunk of the file that ranks share.
        is_mla: K and V are stored as one.
        gpu_block_type: 0 vLLM, 1 TensorRT-LLM, 2 SGLang.
        staging_buffer: contiguous, in the pool's memory, with room for at least one block; None: the manager's own.

    Raises:
        TransferError: some blocks did not arrive; names them. The others did.
        GeometryError: impossible sizes, strides, dtypes or addresses.
        BlockRangeError: a layer, block or file that does not exist, or a block named twice.
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
    """The same without staging: one call for each part of a block that is contiguous in the pool and in the file."""

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
    """Allocates the manager's own staging for such transfers, so that a shortage shows before the first one.

    The named blocks are examples, and none is touched: two show how all blocks are aligned. Nothing is allocated if
    blocks bypass staging.

    Raises:
        CapacityError: there is no memory for it, or a limit leaves no slot; says which settings to change.
        ClosedError, GeometryError, BlockRangeError: see `transfer_kv_blocks_gds_staged`.
    """
