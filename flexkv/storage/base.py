"""The disk tier's contracts: the calls that the control plane makes on one ownership unit's disks, and their results.

The bytes of pages move in DISK_READ, DISK_WRITE and DISK_SEAL ops of transfer graphs, which the tier's lane in the
manager's transfer engine executes. Everything else goes through these interfaces. Only opening, `reset`, `finish_reset`
and `close` wait for a disk.

To store a page: call `next_generations`; submit a DISK_WRITE (or the ranks' GDS_WRITEs and a DISK_SEAL) whose tags
contain the page's key, epoch and generation; when the op has finished with status OK, call `record_publish`. The page
can be read as soon as the op has finished. It survives a crash once `poll` has returned it as durable.

To load a page: submit a DISK_READ whose tags say what the slot must hold. The page fails if the slot holds another key,
epoch, generation or token count, or damaged bytes, no matter what the index says. So a stale index costs a miss, but
never delivers a wrong byte.
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
"""Disk slots of one group, numbered over all disks, int32 [pages]: place p is slot `p // disks` of disk `p % disks`.
Groups that share slabs have the same places.
"""

Generations = NDArray[np.uint64]
"""Numbers that identify page writes, uint64 [pages]. A number consists of the count of the tier's openings (24 bits)
and a counter (40 bits). No number is used twice, not even after a crash.
"""

RunTable = NDArray[np.int64]
"""The runs of one rank's stripe, int64 [runs, 3], ascending by offset. The columns are offset in the stripe, length
(both in bytes), and layer.
"""


@dataclass(frozen=True, slots=True)
class DiskIdentity:
    """Identifies the unit that owns pages. After a restart, a unit with an equal identity uses the same folder again.
    The folders of different identities lie side by side.

    Attributes:
        model: readable name of the model, shown by `flexkv disk ls`.
        fingerprint: 32-byte digest of everything that must be equal for units to use each other's blocks.
        unit: name of the ownership unit on this node, such as `dp0`: letters, digits, `-`, `_`, `.`.
    """

    model: str
    fingerprint: bytes
    unit: str = "unit0"


@dataclass(frozen=True, slots=True)
class DiskGroup:
    """One KV group's pages: the encoding and geometry of its slot images.

    Attributes:
        format_id: format of the pages, as `str(FormatId)`.
        stripe_bytes: size of each rank's stripe, in bytes.
        runs: RunTable of each rank; its rows fill the rank's stripe exactly.
        block_tokens: number of tokens in a full block.
        dtype: name of the KV's element type; empty if it is unknown.
        host_digests: whether device lanes write the digest of every run into the slot's trailer (setting
            `host.verify`). The disk stores these digests unchanged, so a load verifies a page against digests of the
            engine's own bytes.
        rule: which pages a hit needs: "full", "window", "chunk" or "state".
        reach: how far a window reaches, in pages, or a chunk, in tokens; 0 for the other rules.
        signature: extra input to the hash of the group's keys; may be empty. Groups with different signatures share no
            pages.
        shares: number of the earlier group in whose slabs the pages lie; None if the group has its own slabs. The slots
            of shared slabs fit the largest image of the groups that share them.
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
        """The rule with its reach and the reach's unit, as readable text."""
        unit = {"window": " pages", "chunk": " tokens"}.get(self.rule)
        return f"{self.rule} of {self.reach}{unit}" if unit else self.rule


@dataclass(frozen=True, slots=True)
class DiskOptions:
    """How a unit uses its disks.

    Attributes:
        bytes_per_disk: total size in bytes of the slabs in each folder. The index takes up to 1/64 of this size in
            addition.
        io: I/O backend; `auto` is io_uring if the kernel allows it, else threads.
        depth: maximum number of I/Os in flight at once on one disk.
        stuck_s: a disk is taken out of service if an I/O takes longer than this many seconds.
        journal_rows: maximum number of rows (one per page of a record) that wait in one disk's journal. While the
            journal is full, records of published and evicted pages stay pending outside it. Records of uses may fill
            half of the journal; further records of uses are dropped.
        preallocate: whether to allocate disk space for the slabs when they are opened, so that no write finds the disk
            full. While a disk is idle, the tier then writes zeros to the slots that will get pages next, because the
            first write to allocated space is half as fast.
        register_buffers: whether io_uring keeps the host pool's memory pinned. If the system refuses that (for example
            because of a low `memlock` limit), I/O works with unpinned memory.
        sealed_apart: whether ranks write their stripes to the disks themselves, so that the tier only seals the pages
            (`DISK_SEAL`). The tier then writes no zeros ahead: it does not know when ranks write, so its zeros could
            overwrite stripes.
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
        keys: key of each page, uint8 [n, 16]; unique within a group.
        places: place of each page, int32 [n].
        generations: generation of each page, uint64 [n].
        tokens: number of valid tokens in each page, int32 [n].
        expiries: when each page expires, in Unix seconds, uint64 [n]; 0 for never.
        groups: number of each page's KV group, int32 [n]; None if only one group uses the slabs.
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
    """A disk that was taken out of service. Pages on it are misses, and nothing may be written to it any more. The
    other disks stay in use.
    """

    disk: int
    folder: Path
    reason: str


@dataclass(frozen=True, slots=True)
class DiskEvents:
    """Events since the last `poll`.

    Attributes:
        durable: pages that have become durable.
        lost: disks that were taken out of service; each disk is reported once.
    """

    durable: tuple[DurablePages, ...] = ()
    lost: tuple[LostDisk, ...] = ()


@dataclass(frozen=True, slots=True)
class DiskStats:
    """Counts since the tier was opened.

    Attributes:
        misses: number of page reads that failed, by reason (see docs/disk-storage.md).
        journal_lag_s: age of the oldest record of a published page that is not durable yet, in seconds; 0 if there is
            none.
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
        """Number of disks that places are striped over, including lost disks. Place p of any group lies on disk
        `p % disks`.
        """

    @property
    @abstractmethod
    def alive(self) -> tuple[bool, ...]:
        """Whether each disk is in use."""

    @abstractmethod
    def slots(self, group: int) -> int:
        """Number of places of the group, which are numbered [0, slots). This includes places on lost disks, which must
        not be used.

        Groups that share slabs have the same places.
        """

    @abstractmethod
    def rows(self, group: int) -> IndexRows:
        """Returns the pages that were durable when the tier was opened and have not expired. Only the first call
        returns them, and only before a `reset`; other calls return no pages.

        If groups share slabs, the call returns the pages of all of these groups, no matter which of them `group` is. So
        one call per slab is enough.
        """

    @property
    @abstractmethod
    def epoch(self) -> int:
        """The epoch of the model's weights, as set by the last `reset`; 0 before the first one."""

    @abstractmethod
    def strange_disks(self, weights: bytes) -> tuple[int, ...]:
        """Returns the disks that hold pages computed with weights that are unknown or differ from `weights`.

        Args:
            weights: 32-byte digest of the whole content of the engine's weights.
        """

    @abstractmethod
    def record_evict(self, group: int, places: Places, generations: Generations) -> None:
        """Records that these pages are gone. They may belong to any group that shares the group's slabs. Never blocks.

        Call it before the places are reused.
        """

    @abstractmethod
    def record_use(self, group: int, places: Places) -> None:
        """Records that these pages were used now. A restart preserves the order of uses approximately. Never blocks,
        but may drop the record.
        """

    @abstractmethod
    def reset(self, epoch: int, deadline_s: float = 30.0) -> None:
        """Forgets every page and durably starts `epoch`: no older page is served any more, not even after a crash.

        Takes a disk out of service if the reset does not finish on this disk within `deadline_s` seconds.

        Raises:
            ContractError: `epoch` is not above the current one.
        """


class Volumes(StoredPages):
    """The disk tier of one ownership unit, with writes. Only the manager's thread calls it."""

    @property
    @abstractmethod
    def folder(self) -> Path | None:
        """The unit's folder on the first disk that could be opened, for small files beside the pages; None if there is
        no such disk.
        """

    @abstractmethod
    def begin_reset(self, epoch: int) -> None:
        """Carries out the part of `reset` that does not wait. Call `finish_reset` afterwards.

        Raises:
            ContractError: `epoch` is not above the current one.
        """

    @property
    @abstractmethod
    def resets(self) -> bool:
        """Whether `finish_reset` would wait."""

    @abstractmethod
    def finish_reset(self, deadline_s: float) -> None:
        """Waits until the reset that `begin_reset` began is durable. Takes a disk out of service if the reset is not
        durable on it within `deadline_s` seconds.
        """

    @abstractmethod
    def name_weights(self, weights: bytes) -> None:
        """Records that all pages of the current epoch, stored already or later, are computed with these weights. Never
        waits. If the tier is opened again before the record is durable, it counts the pages as computed with different
        weights.
        """

    @abstractmethod
    def next_generations(self, count: int) -> Generations:
        """Returns generations for the next `count` page writes, ascending and higher than any returned before."""

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
        """Publishes pages of the group: records them in the journals, which make them durable later (see `poll`). The
        pages' writes must have finished with status OK. Never blocks.

        Returns False if a journal is full. The pages can be read nevertheless, and a later `poll` publishes them when
        the journal has space again, but a crash before that loses them. Also returns False if a page lies on a lost
        disk.
        """

    @abstractmethod
    def image_bytes(self, group: int) -> int:
        """Size in bytes of a slot in the group's slabs: the size of the group's slot image or, if groups share the
        slabs, of their largest image. The slots of the group's host pool must have the same size.
        """

    @abstractmethod
    def digest_offsets(self, group: int) -> tuple[int, ...]:
        """Returns for each rank the offset of its run digests in a slot, in bytes. `TransferEngine.attach_view` takes
        it as `digest_offset`.
        """

    @abstractmethod
    def lane(self, pools: Sequence[HostPool]) -> c_ext.DiskLane:
        """Returns the lane that carries out DISK_READ, DISK_WRITE and DISK_SEAL ops between host pools and disks.

        Give the lane to this process's TransferEngine. Only one call is allowed.

        Args:
            pools: the host pool of each group. Groups that share slabs may share a pool.

        Raises:
            GeometryError: the size of a pool's slots differs from that of the group's images.
            ContractError: the lane was returned before, or the number of pools differs from the number of groups.
        """

    @abstractmethod
    def slab_map(self) -> SlabMap:
        """Returns a description of the slabs, without lost disks, for ranks that move pages themselves
        (`flexkv.transfer.gds_lane`)."""

    @property
    @abstractmethod
    def unflushed(self) -> bool:
        """Whether records wait for the next `poll` because a journal was full. Costs almost nothing."""

    @abstractmethod
    def poll(self) -> DiskEvents:
        """Returns the events since the last call, and passes pending records to the journals. Never blocks."""

    @abstractmethod
    def stats(self) -> DiskStats:
        """Counts so far. Never blocks."""

    @abstractmethod
    def close(self, deadline_s: float) -> bool:
        """Makes everything durable that was recorded, and unlocks the folders. Idempotent.

        Before this call, close the transfer engine that has the lane, and record the results of its ops.

        Returns False if, after `deadline_s` seconds, a record is not durable yet or an I/O still hangs. The folder of a
        disk with such a record or I/O stays locked until the process ends.
        """
