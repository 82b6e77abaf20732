"""The disk tier's contracts: what the control plane may ask of one ownership unit's disks, and what it gets.

Bytes move as DISK_READ, DISK_WRITE and DISK_SEAL ops of transfer graphs, on the lane that the tier gives to the
manager's transfer engine. Everything else goes through these interfaces, of which only opening, `reset`,
`finish_reset` and `close` wait for a disk.

A page's way down: `next_generations`, a DISK_WRITE (or the ranks' GDS_WRITEs and a DISK_SEAL) whose tags name key,
epoch and generation, then, after its op ended OK, `record_publish`. The page can be read from the op's end on; it
survives a crash once `poll` has named it.
A page's way up: a DISK_READ whose tags say what the slot must hold. A page with another key, epoch, generation or token
count, or with damaged bytes, fails, whatever the index said: a stale index costs a miss and never a wrong byte.
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
"""uint64 [pages]: durable open count (24 bits) and a counter (40 bits). Never given twice, not even after a crash."""

RunTable = NDArray[np.int64]
"""The runs of one rank's stripe, int64 [runs, 3]: offset in the stripe, bytes, layer; ascending by offset."""


@dataclass(frozen=True, slots=True)
class DiskIdentity:
    """The owner of pages. Equal identities use the same folder after a restart; different ones lie side by side.

    Attributes:
        model: the model's name for people, which `flexkv disk ls` shows.
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
        dtype: dtype of the KV, for people.
        host_digests: device lanes write the run digests into the slot's trailer (`host.verify`). They go to the disk as
            they are, so a load checks pages by digests of the engine's own bytes.
        rule: which pages a hit needs: "full", "window", "chunk" or "state".
        reach: reach of a window in pages, or of a chunk in tokens, else 0.
        signature: what the group's keys are hashed with; empty for nothing. A group with another one is another group.
        shares: number of an earlier group whose slabs its pages lie in; None for slabs of its own. Slots are as large
            as the largest image of the groups that share them.
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
        """The rule, for people."""
        unit = {"window": " pages", "chunk": " tokens"}.get(self.rule)
        return f"{self.rule} of {self.reach}{unit}" if unit else self.rule


@dataclass(frozen=True, slots=True)
class DiskOptions:
    """How a unit uses its disks.

    Attributes:
        bytes_per_disk: bytes of slabs in each folder; the index takes at most one byte per 64 of these besides.
        io: `auto` takes io_uring where the kernel lets it, else threads.
        depth: I/Os under way at once on one disk.
        stuck_s: a disk with an I/O that takes longer is taken out.
        journal_rows: rows that may wait in a journal; publishes and evictions beyond it come later, uses are dropped.
        preallocate: give the slabs their space at open, so that no write can find the disk full, and clear it ahead of
            the pages while the disk is idle.
        register_buffers: io_uring keeps the host pool's pages pinned. If the system refuses that, as with a low
            `memlock` limit, I/O goes on without.
        sealed_apart: ranks write stripes by themselves (`DISK_SEAL`). Then the tier clears no space: its zeros could
            overwrite stripes, because it does not know when ranks write.
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
    """The pages that a group's slabs hold, as the index says; the one used longest ago comes first.

    Attributes:
        keys: uint8 [n, 16], no two of one group alike.
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
    """Publishes that survive a crash from now on."""

    group: int
    places: Places
    generations: Generations


@dataclass(frozen=True, slots=True)
class LostDisk:
    """A disk that was taken out. Its places are misses and must not be written again; the other disks go on."""

    disk: int
    folder: Path
    reason: str


@dataclass(frozen=True, slots=True)
class DiskEvents:
    """What happened since the last `poll`.

    Attributes:
        lost: each disk once.
    """

    durable: tuple[DurablePages, ...] = ()
    lost: tuple[LostDisk, ...] = ()


@dataclass(frozen=True, slots=True)
class DiskStats:
    """Counts since `open`.

    Attributes:
        misses: reads that failed, by reason (see docs/disk-storage.md).
        journal_lag_s: age of the oldest publish in a journal that is not durable yet, seconds; 0 when there is none.
        pending_pages: pages that can be read now and wait to be published, because their journal was full.
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
    """A unit's pages on disks, to be looked up and read. Only `reset` waits for a disk."""

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
        """How many places the group has: [0, slots). Places of lost disks are among them and must not be used.

        Groups that share slabs have the same places.
        """

    @abstractmethod
    def rows(self, group: int) -> IndexRows:
        """The pages that were durable at the opening and have not expired. Only the first call gets them.

        For groups that share slabs it returns the pages of all of them, whichever is named, so one call for the first
        of them suffices. After a `reset` there are none.
        """

    @property
    @abstractmethod
    def epoch(self) -> int:
        """The epoch of the model's weights, which the last `reset` set; 0 at first."""

    @abstractmethod
    def strange_disks(self, weights: bytes) -> tuple[int, ...]:
        """The disks with pages that were computed with other weights than these, or with unknown ones.

        Args:
            weights: 32 bytes that name all content of the engine's weights.
        """

    @abstractmethod
    def record_evict(self, group: int, places: Places, generations: Generations) -> None:
        """Forgets these pages, whichever of the groups that share the group's slabs they are of. Never blocks.

        Call it before their places are written again.
        """

    @abstractmethod
    def record_use(self, group: int, places: Places) -> None:
        """Notes that these pages were used now. A restart keeps the order roughly. Never blocks; may drop the note."""

    @abstractmethod
    def reset(self, epoch: int, deadline_s: float = 30.0) -> None:
        """Forgets every page and starts `epoch`, durably: nothing older is served any more, not even after a crash.

        Disks on which this does not end within the deadline are taken out.

        Raises:
            ContractError: `epoch` is not above the current one.
        """


class Volumes(StoredPages):
    """The disk tier of one ownership unit, which writes pages, too. One thread, the manager's, drives it."""

    @abstractmethod
    def begin_reset(self, epoch: int) -> None:
        """The part of `reset` that does not wait; `finish_reset` follows.

        Raises:
            ContractError: `epoch` is not above the current one.
        """

    @property
    @abstractmethod
    def resets(self) -> bool:
        """Whether `finish_reset` would wait."""

    @abstractmethod
    def finish_reset(self, deadline_s: float) -> None:
        """Waits until the reset that began is durable. Disks on which it is not in time are taken out."""

    @abstractmethod
    def name_weights(self, weights: bytes) -> None:
        """Notes that this epoch's pages, earlier and later ones, are computed with these weights. Never waits; until
        the note is durable, another opening takes the pages for those of other weights."""

    @abstractmethod
    def next_generations(self, count: int) -> Generations:
        """`count` numbers for writes, ascending, higher than any before."""

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
        """Makes pages of the group durable that were written and whose ops ended OK. Never blocks.

        Returns False when a journal is full: the pages can be read, and a later `poll` publishes them when there is
        room; until then a crash loses them. Returns False for a lost disk, too.
        """

    @abstractmethod
    def image_bytes(self, group: int) -> int:
        """Bytes of a slot of the group's slabs: the slot image with its trailer, for groups that share slabs the
        largest. Slots of the group's host pool must have as many."""

    @abstractmethod
    def digest_offsets(self, group: int) -> tuple[int, ...]:
        """Offset of each rank's run digests in a slot: `digest_offset` of `TransferEngine.attach_view`."""

    @abstractmethod
    def lane(self, pools: Sequence[HostPool]) -> c_ext.DiskLane:
        """The lane for DISK_READ, DISK_WRITE and DISK_SEAL between the groups' host pools, one per group (those that
        share slabs may share one), and the disks.

        Give it to the TransferEngine of this process; it can be had once.

        Raises:
            GeometryError: a pool's slots have another size than the group's images.
            ContractError: asked for twice, or another number of pools than groups.
        """

    @abstractmethod
    def slab_map(self) -> SlabMap:
        """What ranks need to move pages by `flexkv.transfer.gds_lane`, without disks that are lost by now."""

    @property
    @abstractmethod
    def unflushed(self) -> bool:
        """Whether records wait for a `poll`, because a journal had no room for them. Costs next to nothing."""

    @abstractmethod
    def poll(self) -> DiskEvents:
        """Returns what happened since the last call, and gives waiting records to the journals. Never blocks."""

    @abstractmethod
    def stats(self) -> DiskStats:
        """Counts so far. Never blocks."""

    @abstractmethod
    def close(self, deadline_s: float) -> bool:
        """Makes everything recorded durable and unlocks the folders. Call it after the transfer engine with the lane
        was closed and its results were recorded. Idempotent.

        Returns False if after `deadline_s` seconds something was not durable yet, or an I/O still hung; the folder of
        such a disk stays locked until the process ends.
        """
