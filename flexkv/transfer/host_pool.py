"""Host memory for slot images (the bytes of a page as they lie in a slot), in consecutive pieces (extents). The memory
is private, or shared with the unit's worker processes.
"""

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
"""Size of the largest extent, in bytes. io_uring refuses to register a longer buffer."""

ANY_NODE = -1
"""The value of the native pool's `numa_node` with which Linux chooses the node."""

HugePages = Literal["auto", "off"]


@dataclass(frozen=True, slots=True)
class ExtentReport:
    """The memory that was obtained for one extent.

    Attributes:
        index: the extent's number, from 0.
        bytes: the extent's size in bytes.
        pages_kind: the memory pages that hold the extent: `huge`, `mixed`, `4k` or `hugetlb` (reserved huge pages).
            `pending` until the extent is mapped; `attached` in a process that did not create the pool.
        huge_bytes: number of the extent's bytes that are on huge pages.
        bring_up_s: seconds from the extent's first touch until it was ready.
        registered: whether the complete extent is registered with the GPU. Memory that is not registered can be copied
            only by the copy engine.
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
    """Identifies a shared pool. With it, any process of the same user on this machine can call `HostPool.attach`.
    Picklable."""

    pid: int
    fd: int
    token: bytes
    file_bytes: int
    slot_bytes: int
    slots: int
    extent_bytes: int


class HostPool:
    """Host memory for `slots` slot images of `slot_bytes` each (a multiple of 4 KiB), in extents of at most 1 GiB.

    The memory is mapped in the background, slot by slot from 0. The slots in [0, `ready_slots`) can be used. If memory
    runs short, mapping stops (see `stopped_reason`), and the slots that are ready stay usable.

    Args:
        shared: whether other processes can attach to the pool.
        extent_bytes: the size of an extent, at most 1 GiB.
        huge_pages: `auto` to use huge pages where the kernel provides them; `off` to use none.
        numa_node: the preferred NUMA node for the memory; None leaves the choice to the kernel.

    Raises:
        GeometryError: a size is not allowed.
        CapacityError: the pool and its headroom exceed the memory that is available now, according to MemAvailable and
            the limits of control groups.
        ConfigError: `huge_pages` has an unknown value, or `numa_node` cannot be a NUMA node.
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
        """Returns the pool that `descriptor` identifies. In the process that made the pool, this is the same memory. In
        any other process, it is a mapping of that memory.

        Raises:
            ClosedError: the pool is gone, because its process ended or closed it; or the pid or fd now belongs to
                another process or file.
            GeometryError: the pool's geometry differs from the descriptor's.
            CapacityError: the pool cannot be mapped.
        """
        pool = cls.__new__(cls)
        d = descriptor
        pool._native = c_ext.HostPool.attach(
            d.pid, d.fd, d.token, d.file_bytes, d.slot_bytes, d.slots, d.extent_bytes
        )
        # `_logged` is True, because only the process that created the pool logs its memory.
        pool._logged, pool._warned, pool._creator_missed = True, False, False
        return pool

    @property
    def native(self) -> c_ext.HostPool:
        """The native pool. Transfer engines and lanes hold it, so that its memory exists for as long as they may touch
        it.

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
        """The number of slots that are mapped: slots [0, ready_slots). The number never shrinks. An attached pool
        reports the slots that its creator has mapped.
        """
        ready = self.native.ready_slots
        self._log_once()
        return ready

    def pin(self, device: int) -> None:
        """Registers this process's mapping of the pool with a GPU. This happens in the background, as memory is mapped.

        The memory is registered in pieces of at most 128 MiB (or one slot). After each piece there is a pause, in which
        the engine can take the driver's locks. Pieces that the GPU refuses are tried again for a minute.

        Only processes that copy to or from a GPU need this. Only the first call has an effect, because it registers the
        memory for all GPUs.

        Raises:
            ConfigError: there is no such CUDA device, or no driver.
        """
        self.native.pin(device)

    @property
    def pinned_slots(self) -> int:
        """The number of slots that the GPU has either registered or refused: slots [0, pinned_slots). 0 before
        `pin`.
        """
        pinned = self.native.pinned_slots
        self._log_once()
        return pinned

    @property
    def settled(self) -> bool:
        """Whether mapping has ended and its outcome was logged. Reading `ready_slots` logs the outcome. Always true for
        an attached pool."""
        return self._logged

    @property
    def stopped_reason(self) -> str:
        """Why no more slots will be mapped: mapping stopped early, or the process that made the pool ended. Empty while
        slots are being mapped, and if all are mapped.
        """
        return self.native.stopped_reason

    @property
    def creator_gone(self) -> bool:
        """Whether the pool is attached and the process that made it has ended or has closed it. This process's mapping
        stays valid.
        """
        return self.native.creator_gone

    def wait_ready(self, slots: int, deadline_s: float) -> bool:
        """Waits up to `deadline_s` seconds until `slots` slots are mapped. Returns False if they are not. If mapping
        has ended with fewer slots, returns False at once.

        Raises:
            BlockRangeError: the pool has fewer slots.
        """
        ready = self.native.wait_ready(slots, deadline_s)
        self._log_once()
        return ready

    def slot(self, slot: int) -> NDArray[np.uint8]:
        """Returns the bytes of one slot as a writable array, uint8 [slot_bytes]. The memory stays mapped for as long as
        the array exists.

        Raises:
            BlockRangeError: the slot is not in [0, ready_slots).
        """
        return self.native.slot(slot)

    def extent_of(self, slot: int) -> NDArray[np.uint8]:
        """Returns the memory from the start of a slot to the end of its extent, in the same form as `slot`. This is the
        range that is registered with a device or a network card in one call.

        Raises:
            BlockRangeError: the slot is not in [0, ready_slots).
        """
        return self.native.extent_of(slot)

    def fail_read(self, slots: NDArray[np.int32], read: int) -> None:
        """Makes loads that wait for the DISK_READ `read` fail their pages in these slots, because the read will never
        fill them.

        Call this for reads that no lane executes. A lane reports the end of its own reads.

        Raises:
            BlockRangeError: a slot is not in [0, ready_slots).
            ContractError: `read` is not positive.
        """
        self.native.settle(slots, read, False)

    def report(self) -> list[ExtentReport]:
        """Returns one entry per extent, in the order of the extents."""
        return [ExtentReport(*extent) for extent in self.native.report()]

    def descriptor(self) -> PoolDescriptor:
        """Returns the descriptor with which another process attaches to the pool.

        Raises:
            ContractError: the pool is not shared.
        """
        native = self.native
        pid, fd, token, file_bytes = native.address()
        return PoolDescriptor(
            pid, fd, token, file_bytes, native.slot_bytes, native.slots, native.extent_bytes
        )

    def close(self) -> None:
        """Stops mapping. Later calls raise ClosedError. The memory is freed after the last transfer engine, op or array
        that can touch it is gone.

        This also closes the pools that were attached in this process with its descriptor. Other processes keep their
        mappings. Idempotent.
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
