"""The disk tier's contracts: the calls that the control plane makes on one ownership unit's disks, and their results.

Bytes move as DISK_READ, DISK_WRITE and DISK_SEAL ops of transfer graphs, on the lane that the tier gives to the
manager's transfer engine. Everything else goes through these interfaces. Only opening, `reset`, `finish_reset` and
`close` wait for a disk.

To store a page: call `next_generations`; submit a DISK_WRITE (or the ranks' GDS_WRITEs and a DISK_SEAL) whose tags name
key, epoch and generation; when its op has ended OK, call `record_publish`. The page can be read once the op has ended;
it survives a crash once `poll` has named it.

To load a page: submit a DISK_READ whose tags say what the slot must hold. A page with another key, epoch, generation or
token count, or with damaged bytes, fails, whatever the index said: a stale index costs a miss and never a wrong byte.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flexkv import c_ext
from flexkv.config import IoBackend
from flexkv.transfer.host_pool import HostPool
from flexkv.transfer.slab_map import SlabMap

Keys = NDArray[np.uint8]
"""Block keys, uint8 [blocks, 16], C-contiguous."""

Places = NDArray[np.int32]
"""Places of one group, int32 [pages]: place p is slot `p // disks` of disk `p % disks`. Groups that share slabs have
the same places."""

Generations = NDArray[np.uint64]
"""uint64 [pages]: durable open count (24 bits) and a counter (40 bits). Never repeated, not even after a crash."""

RunTable = NDArray[np.int64]
"""The runs of one rank's stripe, int64 [runs, 3]: offset in the stripe, bytes, layer; ascending by offset."""


@dataclass(frozen=True, slots=True)
class DiskIdentity:
    """The owner of pages. Equal identities use the same folder after a restart; different ones lie side by side.

    Attributes:
        model: the model's readable name, which `flexkv disk ls` shows.
        fingerprint: 32 bytes; everything that must be equal before two blocks' KV may be exchanged.
        unit: the ownership unit on this node, such as `dp0`: letters, digits, `-`, `_`, `.`.
    """

    model: str
    fingerprint: bytes
    unit: str = "unit0"


@dataclass(frozen=True, slots=True)
class DiskGroup:
    """One KV group's pages: the encoding and geometry of its slot images.

    Attributes:
        format_id: `str(FormatId)` of the pages.
        stripe_bytes: bytes of each rank's stripe.
        runs: each rank's RunTable, whose rows fill the stripe exactly.
        block_tokens: tokens of a whole block.
        dtype: dtype of the KV, for display.
        host_digests: whether device lanes write the run digests into the slot's trailer (`host.verify`). The disk
            stores these unchanged, so a load checks pages by digests of the engine's own bytes.
        rule: which pages a hit needs: "full", "window", "chunk" or "state".
        reach: reach of a window in pages, or of a chunk in tokens, else 0.
        signature: extra input to the hash of the group's keys; may be empty. Groups with different signatures share
            nothing.
        shares: number of the earlier group in whose slabs the pages lie; None if the group has its own slabs. Slots are
            as large as the largest image of the groups that share them.
    """

    format_id: str
    stripe_bytes: tuple[int, ...]
    runs: tuple[RunTable, ...]
    block_tokens: int
    dtype: str = ""
    host_digests: bool = False
    rule: str = "full"
    reach: int = 0
    signature: bytes = b""
    shares: int | None = None

    @property
    def num_layers(self) -> int:
        return 1 + max(int(runs[:, 2].max()) for runs in self.runs)

    @property
    def rule_text(self) -> str:
        """The rule, for display."""
        unit = {"window": " pages", "chunk": " tokens"}.get(self.rule)
        return f"{self.rule} of {self.reach}{unit}" if unit else self.rule


@dataclass(frozen=True, slots=True)
class DiskOptions:
    """How a unit uses its disks.

    Attributes:
        bytes_per_disk: bytes of slabs in each folder; the index takes at most 1/64 as much in addition.
        io: `auto` uses io_uring if the kernel allows it, else threads.
        depth: I/Os under way at once on one disk.
        stuck_s: a disk is taken out of service if an I/O takes longer than this.
        journal_rows: rows that may wait in a journal; further publishes and evictions are put off, further uses are
            dropped.
        preallocate: whether to allocate the slabs' space at open, so that no write can find the disk full, and to clear
            it ahead of the pages while the disk is idle.
        register_buffers: whether io_uring keeps the host pool's pages pinned. If the system refuses that (for example
            because of a low `memlock` limit), I/O works without.
        sealed_apart: whether ranks write their stripes themselves (`DISK_SEAL`). If so, the tier clears no space: it
            does not know when ranks write, so its zeros could overwrite stripes.
    """

    bytes_per_disk: int
    io: IoBackend = "auto"
    depth: int = 32
    stuck_s: float = 30.0
    journal_rows: int = 262_144
    preallocate: bool = True
    register_buffers: bool = False
    sealed_apart: bool = False


@dataclass(frozen=True, slots=True)
class IndexRows:
    """The pages that a group's slabs hold according to the index, least recently used first.

    Attributes:
        keys: uint8 [n, 16], unique within a group.
        places: int32 [n].
        generations: uint64 [n].
        tokens: valid tokens, int32 [n].
        expiries: unix seconds, 0 for never, uint64 [n].
        groups: number of each page's KV group, int32 [n]; None for slabs of one group.
    """

    keys: Keys
    places: Places
    generations: Generations
    tokens: NDArray[np.int32]
    expiries: NDArray[np.uint64]
    groups: NDArray[np.int32] | None = None

    def __len__(self) -> int:
        return len(self.places)


@dataclass(frozen=True, slots=True)
class DurablePages:
    """Published pages that survive a crash from now on."""

    group: int
    places: Places
    generations: Generations


@dataclass(frozen=True, slots=True)
class LostDisk:
    """A disk that was taken out of service. Its places are misses and must not be written again; the other disks stay
    in use.
    """

    disk: int
    folder: Path
    reason: str


@dataclass(frozen=True, slots=True)
class DiskEvents:
    """Events since the last `poll`.

    Attributes:
        lost: newly lost disks; each disk is reported once.
    """

    durable: tuple[DurablePages, ...] = ()
    lost: tuple[LostDisk, ...] = ()


@dataclass(frozen=True, slots=True)
class DiskStats:
    """Counts since `open`.

    Attributes:
        misses: reads that failed, by reason (see docs/disk-storage.md).
        journal_lag_s: age of the oldest publish in a journal that is not durable yet, seconds; 0 when there is none.
        pending_pages: pages that can be read but are not published yet, because their journal was full.
    """

    read_pages: int = 0
    read_bytes: int = 0
    written_pages: int = 0
    written_bytes: int = 0
    misses: Mapping[str, int] = field(default_factory=dict)
    write_errors: int = 0
    journal_lag_s: float = 0.0
    pending_pages: int = 0


class StoredPages(ABC):
    """A unit's pages on its disks, for lookups and reads. Only `reset` waits for a disk."""

    @property
    @abstractmethod
    def disks(self) -> int:
        """How many disks hold the places, lost ones included. Place p of any group lies on disk `p % disks`."""

    @property
    @abstractmethod
    def alive(self) -> tuple[bool, ...]:
        """Whether each disk is in use."""

    @abstractmethod
    def slots(self, group: int) -> int:
        """How many places the group has: [0, slots). This includes places of lost disks, which must not be used.

        Groups that share slabs have the same places.
        """

    @abstractmethod
    def rows(self, group: int) -> IndexRows:
        """The pages that were durable when the tier was opened and have not expired. Only the first call returns them.

        If groups share slabs, this returns the pages of all of them, no matter which one is named, so one call per slab
        is enough. After a `reset` there are none.
        """

    @property
    @abstractmethod
    def epoch(self) -> int:
        """The epoch of the model's weights, which the last `reset` set; 0 at first."""

    @abstractmethod
    def strange_disks(self, weights: bytes) -> tuple[int, ...]:
        """The disks that hold pages computed with different weights than these, or with unknown weights.

        Args:
            weights: 32 bytes that name all content of the engine's weights.
        """

    @abstractmethod
    def record_evict(self, group: int, places: Places, generations: Generations) -> None:
        """Forgets these pages, of any of the groups that share the group's slabs. Never blocks.

        Call it before their places are reused.
        """

    @abstractmethod
    def record_use(self, group: int, places: Places) -> None:
        """Records that these pages were used now. A restart preserves the order approximately. Never blocks; may drop
        the record.
        """

    @abstractmethod
    def reset(self, epoch: int, deadline_s: float = 30.0) -> None:
        """Forgets every page and durably starts `epoch`: no older page is served any more, not even after a crash.

        Takes out disks on which this does not end within the deadline.

        Raises:
            ContractError: `epoch` is not above the current one.
        """


class Volumes(StoredPages):
    """The disk tier of one ownership unit, with writes. Only the manager's thread calls it."""

    @property
    @abstractmethod
    def folder(self) -> Path | None:
        """The unit's folder on the first disk that could be opened, for small files beside the pages; None without
        one."""

    @abstractmethod
    def begin_reset(self, epoch: int) -> None:
        """Does the part of `reset` that does not wait; call `finish_reset` afterwards.

        Raises:
            ContractError: `epoch` is not above the current one.
        """

    @property
    @abstractmethod
    def resets(self) -> bool:
        """Whether `finish_reset` would wait."""

    @abstractmethod
    def finish_reset(self, deadline_s: float) -> None:
        """Waits until the reset that has begun is durable. Takes out disks on which it is not durable in time."""

    @abstractmethod
    def name_weights(self, weights: bytes) -> None:
        """Records that all pages of this epoch, earlier and later ones, are computed with these weights. Never waits.
        Until the record is durable, another opening treats the pages as those of other weights.
        """

    @abstractmethod
    def next_generations(self, count: int) -> Generations:
        """Returns `count` numbers for writes, ascending and higher than any returned before."""

    @abstractmethod
    def record_publish(
        self,
        group: int,
        keys: Keys,
        places: Places,
        generations: Generations,
        tokens: NDArray[np.int32],
        expiries: NDArray[np.uint64] | None = None,
    ) -> bool:
        """Makes pages of the group durable. Their writes must have ended OK. Never blocks.

        Returns False if a journal is full: the pages can be read, and a later `poll` publishes them when there is room;
        a crash before that loses them. Also returns False for a lost disk.
        """

    @abstractmethod
    def image_bytes(self, group: int) -> int:
        """The slot size of the group's slabs: a slot image with its trailer; if groups share slabs, the largest of
        their images. The slots of the group's host pool must have the same size.
        """

    @abstractmethod
    def digest_offsets(self, group: int) -> tuple[int, ...]:
        """Offset of each rank's run digests in a slot: `digest_offset` of `TransferEngine.attach_view`."""

    @abstractmethod
    def lane(self, pools: Sequence[HostPool]) -> c_ext.DiskLane:
        """The lane for DISK_READ, DISK_WRITE and DISK_SEAL between the groups' host pools, one per group (those that
        share slabs may share one), and the disks.

        Give it to this process's TransferEngine. It can be obtained only once.

        Raises:
            GeometryError: the size of a pool's slots differs from that of the group's images.
            ContractError: this is the second call, or the number of pools differs from that of the groups.
        """

    @abstractmethod
    def slab_map(self) -> SlabMap:
        """Data with which ranks move pages by `flexkv.transfer.gds_lane`, without disks lost by now."""

    @property
    @abstractmethod
    def unflushed(self) -> bool:
        """Whether records wait for the next `poll` because a journal had no room for them. Cheap."""

    @abstractmethod
    def poll(self) -> DiskEvents:
        """Returns the events since the last call, and passes waiting records to the journals. Never blocks."""

    @abstractmethod
    def stats(self) -> DiskStats:
        """Counts so far. Never blocks."""

    @abstractmethod
    def close(self, deadline_s: float) -> bool:
        """Makes everything recorded durable and unlocks the folders. Call it after closing the transfer engine that has
        the lane and recording its results. Idempotent.

        Returns False if after `deadline_s` seconds some record is not durable yet or an I/O still hangs; such a disk's
        folder stays locked until the process ends.
        """
