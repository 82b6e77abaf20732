"""Reads slots one by one, without a lane or an index, for `flexkv fsck` and for rebuilding an index."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from flexkv import c_ext
from flexkv.observe import name_this_thread, unix_now_ms
from flexkv.storage.slot_rows import ROW, Rows
from flexkv.storage.tags import TAG

THREADS = 8
"""Number of threads that read at once. Eight threads reach most of the rate at which an NVMe drive can read pieces of 4
KiB.
"""

BATCH_SLOTS = 1024

PAGE_MAGIC = b"FKVPAGE1"
"""The first bytes of a trailer."""


@dataclass(frozen=True, slots=True)
class SlotReport:
    """The report on one slot.

    Attributes:
        miss: `none` for a good page, else the kind of miss (docs/disk-storage.md).
        reason: the miss in words.
        empty: whether the slot has no trailer: it was never written, or it only has stripes.
        tag: the tag in the trailer; None unless the trailer is good.
        group: number of the KV group in the trailer; 0 unless the trailer is good.
    """

    slot: int
    miss: str
    reason: str
    empty: bool
    tag: np.void | None
    group: int = 0


def _read(slab: c_ext.SlabFile, buffer: memoryview, offset: int) -> bool:
    """Reads at `offset`. Returns whether `buffer` was filled."""
    return os.preadv(slab.fd, [buffer], offset) == len(buffer)


def _age(report: SlotReport) -> int:
    """The sort key for reports on one slot: first no trailer, then damaged trailers, then good trailers from the oldest
    to the newest page.
    """
    if report.tag is not None:
        return 1 + int(report.tag["generation"])
    return 0 if report.empty else 1


class SlotReader:
    """Reads and checks slots of one slab; not thread-safe.

    Args:
        codecs: codecs of the KV groups that use the slab.
        data: whether to verify the bytes of every run, too, and not only the trailer. If so, a slot that cannot be read
            is reported and raises no error, so that the rest of a failing disk is checked, too.
    """

    def __init__(
        self, slab: c_ext.SlabFile, slab_id: int, codecs: Sequence[c_ext.PageCodec], data: bool
    ) -> None:
        self._slab, self._slab_id, self._codecs, self._data = slab, slab_id, codecs, data
        image_bytes = max(codec.image_bytes for codec in codecs)
        self._image = mmap.mmap(-1, image_bytes)  # aligned to memory pages, for direct I/O
        if data:
            self._parts = {(0, image_bytes)}
        else:
            self._parts = {(codec.trailer_offset, codec.image_bytes) for codec in codecs}

    def read(self, slot: int) -> SlotReport:
        """Returns a report on the page that was last written to the slot. If the page before it belonged to another
        group and had a larger image, that page's trailer may be intact, too; so the newest good trailer counts.

        Raises:
            OSError: the disk cannot be read; only without `data`.
        """
        view = memoryview(self._image)
        for first, end in self._parts:
            try:
                if not _read(self._slab, view[first:end], self._slab.offset(slot) + first):
                    return SlotReport(slot, "short", "the file ends before the slot does", False, None)
            except OSError as error:
                if not self._data:
                    raise
                return SlotReport(slot, "io", f"cannot be read: {error.strerror}", False, None)
        latest = max((self._trailer(codec, slot) for codec in self._codecs), key=_age)
        if latest.tag is None or not self._data:
            return latest
        codec = next(codec for codec in self._codecs if codec.group == latest.group)
        miss, reason = codec.check(view[: codec.image_bytes], self._slab_id, slot, None, 0)
        return replace(latest, miss=miss, reason=reason)

    def _trailer(self, codec: c_ext.PageCodec, slot: int) -> SlotReport:
        image = memoryview(self._image)[: codec.image_bytes]
        head = image[codec.trailer_offset : codec.trailer_offset + codec.trailer_bytes]
        in_stripes = any(codec.trailer_offset < other.trailer_offset for other in self._codecs)
        if not any(head) or (in_stripes and bytes(head[: len(PAGE_MAGIC)]) != PAGE_MAGIC):
            return SlotReport(slot, "trailer", "never written", True, None)
        miss, reason = codec.check(image, self._slab_id, slot, None, 0, data=False)
        if miss != "none":
            return SlotReport(slot, miss, reason, False, None)
        return SlotReport(
            slot, miss, reason, False, np.frombuffer(codec.trailer(image)[2], TAG)[0], codec.group
        )


def read_slots(
    slab: c_ext.SlabFile, slab_id: int, codecs: Sequence[c_ext.PageCodec], slots: int, data: bool
) -> Iterator[SlotReport]:
    """Yields a report on every slot, in order.

    Args:
        codecs: codecs of the KV groups that use the slab.
        data: whether to verify the bytes of every run, too, and not only the trailer.

    Raises:
        OSError: the disk cannot be read.
    """

    def batch(first: int) -> list[SlotReport]:
        reader = SlotReader(slab, slab_id, codecs, data)
        return [reader.read(slot) for slot in range(first, min(slots, first + BATCH_SLOTS))]

    with ThreadPoolExecutor(THREADS, initializer=name_this_thread, initargs=("flexkv-scan",)) as pool:
        for reports in pool.map(batch, range(0, slots, BATCH_SLOTS)):
            yield from reports


Scanned = tuple[Rows, NDArray[np.uint32]]
"""Index rows made from the good pages of a slab, and the epoch of each."""


def rows_of(reports: Iterator[SlotReport], slots: int) -> Scanned:
    """Makes index rows from the reports on a slab's slots. For each key of a group, the newest generation wins."""
    rows, epochs = np.zeros(slots, ROW), np.zeros(slots, np.uint32)
    newest: dict[bytes, int] = {}
    now_ms = unix_now_ms()
    for report in reports:
        tag = report.tag
        if report.miss != "none" or tag is None:
            continue
        # The same key in two epochs means two blocks. The caller keeps the rows of one epoch only.
        key = tag["key"].tobytes() + tag["epoch"].tobytes() + report.group.to_bytes(4, "little")
        other = newest.get(key)
        if other is not None and rows["generation"][other] > tag["generation"]:
            continue
        if other is not None:
            rows[other] = np.zeros((), ROW)
        newest[key] = report.slot
        row = rows[report.slot]
        for name in ("key", "generation", "expiry", "tokens"):
            row[name] = tag[name]
        row["used"], row["group"] = now_ms, report.group
        epochs[report.slot] = tag["epoch"]
    return rows, epochs
