"""Host memory for slot images: an arena of extents, private or shared with the unit's worker processes."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from flexkv import c_ext
from flexkv.config.sizes import format_size
from flexkv.errors import ClosedError, ConfigError

logger = logging.getLogger(__name__)

MAX_EXTENT_BYTES = 1 << 30
"""Largest extent, bytes: io_uring refuses to register a longer buffer."""

ANY_NODE = -1
"""The native pool's value for "any NUMA node"."""

HugePages = Literal["auto", "off"]


@dataclass(frozen=True, slots=True)
class ExtentReport:
    """The memory that bring-up obtained for one extent.

    Attributes:
        pages_kind: `huge`, `mixed`, `4k` or `hugetlb` (reserved huge pages); `pending` until the extent is up;
            `attached` in a process that did not create the pool.
        huge_bytes: the part of `bytes` that is on huge pages.
        bring_up_s: seconds from the first touch to ready.
        registered: whether all of it is registered with the GPU; if not, only the copy engine can use it.
        numa_node: the node that holds the extent's first page; -1 if the kernel does not report it.
    """

    index: int
    bytes: int
    pages_kind: str
    huge_bytes: int
    bring_up_s: float
    registered: bool
    numa_node: int


@dataclass(frozen=True, slots=True)
class PoolDescriptor:
    """Names a shared pool for `HostPool.attach`, in any process of the same user on this machine. Picklable."""

    pid: int
    fd: int
    token: bytes
    file_bytes: int
    slot_bytes: int
    slots: int
    extent_bytes: int


class HostPool:
    """An arena of `slots` slot images of `slot_bytes` each (a multiple of 4 KiB), in extents of at most 1 GiB.

    Memory is mapped in the background, in order: slots [0, `ready_slots`) can be used. If memory runs short, mapping
    stops (`stopped_reason`), and the slots that are ready stay usable.

    Args:
        numa_node: the preferred node for the memory; None leaves the choice to the kernel.

    Raises:
        GeometryError: a size is not allowed.
        CapacityError: the pool and its headroom do not fit into the memory available now (MemAvailable and control
            groups).
        ConfigError: `huge_pages` has an unknown value, or there can be no such NUMA node.
    """

    def __init__(
        self,
        slot_bytes: int,
        slots: int,
        shared: bool = False,
        extent_bytes: int = MAX_EXTENT_BYTES,
        huge_pages: HugePages = "auto",
        numa_node: int | None = None,
    ) -> None:
        if huge_pages not in ("auto", "off"):
            raise ConfigError(f"huge_pages={huge_pages!r}: allowed are 'auto' and 'off'")
        self._native: c_ext.HostPool | None = c_ext.HostPool(
            slot_bytes,
            slots,
            shared,
            extent_bytes,
            huge_pages == "auto",
            ANY_NODE if numa_node is None else numa_node,
        )
        self._logged = self._warned = self._creator_missed = False

    @classmethod
    def attach(cls, descriptor: PoolDescriptor) -> HostPool:
        """The pool that `descriptor` names: the same memory in the process that made it, else a mapping of it.

        Raises:
            ClosedError: the pool is gone (its process ended or closed it), or the pid or fd now names something else.
            GeometryError: the pool found has another geometry.
            CapacityError: it cannot be mapped.
        """
        pool = cls.__new__(cls)
        d = descriptor
        pool._native = c_ext.HostPool.attach(
            d.pid, d.fd, d.token, d.file_bytes, d.slot_bytes, d.slots, d.extent_bytes
        )
        pool._logged, pool._warned, pool._creator_missed = (
            True,
            False,
            False,
        )  # only the creator logs the pool's memory
        return pool

    @property
    def native(self) -> c_ext.HostPool:
        """The native pool, for transfer engines and lanes, which keep its memory alive while they may touch it.

        Raises:
            ClosedError: the pool was closed.
        """
        if self._native is None:
            raise ClosedError("the host pool was closed")
        return self._native

    @property
    def slot_bytes(self) -> int:
        return self.native.slot_bytes

    @property
    def slots(self) -> int:
        return self.native.slots

    @property
    def ready_slots(self) -> int:
        """Slots [0, ready_slots) are mapped. Only grows; an attached pool reports what its creator has mapped."""
        ready = self.native.ready_slots
        self._log_once()
        return ready

    def pin(self, device: int) -> None:
        """Registers this process's mapping with a GPU, in the background as memory is mapped. Each piece has at most
        128 MiB (or one slot), and a pause follows it, so that the engine can take the driver's locks in between. Pieces
        that the GPU refuses are tried again for a minute.

        Only a process whose GPU copies needs this. Later calls have no effect, because memory is registered for all
        GPUs at once.

        Raises:
            ConfigError: there is no such CUDA device, or no driver.
        """
        self.native.pin(device)

    @property
    def pinned_slots(self) -> int:
        """The GPU has registered or refused slots [0, pinned_slots); 0 before `pin`."""
        pinned = self.native.pinned_slots
        self._log_once()
        return pinned

    @property
    def settled(self) -> bool:
        """Whether mapping has ended and its outcome was logged, which reading `ready_slots` does. True if attached."""
        return self._logged

    @property
    def stopped_reason(self) -> str:
        """Why no more slots will be mapped: mapping stopped early, or the pool's process ended. Empty if all are
        mapped.
        """
        return self.native.stopped_reason

    @property
    def creator_gone(self) -> bool:
        """For an attached pool, whether the process that made it has ended or closed it. This process's mapping stays
        valid.
        """
        return self.native.creator_gone

    def wait_ready(self, slots: int, deadline_s: float) -> bool:
        """Waits up to `deadline_s` seconds until `slots` slots are up. False at once if bring-up has ended with fewer.

        Raises:
            BlockRangeError: the pool has fewer slots.
        """
        ready = self.native.wait_ready(slots, deadline_s)
        self._log_once()
        return ready

    def slot(self, slot: int) -> NDArray[np.uint8]:
        """The bytes of one slot, uint8 [slot_bytes], writable; keeps the memory mapped for as long as it lives.

        Raises:
            BlockRangeError: the slot is not in [0, ready_slots).
        """
        return self.native.slot(slot)

    def extent_of(self, slot: int) -> NDArray[np.uint8]:
        """The bytes of a slot and of those after it in its extent, otherwise like `slot`: the range that is registered
        with a device or a network card at once.

        Raises:
            BlockRangeError: the slot is not in [0, ready_slots).
        """
        return self.native.extent_of(slot)

    def fail_read(self, slots: NDArray[np.int32], read: int) -> None:
        """Reports that `read` will never fill these slots: loads that wait for it fail those pages.

        For reads that no lane carries out; a lane reports the end of its own reads.

        Raises:
            BlockRangeError: a slot is not in [0, ready_slots).
            ContractError: `read` is not positive.
        """
        self.native.settle(slots, read, False)

    def report(self) -> list[ExtentReport]:
        """One entry per extent, in order."""
        return [ExtentReport(*extent) for extent in self.native.report()]

    def descriptor(self) -> PoolDescriptor:
        """The descriptor with which another process attaches.

        Raises:
            ContractError: the pool is private.
        """
        native = self.native
        pid, fd, token, file_bytes = native.address()
        return PoolDescriptor(
            pid, fd, token, file_bytes, native.slot_bytes, native.slots, native.extent_bytes
        )

    def close(self) -> None:
        """Ends bring-up and refuses new use. The memory is freed with the last engine, op or array that can touch it.

        This closes the pool for all who attached in this process; other processes keep their mappings. Idempotent.
        """
        if self._native is not None:
            self._native.close()
            self._native = None

    def _log_once(self) -> None:
        native = self.native
        if not self._warned and native.registration_error:
            self._warned = True
            logger.warning(
                "host pool: the GPU did not take %s; such memory is left to the copy engine, which is slower for "
                "short runs (report() lists the extents)",
                native.registration_error,
            )
        if not self._creator_missed and native.creator_gone:
            self._creator_missed = True
            logger.warning(
                "host pool: the process that made it has ended or closed it; no more slots will be mapped"
            )
        if self._logged or not native.settled:
            return
        self._logged = True
        extents = [e for e in self.report() if e.pages_kind != "pending"]
        total = sum(e.bytes for e in extents)
        huge = sum(e.huge_bytes for e in extents)
        logger.info(
            "host pool: %d of %d slots up in %.1f s: %s in %d extent(s), %.0f%% in huge pages (%s), %d extent(s) "
            "registered with a GPU",
            native.ready_slots,
            native.slots,
            sum(e.bring_up_s for e in extents),
            format_size(total),
            len(extents),
            100 * huge / total if total else 0,
            ", ".join(sorted({e.pages_kind for e in extents})) or "none",
            sum(e.registered for e in extents),
        )
        if native.stopped_reason:
            logger.warning("host pool: bring-up stopped: %s", native.stopped_reason)
