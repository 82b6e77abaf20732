"""Transfer graphs: the interface between the control plane and the data plane. The control plane plans graphs, and the
data plane runs them.

A graph contains the numbers of blocks, slots and disk slots, and the tags of the pages in disk slots. It contains no
tokens, no policy and no KV bytes. Its arrays are plain NumPy, so a graph is pickled in microseconds and can be sent to
worker processes in an engine's own metadata.
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
"""Number of an op. The manager that plans the op never uses the number again."""

BlockIds = NDArray[np.int32]
"""Engine block ids, shape [pages], int32, C-contiguous."""

SlotIds = NDArray[np.int32]
"""Slot numbers in a tier, shape [pages], int32, C-contiguous."""

TAG_BYTES = 40
"""Size of a page's tag in bytes. The tag identifies the page that a disk slot must hold; `flexkv.storage.tags` defines
its fields."""

NEVER = 0
"""The expiry time of a page that never expires. Other expiry times are in Unix seconds; from that time on, lookups miss
the page."""

PageTags = NDArray[np.uint8]
"""Tags of pages, shape [pages, TAG_BYTES], uint8, C-contiguous. The data plane's scheduler does not interpret them."""

ReadIds = NDArray[np.int64]
"""For each page, the id of the DISK_READ op that fills the page's slot; 0 if no op fills it. Shape [pages], int64,
C-contiguous.
"""

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
    """The source and target of an op. The numbers are the same as in `csrc/transfer/op.h`."""

    H2D = 0
    D2H = 1
    DISK_READ = 2
    DISK_WRITE = 3
    GDS_READ = 4
    GDS_WRITE = 5
    DISK_SEAL = 6
    """Writes the trailers of pages whose stripes GDS_WRITE ops have written. Each page exists from then on."""


WITHOUT_SLOTS = frozenset({OpKind.GDS_READ, OpKind.GDS_WRITE, OpKind.DISK_SEAL})
"""Kinds of ops that touch no host slot. Their ops have one page per disk slot in `places`."""
ALWAYS_WHOLE = frozenset({OpKind.GDS_WRITE, OpKind.DISK_SEAL})
"""Kinds of ops that write complete pages to disk, so their ops are never layerwise."""


class Priority(IntEnum):
    """The order in which a lane runs the ops that wait: loads before stores."""

    LOAD = 0
    STORE = 1


class EdgeKind(IntEnum):
    """How an op (the successor) waits for another op (the predecessor)."""

    BARRIER = 0
    """The successor starts after every page of the predecessor has arrived."""
    STREAM = 1
    """Page i of the successor may start after page i of the predecessor has arrived. Both ops have the same number of
    pages.
    """


class OpStatus(IntEnum):
    """How an op ended. The codes are the same as in `csrc/base/status.h`."""

    OK = 0
    FAILED = 1
    CANCELLED = 2
    SKIPPED = 3
    LANE_DOWN = 4


class FailureCause(IntEnum):
    """Why a page failed. The cause decides whether the copy of the page in its tier is forgotten or may be read again.

    The codes are the same as in `csrc/base/status.h`.
    """

    UNKNOWN = 0
    """No cause was reported. This is treated like CONTENT, so the stored copy is forgotten."""
    CONTENT = 1
    """The stored bytes are not those of the requested page."""
    SOURCE = 2
    """The disk refused the read or cut it short, or the store failed to deliver or to take the page."""
    TRANSPORT = 3
    """Memory, a device, its driver or the lane failed, so that any other page would have failed, too."""
    NOT_EXECUTED = 4
    """The page was cancelled, was late, or was not begun."""


@dataclass(frozen=True, slots=True)
class TransferOp:
    """Copies a list of pages in one direction. Page i is copied between `blocks[i]` and `slots[i]` (H2D, D2H), between
    `slots[i]` and `places[i]` (the disk kinds), or between `blocks[i]` and `places[i]` (the GDS kinds).

    Attributes:
        group: number of the KV group; selects the view and the slot pool.
        priority: whether the op runs with the loads or with the stores of its lane.
        blocks: engine blocks, one per page; empty for ops that do not touch the engine's pool. Read-only if unpickled.
        slots: host slots, one per page; empty for the GDS kinds and DISK_SEAL. Read-only if unpickled.
        layerwise: whether to copy layer 0 of all pages, then layer 1 and so on, so that `TransferEngine.wait_layer` can
            wait for a layer. If False, the op copies page by page. That is faster, and an op that waits for this one by
            a STREAM edge can start with the first page.
        places: for the disk and GDS kinds, the disk slots, one per page; empty for other kinds.
        tags: for the disk and GDS kinds, the tag of the page that each disk slot must hold or will hold; empty for
            other kinds.
        digests: for DISK_SEAL, the digests that the GDS_WRITE ops of all ranks reported, concatenated in the order of
            the ranks; empty for other kinds.
        reads: for H2D, the id of the DISK_READ that fills each page's slot, or 0 if the slot is already filled; empty
            if all slots are already filled. The read may run on another transfer engine with the same host pool, even
            in another process, and may have ended already. A page is copied after its read has verified it, and fails
            if its read fails. A layerwise load copies each layer of a page after a layerwise read has verified that
            layer.
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
        # Reduces enums and arrays to plain numbers and bytes. By default, pickle writes an enum as a lookup of its
        # name, and an array as a call that makes it from dtype and shape. Each of these costs more than the pages'
        # numbers themselves.
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
    """Op `after` waits for op `before`. Both are positions in `TransferGraph.ops`, and `before < after`."""

    before: int
    after: int
    kind: EdgeKind


@dataclass(frozen=True, slots=True)
class TransferGraph:
    """A directed acyclic graph of ops that carries out one load or store. `ops` is in a valid order of execution."""

    ops: tuple[TransferOp, ...]
    edges: tuple[Edge, ...] = ()

    def layerwise(self) -> TransferGraph:
        """Returns a copy in which all ops are layerwise, except those that write complete pages to disk."""
        ops = tuple(op if op.kind in ALWAYS_WHOLE else replace(op, layerwise=True) for op in self.ops)
        return TransferGraph(ops, self.edges)

    @property
    def is_layerwise(self) -> bool:
        """Whether all ops of the graph are layerwise."""
        return all(op.layerwise for op in self.ops)

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return TransferGraph, (self.ops, self.edges)


NO_OPS = TransferGraph(())


@dataclass(frozen=True, slots=True)
class OpResult:
    """The final result of one op on one rank. Each op has exactly one result per rank. The result is made after the
    op's last byte has stopped moving.

    Attributes:
        status: how the op ended.
        failed: positions within the op of the pages that must not be used, ascending, int32. Empty if `status` is OK;
            all pages if it is CANCELLED, SKIPPED or LANE_DOWN.
        reason: what went wrong, in words; empty if `status` is OK.
        digests: for GDS_WRITE, this rank's run digests of each page, which DISK_SEAL writes; zeros for failed pages.
            Empty for other kinds, and if all pages failed.
        causes: `FailureCause` of each page in `failed`; empty if `status` determines the cause.
        loss: for a store that never began, the reason that metrics report for its pages; None if there is no specific
            reason.
    """

    op_id: OpId
    status: OpStatus
    failed: NDArray[np.int32]
    reason: str = ""
    digests: RunDigests = field(default_factory=lambda: NO_DIGESTS)
    causes: PageCauses = field(default_factory=lambda: NO_CAUSES)
    loss: PageLoss | None = None

    def page_causes(self, pages: int) -> PageCauses:
        """Returns the `FailureCause` of each of the `pages` pages of an op that did not end OK. If the status
        determines one cause, all pages have this cause. Otherwise pages that did not fail are UNKNOWN.

        Raises:
            ContractError: the number of causes differs from the number of failed pages.
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
        """Makes the result of an op that never ran or was abandoned: none of its pages may be used."""
        return cls(op_id, OpStatus.CANCELLED, np.arange(pages, dtype=np.int32), reason, loss=loss)


_STATUS_CAUSES = {
    OpStatus.CANCELLED: FailureCause.NOT_EXECUTED,
    OpStatus.SKIPPED: FailureCause.NOT_EXECUTED,
    OpStatus.LANE_DOWN: FailureCause.TRANSPORT,
}
