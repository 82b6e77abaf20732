"""What the control plane decides about the disk tier: when pages are written, within which bounds, and what is counted.

Contracts of what lies below: `flexkv.storage.base.DiskTier`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from flexkv.cache.base import Keys
from flexkv.cache.leases import EntryIds
from flexkv.errors import ConfigError
from flexkv.transfer.graph import OpResult, TransferGraph


class DiskMode(Enum):
    """When a page goes to disk."""

    THROUGH = "through"
    """As soon as it is in host memory: the disk has everything, and the most is written."""
    BACK = "back"
    """When the disk has nothing else to do, and before it leaves host memory."""
    EVICT = "evict"
    """Only when it is about to leave host memory: the least is written, and a crash loses what host memory held."""


@dataclass(frozen=True, slots=True)
class WantedBlocks:
    """Blocks of one group, each in host memory or on disk.

    Attributes:
        entries: in the index of the unit's own disks, where all of them are known to be there; else None. Good until
            something is given a place on disk.
    """

    group: int
    keys: Keys
    entries: EntryIds | None = None

    def __len__(self) -> int:
        return len(self.keys)

    def at(self, positions: NDArray[np.integer | np.bool_] | slice) -> WantedBlocks:
        entries = None if self.entries is None else self.entries[positions]
        return WantedBlocks(self.group, self.keys[positions], entries)


class GdsUse(Enum):
    """When pages on disk are loaded without a page of host memory."""

    NEVER = "never"
    WHERE_FASTER = "where_faster"
    """Than through host memory, as both were measured lately."""
    ALWAYS = "always"


@dataclass(frozen=True, slots=True)
class DiskLimits:
    """Bounds of one unit's disk tier.

    Attributes:
        mode: when pages are written.
        write_pages: pages with a write in flight at most; more wait.
        read_pages: pages with a read in flight at most; a longer hit is cut to what fits.
        waiting_pages: pages that may wait for their write; beyond it they are dropped and counted.
        ops: reads, and writes, in flight at most; no more than the queue places of the lane.
        wait_s: a lookup waits for the disk this long at most, then goes on without.
        compute_if_faster: a lookup leaves to the engine what it computes sooner than the disk brings it up.
        stream: whole blocks are promised as soon as their read is planned; their load waits for each page. Only for an
            engine that computes what a load did not bring.
        stream_layers: such reads bring up ranges of layers of all their pages, one after the other, for loads that wait
            for each layer.
        ttl_s: pages are a miss this long after they were written, in whole seconds; None for never.
        gds_loads: when whole blocks are loaded from disk without a page of host memory. Only for such an engine, whose
            workers have the lane for it.
        gds_stores: blocks are stored on disk without a page of host memory, and not in host memory.
    """

    mode: DiskMode = DiskMode.THROUGH
    write_pages: int = 4096
    read_pages: int = 65_536
    waiting_pages: int = 65_536
    ops: int = 256
    wait_s: float = 30.0
    compute_if_faster: bool = True
    stream: bool = False
    stream_layers: bool = False
    ttl_s: int | None = None
    gds_loads: GdsUse = GdsUse.NEVER
    gds_stores: bool = False

    def check(self) -> None:
        """
        Raises:
            ConfigError: a bound is not positive; names it.
        """
        for name in ("write_pages", "read_pages", "waiting_pages", "ops", "wait_s", "ttl_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"disk {name}={value}; allowed are values above 0")


class Plane(Protocol):
    """What a driver needs of the data plane (`flexkv.transfer.base.DataPlane`)."""

    def submit(self, graph: TransferGraph) -> int | None: ...
    def poll(self) -> list[OpResult]: ...
    def close(self, deadline_s: float) -> bool: ...


class SiblingPlane(Plane, Protocol):
    """What it needs of that which reads siblings' pages."""

    @property
    def down_reason(self) -> str:
        """Why no more is read, or nothing. Asked now and then, so that a disk that hangs is found."""


@dataclass(slots=True)
class DiskCounts:
    """Running totals of one disk tier, in pages unless they say otherwise.

    Attributes:
        written: pages whose write ended well.
        failed_writes: pages whose write did not.
        dropped_writes: pages never written, because a queue was full or there was no place for them.
        lost: pages that left host memory before they were written.
        read: pages brought up to host memory and verified.
        failed_reads: pages that were not: damaged, torn, of another write, or the disk failed.
        unread: pages whose read was planned and never issued, failed by no fault of theirs or the disk's, or whose
            weights are gone.
        expired: pages found past their time to live.
        evicted: pages that left the disk to make room.
        gone: pages lost with a disk.
        waits: lookups that waited for the disk.
        late: lookups that went on without the disk, because it took too long.
        left: lookups of which a part was left to the engine, because it computes that sooner.
        left_pages: pages of those.
        streamed: pages loaded that had been promised while they were on their way up.
        gds_read: pages loaded from disk and verified without a page of host memory.
        gds_written: pages written without one; they are among `written`.
    """

    written: int = 0
    failed_writes: int = 0
    dropped_writes: int = 0
    lost: int = 0
    read: int = 0
    failed_reads: int = 0
    unread: int = 0
    expired: int = 0
    evicted: int = 0
    gone: int = 0
    waits: int = 0
    late: int = 0
    left: int = 0
    left_pages: int = 0
    streamed: int = 0
    gds_read: int = 0
    gds_written: int = 0
