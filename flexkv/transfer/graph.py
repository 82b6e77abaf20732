"""Transfer graphs: the only interface between the control plane, which plans them, and the data plane, which runs them.

A graph carries no tokens, no policy and no KV bytes: only the numbers of blocks, slots and disk slots, and the tags of
the pages in disk slots. It is plain NumPy, so that it pickles in microseconds and can travel to worker processes in an
engine's own metadata.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import NewType

import numpy as np
from numpy.typing import NDArray

from flexkv.errors import ContractError
from flexkv.observe import PageLoss

OpId = NewType("OpId", int)
"""Number of an op, unique for the life of the manager that planned it. Never reused."""

BlockIds = NDArray[np.int32]
"""Engine block ids, shape [pages], int32, C-contiguous."""

SlotIds = NDArray[np.int32]
"""Slot numbers in a tier, shape [pages], int32, C-contiguous."""

TAG_BYTES = 40
"""Bytes of one page's tag; `flexkv.storage.tags` says what they mean."""

NEVER = 0
"""The time at which a page expires that does not; other times are Unix seconds, from which on the page is a miss."""

PageTags = NDArray[np.uint8]
"""Tags of pages, shape [pages, TAG_BYTES], uint8, C-contiguous. Opaque to the scheduler of the data plane."""

ReadIds = NDArray[np.int64]
"""Numbers of DISK_READ ops, shape [pages], int64, C-contiguous; 0 for none."""

RunDigests = NDArray[np.uint64]
"""Digests of pages' runs, shape [pages, runs], uint64, C-contiguous."""

PageCauses = NDArray[np.uint8]
"""`FailureCause` of each failed page, shape [failed pages], uint8."""

NO_BLOCKS: BlockIds = np.empty(0, np.int32)
NO_PLACES: SlotIds = np.empty(0, np.int32)
NO_TAGS: PageTags = np.empty((0, TAG_BYTES), np.uint8)
NO_DIGESTS: RunDigests = np.empty((0, 0), np.uint64)
NO_READS: ReadIds = np.empty(0, np.int64)
NO_CAUSES: PageCauses = np.empty(0, np.uint8)


class OpKind(IntEnum):
    """The source and target of an op; the numbers are those of `csrc/transfer/op.h`."""

    H2D = 0
    D2H = 1
    DISK_READ = 2
    DISK_WRITE = 3
    GDS_READ = 4
    GDS_WRITE = 5
    DISK_SEAL = 6
    """Writes the trailer of pages whose stripes GDS_WRITE ops have written: the page exists from then on."""


WITHOUT_SLOTS = frozenset({OpKind.GDS_READ, OpKind.GDS_WRITE, OpKind.DISK_SEAL})
ALWAYS_WHOLE = frozenset({OpKind.GDS_WRITE, OpKind.DISK_SEAL})
"""Kinds that touch no host slot. Their ops have one page per place."""


class Priority(IntEnum):
    """Lower runs first within a lane: a load before a store."""

    LOAD = 0
    STORE = 1


class EdgeKind(IntEnum):
    """How a successor waits for its predecessor."""

    BARRIER = 0
    """The successor starts when every page of the predecessor has ended OK."""
    STREAM = 1
    """Page i of the successor may start when page i of the predecessor has ended OK (both have the same pages)."""


class OpStatus(IntEnum):
    """How an op ended; the same codes as `csrc/base/status.h`."""

    OK = 0
    FAILED = 1
    CANCELLED = 2
    SKIPPED = 3
    LANE_DOWN = 4


class FailureCause(IntEnum):
    """Why a page failed, and so whether its stored copy is worth reading again.

    The same codes as `csrc/base/status.h`.
    """

    UNKNOWN = 0
    """Not reported: treated as CONTENT, which forgets the copy."""
    CONTENT = 1
    """The stored bytes are not the page that was asked for."""
    SOURCE = 2
    """The disk refused the read or cut it short."""
    TRANSPORT = 3
    """Memory, a device, its driver or the lane: any page would have failed."""
    NOT_EXECUTED = 4
    """Cancelled, late or not begun."""


@dataclass(frozen=True, slots=True)
class TransferOp:
    """One kind of movement over a list of pages: `blocks[i]` <-> `slots[i]`, `slots[i]` <-> `places[i]`, or with the
    GDS kinds `blocks[i]` <-> `places[i]`.

    Attributes:
        group: KV group (attention type); selects the view and the slot pool.
        blocks: engine blocks, or empty for an op without a device side. Read-only if unpickled, like `slots`.
        slots: host slots, one per page; empty for the GDS kinds and DISK_SEAL.
        layerwise: whether to move layer 0 of all pages, then layer 1, and so on, as `TransferEngine.wait_layer` needs
            it. If not, the op moves page by page, which is faster, and ops that follow it page by page start early.
        places: for the disk and GDS kinds, the disk slots, one per page; empty for other kinds.
        tags: for the disk and GDS kinds, the tag of the page that each place must hold or will hold; else empty.
        digests: for DISK_SEAL, the digests that the GDS_WRITE ops reported, side by side in the order of the ranks.
        reads: for H2D, the DISK_READ that fills each page's slot, or 0 if the slot is already filled; empty if all are.
            The read may run on another transfer engine with the same host pool, even in another process, and may have
            ended already. A page moves once its read has verified it, and fails if its read fails. A layerwise load
            moves each layer of a page once a layerwise read has verified that layer.
    """

    op_id: OpId
    kind: OpKind
    group: int
    priority: Priority
    blocks: BlockIds
    slots: SlotIds
    layerwise: bool = False
    places: SlotIds = field(default_factory=lambda: NO_PLACES)
    tags: PageTags = field(default_factory=lambda: NO_TAGS)
    digests: RunDigests = field(default_factory=lambda: NO_DIGESTS)
    reads: ReadIds = field(default_factory=lambda: NO_READS)

    @property
    def pages(self) -> int:
        return len(self.places) if self.kind in WITHOUT_SLOTS else len(self.slots)

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        # Pickles plain numbers and bytes: pickle would write an enum as a lookup of its name, and an array as
        # a call that makes it from type and shape. Both cost more than the pages themselves.
        numbers = (int(self.kind), self.group, int(self.priority))
        disk: tuple[object, ...] = ()
        if len(self.reads):
            disk = (self.places, self.tags, self.digests, self.reads)
        elif len(self.places) or len(self.tags):
            disk = (self.places, self.tags, *([self.digests] if len(self.digests) else []))
        pages = (_bytes_of("blocks", self.blocks), _bytes_of("slots", self.slots))
        return _op_of_numbers, (self.op_id, *numbers, *pages, self.layerwise, *disk)


def _bytes_of(name: str, numbers: NDArray[np.int32]) -> bytes:
    if numbers.dtype != np.int32 or numbers.ndim != 1:
        raise ContractError(
            f"{name} of an op are {numbers.dtype} of shape {numbers.shape}; needed are int32 [n]"
        )
    return numbers.tobytes()


def _op_of_numbers(
    op_id: OpId,
    kind: int,
    group: int,
    priority: int,
    blocks: bytes,
    slots: bytes,
    layerwise: bool,
    places: SlotIds = NO_PLACES,
    tags: PageTags = NO_TAGS,
    digests: RunDigests = NO_DIGESTS,
    reads: ReadIds = NO_READS,
) -> TransferOp:
    return TransferOp(
        op_id,
        OpKind(kind),
        group,
        Priority(priority),
        np.frombuffer(blocks, np.int32),
        np.frombuffer(slots, np.int32),
        layerwise,
        places,
        tags,
        digests,
        reads,
    )


@dataclass(frozen=True, slots=True)
class Edge:
    """`after` waits for `before`; both are positions in `TransferGraph.ops`, and `before < after`."""

    before: int
    after: int
    kind: EdgeKind


@dataclass(frozen=True, slots=True)
class TransferGraph:
    """A DAG of ops that carries out one load or one store. `ops` is in a valid order of execution."""

    ops: tuple[TransferOp, ...]
    edges: tuple[Edge, ...] = ()

    def layerwise(self) -> TransferGraph:
        """Returns the same graph with layerwise ops, except for kinds that write whole pages to disk."""
        ops = tuple(op if op.kind in ALWAYS_WHOLE else replace(op, layerwise=True) for op in self.ops)
        return TransferGraph(ops, self.edges)

    @property
    def is_layerwise(self) -> bool:
        """Whether all its ops are layerwise."""
        return all(op.layerwise for op in self.ops)

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return TransferGraph, (self.ops, self.edges)


NO_OPS = TransferGraph(())


@dataclass(frozen=True, slots=True)
class OpResult:
    """The final result of one op on one rank, sent once, after its last byte has stopped moving.

    Attributes:
        failed: positions within the op's pages that must not be used, ascending, int32. Empty when `status` is OK;
            every page when it is CANCELLED, SKIPPED or LANE_DOWN.
        reason: what went wrong, in words; empty if `status` is OK.
        digests: for GDS_WRITE, this rank's run digests of each page, which DISK_SEAL needs; zeros for failed pages, and
            empty if all failed.
        causes: `FailureCause` of each page in `failed`; empty if only `status` says why.
        loss: for a store that never began, why its pages are not stored; None if there is no specific reason.
    """

    op_id: OpId
    status: OpStatus
    failed: NDArray[np.int32]
    reason: str = ""
    digests: RunDigests = field(default_factory=lambda: NO_DIGESTS)
    causes: PageCauses = field(default_factory=lambda: NO_CAUSES)
    loss: PageLoss | None = None

    def page_causes(self, pages: int) -> PageCauses:
        """`FailureCause` of each page of an op that did not end OK; UNKNOWN also for pages that did not fail.

        Raises:
            ContractError: the number of causes is not that of the failed pages.
        """
        if self.status in _STATUS_CAUSES or not len(self.causes):
            return np.full(pages, _STATUS_CAUSES.get(self.status, FailureCause.UNKNOWN), np.uint8)
        if len(self.causes) != len(self.failed):
            raise ContractError(
                f"op {self.op_id}: {len(self.causes)} causes for {len(self.failed)} failed pages"
            )
        causes = np.zeros(pages, np.uint8)
        causes[self.failed] = self.causes
        return causes

    @classmethod
    def cancelled(cls, op_id: OpId, pages: int, reason: str, loss: PageLoss | None = None) -> OpResult:
        """Makes the result of an op that never ran or was abandoned, so that none of its pages may be used."""
        return cls(op_id, OpStatus.CANCELLED, np.arange(pages, dtype=np.int32), reason, loss=loss)


_STATUS_CAUSES = {
    OpStatus.CANCELLED: FailureCause.NOT_EXECUTED,
    OpStatus.SKIPPED: FailureCause.NOT_EXECUTED,
    OpStatus.LANE_DOWN: FailureCause.TRANSPORT,
}
