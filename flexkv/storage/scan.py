"""Reading slots one by one, past lane and index: what a rebuilt index and fsck are made from."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flexkv import c_ext
from flexkv.observe import name_this_thread, unix_now_ms
from flexkv.storage.slot_rows import ROW, Rows
from flexkv.storage.tags import TAG

THREADS = 8
"""Reads under way at once: enough for most of an NVMe drive's rate of 4 KiB reads."""

BATCH_SLOTS = 1024


@dataclass(frozen=True, slots=True)
class SlotReport:
    """What one slot holds.

    Attributes:
        miss: `none` for a good page, else why it is none (docs/disk-storage.md).
        empty: never written.
        tag: as it stands there; None unless the trailer is good.
    """

    slot: int
    miss: str
    reason: str
    empty: bool
    tag: np.void | None


def _read(slab: c_ext.SlabFile, buffer: memoryview, offset: int) -> bool:
    """Whether all of `buffer` was read."""
    return os.preadv(slab.fd, [buffer], offset) == len(buffer)


class SlotReader:
    """Reads and checks slots of one slab; not thread-safe.

    Args:
        data: check the bytes of every run too, else the trailer alone.
    """

    def __init__(self, slab: c_ext.SlabFile, slab_id: int, codec: c_ext.PageCodec, data: bool) -> None:
        self._slab, self._slab_id, self._codec, self._data = slab, slab_id, codec, data
        self._image = mmap.mmap(-1, codec.image_bytes)  # on a page boundary, as direct I/O needs it

    def read(self, slot: int) -> SlotReport:
        """Raises: OSError: the disk said no."""
        codec, view = self._codec, memoryview(self._image)
        first = 0 if self._data else codec.trailer_offset
        if not _read(self._slab, view[first:], self._slab.offset(slot) + first):
            return SlotReport(slot, "short", "the file ends before the slot does", False, None)
        head = view[codec.trailer_offset : codec.trailer_offset + codec.trailer_bytes]
        if not any(head):
            return SlotReport(slot, "trailer", "never written", True, None)
        trailer = codec.check(self._image, self._slab_id, slot, None, 0, data=False)
        tag = np.frombuffer(codec.trailer(self._image)[2], TAG)[0] if trailer[0] == "none" else None
        if tag is None or not self._data:
            return SlotReport(slot, *trailer, False, tag)
        miss, reason = codec.check(self._image, self._slab_id, slot, None, 0)
        return SlotReport(slot, miss, reason, False, tag)


def read_slots(
    slab: c_ext.SlabFile, slab_id: int, codec: c_ext.PageCodec, slots: int, data: bool
) -> Iterator[SlotReport]:
    """A report of every slot, in order.

    Raises:
        OSError: the disk said no.
    """

    def batch(first: int) -> list[SlotReport]:
        reader = SlotReader(slab, slab_id, codec, data)
        return [reader.read(slot) for slot in range(first, min(slots, first + BATCH_SLOTS))]

    with ThreadPoolExecutor(THREADS, initializer=name_this_thread, initargs=("flexkv-scan",)) as pool:
        for reports in pool.map(batch, range(0, slots, BATCH_SLOTS)):
            yield from reports


Scanned = tuple[Rows, NDArray[np.uint32]]
"""The index rows that the good pages of a slab make, and the epoch of each."""


def rows_of(reports: Iterator[SlotReport], slots: int) -> Scanned:
    """What the reports make; the newest generation of a key wins."""
    rows, epochs = np.zeros(slots, ROW), np.zeros(slots, np.uint32)
    newest: dict[bytes, int] = {}
    now_ms = unix_now_ms()
    for report in reports:
        tag = report.tag
        if report.miss != "none" or tag is None:
            continue
        # The same key in two epochs is two blocks: only one epoch is kept in the end.
        key = tag["key"].tobytes() + tag["epoch"].tobytes()
        other = newest.get(key)
        if other is not None and rows["generation"][other] > tag["generation"]:
            continue
        if other is not None:
            rows[other] = np.zeros((), ROW)
        newest[key] = report.slot
        row = rows[report.slot]
        for name in ("key", "generation", "expiry", "tokens"):
            row[name] = tag[name]
        row["used"] = now_ms
        epochs[report.slot] = tag["epoch"]
    return rows, epochs
