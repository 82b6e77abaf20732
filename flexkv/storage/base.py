"""The disk tier's contracts: what the control plane may ask of one ownership unit's disks, and what it is told.

Bytes move as DISK_READ, DISK_WRITE and DISK_SEAL ops of transfer graphs, on the lane that the tier gives to the
manager's transfer engine. Everything else goes through here, and nothing here but `open`, `reset` and `close` waits for
a disk.

A page's way down: `next_generations`, a DISK_WRITE (or the ranks' GDS_WRITEs and a DISK_SEAL) whose tags name key,
epoch and generation, then, after its op ended OK, `record_publish`. From the op's end on the page can be read; it
survives a crash from the moment `poll` names it.
A page's way up: a DISK_READ whose tags say what the slot must hold. Another key, epoch, generation, token count, or
damaged bytes is a failed page, whatever the index said: a stale index costs a miss and never a wrong byte.
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
"""uint64 [pages]: durable open count (24 bits) and a counter (40 bits). Never given twice, also over crashes."""

RunTable = NDArray[np.int64]
"""The runs of one rank's stripe, int64 [runs, 3]: offset in the stripe, bytes, layer; ascending by offset."""


@dataclass(frozen=True, slots=True)
class DiskIdentity:
    """Who the pages belong to. Equal identities share a folder over restarts; others lie side by side.

    Attributes:
        model: for people: what `flexkv disk ls` shows.
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
        stripe_bytes: of each rank.
        runs: of each rank, a RunTable; its rows fill the stripe exactly.
        block_tokens: tokens of a whole block.
        dtype: of the KV, for people.
        host_digests: device lanes write the run digests into the slot's trailer (`host.verify`): they are taken to the
            disk as they are, so that what is checked at a load was made from the engine's own bytes.
        rule: which pages a hit needs: "full", "window", "chunk" or "state".
        reach: of a window in pages, of a chunk in tokens, else 0.
        signature: what of the group is hashed into its keys; empty where nothing is. Another one is another group.
        shares: number of an earlier group whose slabs its pages lie in; None for slabs of its own. Slots are as large
            as the largest image of those that share.
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
        """For people."""
        unit = {"window": " pages", "chunk": " tokens"}.get(self.rule)
        return f"{self.rule} of {self.reach}{unit}" if unit else self.rule


@dataclass(frozen=True, slots=True)
class DiskOptions:
    """How a unit uses its disks.

    Attributes:
        bytes_per_disk: of slabs in each folder; the index takes about 1 % of it besides for 64 KiB pages.
        io: `auto` takes io_uring where the kernel lets it, else threads.
        depth: I/Os under way at once on one disk.
        stuck_s: a disk with an I/O that takes longer is taken out.
        journal_rows: rows that may wait in a journal; publishes and evictions beyond it come later, uses are dropped.
        preallocate: give the slabs their space at open, so that no write can find the disk full, and clear it ahead of
            the pages while the disk is idle.
        register_buffers: io_uring keeps the host pool's pages pinned. Where it is refused that, which `memlock` limits
            do, I/O goes on without.
        sealed_apart: ranks write stripes by themselves (`DISK_SEAL`). Nothing is cleared then: zeros and stripes would
            be written by two who do not know of each other.
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
    """What a group's slabs hold, as the index says; the one used longest ago comes first.

    Attributes:
        keys: uint8 [n, 16], no two of one group alike.
        places: int32 [n].
        generations: uint64 [n].
        tokens: valid tokens, int32 [n].
        expiries: unix seconds, 0 for never, uint64 [n].
        groups: of each page the number of its KV group, int32 [n]; None for slabs of one group.
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
        pending_pages: now, pages that can be read and whose journal was full: they are published when it has room.
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
    """What of a unit's pages lies on disks, to be looked up and read. Nothing here but `reset` waits for a disk."""

    @property
    @abstractmethod
    def disks(self) -> int:
        """How many disks places are striped over, lost ones included. Place p of any group lies on disk `p % disks`."""

    @property
    @abstractmethod
    def alive(self) -> tuple[bool, ...]:
        """Of each disk, whether it is in use."""

    @abstractmethod
    def slots(self, group: int) -> int:
        """Places of the group are [0, slots). Those of lost disks are among them and must not be used.

        Of groups that share slabs, the places of each are those of all.
        """

    @abstractmethod
    def rows(self, group: int) -> IndexRows:
        """What was durable when it was opened and has not expired. Once: the rows are given away.

        Of groups that share slabs, the pages of all of them, whichever is named: by the first of them, then, once.
        Nothing after a `reset`.
        """

    @property
    @abstractmethod
    def epoch(self) -> int:
        """Of the model's weights: what the last `reset` set, 0 at first."""

    @abstractmethod
    def strange_disks(self, weights: bytes) -> tuple[int, ...]:
        """The disks with pages that were computed with other weights than these, or with nobody knows which.

        Args:
            weights: 32 bytes that name all content of the engine's weights.
        """

    @abstractmethod
    def record_evict(self, group: int, places: Places, generations: Generations) -> None:
        """These pages are to be forgotten, of whichever of the groups that share the group's slabs. Never blocks.

        To be called before their places are written again.
        """

    @abstractmethod
    def record_use(self, group: int, places: Places) -> None:
        """These pages were used now; the order survives a restart roughly. Never blocks, may forget."""

    @abstractmethod
    def reset(self, epoch: int, deadline_s: float = 30.0) -> None:
        """Forgets every page and starts `epoch`, durably: after a crash from here on nothing older is served.

        Disks that do not manage within the deadline are taken out.

        Raises:
            ContractError: `epoch` is not above the current one.
        """


class Volumes(StoredPages):
    """The disk tier of one ownership unit: pages that it writes, too. Driven by one thread, the manager's."""

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
        """Waits until the reset that began is durable; disks that do not manage within the deadline are taken out."""

    @abstractmethod
    def name_weights(self, weights: bytes) -> None:
        """What lies here in this epoch was and will be computed with these weights. Never waits: until it is durable,
        another opening takes the pages for another's."""

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
        """These pages of the group were written and their ops ended OK: make them durable. Never blocks.

        False when a journal is full: the pages can be read, and are published when it has room, at a `poll`; until then
        a crash loses them. False also for a disk that is lost.
        """

    @abstractmethod
    def image_bytes(self, group: int) -> int:
        """Bytes of a slot of the group's slabs: the slot image with its trailer, of groups that share the largest. What
        the slots of the group's host pool must have."""

    @abstractmethod
    def digest_offsets(self, group: int) -> tuple[int, ...]:
        """Where in a slot the run digests of each rank lie: `digest_offset` of `TransferEngine.attach_view`."""

    @abstractmethod
    def lane(self, pools: Sequence[HostPool]) -> c_ext.DiskLane:
        """The lane for DISK_READ, DISK_WRITE and DISK_SEAL between the groups' host pools, one a group (those that
        share slabs may share one), and the disks.

        To be given to the TransferEngine of this process; once.

        Raises:
            GeometryError: a pool's slots have another size than the group's images.
            ContractError: asked for twice, or another number of pools than groups.
        """

    @abstractmethod
    def slab_map(self) -> SlabMap:
        """What ranks need to move pages by `flexkv.transfer.gds_lane`; disks that are lost by now are not in it."""

    @property
    @abstractmethod
    def unflushed(self) -> bool:
        """Whether a `poll` is wanted for what a journal had no room for. Costs next to nothing."""

    @abstractmethod
    def poll(self) -> DiskEvents:
        """Takes what happened since the last call. Never blocks."""

    @abstractmethod
    def stats(self) -> DiskStats:
        """Counts so far. Never blocks."""

    @abstractmethod
    def close(self, deadline_s: float) -> bool:
        """Makes everything recorded durable and lets the folders go. To be called after the transfer engine with the
        lane was closed and its results were recorded. Idempotent.

        False: after `deadline_s` seconds something was not durable yet, or an I/O still hung; the folder of such a disk
        stays locked until the process ends.
        """
