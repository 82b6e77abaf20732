"""Checks a unit's folder slot by slot, and can repair its index or rebuild it from the pages found."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from flexkv import c_ext
from flexkv.errors import DiskError
from flexkv.storage.base import DiskGroup
from flexkv.storage.epoch import EPOCH_NAME, after_all, read_epoch, write_epoch
from flexkv.storage.folder import (
    LOCK_NAME,
    LOOKED_AFTER_IN_USE,
    FolderLock,
    folder_at_rest,
    is_read_only,
    native_path,
    slab_name,
)
from flexkv.storage.generations import OPENS_NAME, opens_of, opens_so_far, read_opens, write_opens
from flexkv.storage.group_tables import codec_of
from flexkv.storage.header import DamagedHeaderError, SlabHeader
from flexkv.storage.header_copy import COPY_SUFFIX, find_header, mend_header
from flexkv.storage.index import SlotIndex
from flexkv.storage.index_copy import copy_files
from flexkv.storage.index_database import INDEX_NAME, odd_file, set_aside_index
from flexkv.storage.index_trouble import UnusableIndexError
from flexkv.storage.number_file import number_if_whole
from flexkv.storage.scan import SlotReport, read_slots, rows_of
from flexkv.storage.slot_rows import Rows
from flexkv.storage.weights_name import WEIGHTS_NAME, read_weights

WRITTEN_BACK = "the next start, or --repair, writes it anew"

MOST_NAMED = 20
"""Maximum number of problems of one kind that a printed report lists. The report only counts the rest."""


@dataclass(slots=True)
class GroupReport:
    """The report on one KV group whose pages a slab holds.

    Attributes:
        rule: which of the group's pages a hit needs, with the reach of a window or a chunk.
        good: number of complete pages that the index lists.
    """

    group: int
    rule: str
    format_id: str
    good: int = 0


@dataclass(slots=True)
class SlabReport:
    """The report on one slab.

    Attributes:
        good: number of complete pages that the index lists.
        slots: number of slots in the file.
        empty: number of slots without a trailer.
        stale: number of complete pages that no lookup finds, because they are of an older epoch, or the index lists a
            different page for the slot.
        orphans: slots with complete pages of the current epoch that the index does not list. Either the page was
            evicted, or a crash came before it was published; nothing on disk tells which.
        damaged: slots whose content is neither empty nor a complete page, and why.
        missing: slots that do not hold the page that the index lists for them, including slots beyond the slab's end.
            Loads of such pages miss.
        groups: a report on each KV group whose pages the slab holds.
    """

    path: Path
    model: str
    slots: int = 0
    good: int = 0
    empty: int = 0
    stale: int = 0
    orphans: list[int] = field(default_factory=list)
    damaged: list[tuple[int, str]] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)
    groups: list[GroupReport] = field(default_factory=list)


@dataclass(slots=True)
class FsckReport:
    """The result of `check_folder`.

    Attributes:
        problems: all problems except damaged and missing slots, as text.
        index_faults: those of `problems` that SQLite reports for an index that can still be read.
    """

    folder: Path
    slabs: list[SlabReport] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    index_faults: list[str] = field(default_factory=list)
    repaired: bool = False

    @property
    def clean(self) -> bool:
        """Whether nothing is damaged and the index lists only pages that are there. Orphaned, stale and empty slots are
        normal.
        """
        return not self.problems and not any(slab.damaged or slab.missing for slab in self.slabs)


def check_folder(folder: Path, repair: bool = False) -> FsckReport:
    """Reads and verifies every slot of every slab in `folder`, and compares the slots with the index.

    Args:
        repair: whether to correct headers and index. An undamaged index only loses the rows of missing pages, so
            evicted pages stay evicted. A missing or damaged index is rebuilt from all complete pages of the current
            epoch; of several pages with one key, the newest wins. Damaged slots become empty.

    Raises:
        FolderLockedError: the folder is in use.
        DiskError: the folder cannot be read, or `repair` is set and its file system is read-only.
    """
    try:
        if is_read_only(folder):
            return _check_read_only(folder, repair)
        lock = FolderLock(folder, LOOKED_AFTER_IN_USE)
        try:
            return _check(folder, folder / INDEX_NAME, repair)
        finally:
            lock.release()
    except OSError as error:
        if isinstance(error, DiskError):
            raise
        raise DiskError(f"{folder}: {error}") from error


def _check_read_only(folder: Path, repair: bool) -> FsckReport:
    """Checks a folder that cannot be written, for example because the system has mounted a failing disk read-only.
    Reads a copy of the index, because SQLite writes to a database that it opens.
    """
    if repair:
        raise DiskError(f"{folder}: the file system is read-only: nothing can be repaired")
    index = folder / INDEX_NAME
    # Without a lock file no unit uses the folder, and none can start on a file system that it cannot write.
    at_rest = folder_at_rest(folder) if (folder / LOCK_NAME).exists() else nullcontext()
    with at_rest, tempfile.TemporaryDirectory(prefix="flexkv-index-") as made:
        copy = Path(made) / INDEX_NAME
        try:
            fault = odd_file(index)
            copy_files(folder, Path(made))
        except OSError as error:
            where = tempfile.gettempdir()
            fault = f"cannot be copied to {where}, so no page is compared with it: {error.strerror}"
            copy.unlink(missing_ok=True)
        report = _check(folder, copy, repair=False)
        for words in (report.problems, report.index_faults):
            words[:] = [text.replace(made, str(folder)) for text in words]
        if fault:
            report.problems = [text for text in report.problems if text != f"{index} is missing"]
            report.problems.append(f"{index}: {fault}")
        return report


def _check(folder: Path, index_path: Path, repair: bool) -> FsckReport:
    report = FsckReport(folder)
    found: dict[int, tuple[SlabHeader, list[SlotReport]]] = {}
    groups: dict[int, Mapping[int, DiskGroup]] = {}
    for path in sorted(folder.glob("group*.slab")):
        try:
            whole = find_header(path)
        except DamagedHeaderError as error:
            report.problems.append(f"{error}: nothing says whose pages it holds; the next start replaces it")
            continue
        header = whole.header
        if path.name != slab_name(header.group):
            report.problems.append(f"{path} is the slab of group {header.group}: it is not looked at")
            continue
        if whole.slab_fault:
            report.problems.append(f"{whole.slab_fault}; its copy is whole: {WRITTEN_BACK}")
        if whole.copy_fault:
            report.problems.append(f"{whole.copy_fault}; the slab's own is whole: {WRITTEN_BACK}")
        if repair:
            mend_header(path, whole)
        slots = max(0, (path.stat().st_size - header.header_bytes) // header.slot_bytes)
        slab = c_ext.SlabFile(
            native_path(path), header.header_bytes, header.slot_bytes, slots, header.slab_id, read_only=True
        )
        codecs = [codec_of(group, number) for number, group in whole.groups.items()]
        reports = list(read_slots(slab, header.slab_id, codecs, slots, data=True))
        found[header.group] = (header, reports)
        groups[header.group] = whole.groups
        report.slabs.append(
            SlabReport(
                path,
                header.model,
                slots,
                groups=[
                    GroupReport(number, group.rule_text, group.format_id)
                    for number, group in whole.groups.items()
                ],
            )
        )
    if (folder / WEIGHTS_NAME).exists() and read_weights(folder) is None:
        report.problems.append(
            f"{folder / WEIGHTS_NAME}: no name of weights with its digest: pages whose weights only this file names "
            "are misses from the next start on, which writes it anew"
        )
    report.problems += [
        f"{gone} is missing: its pages are lost; the next start makes it anew"
        for copy in sorted(folder.glob(f"group*{COPY_SUFFIX}"))
        if not (gone := copy.with_suffix(".slab")).exists()
    ]
    if not found:
        return report
    numbers = range(max(found) + 1)
    slots_of = [len(found[g][1]) if g in found else 0 for g in numbers]
    slab_ids = [found[g][0].slab_id if g in found else 0 for g in numbers]
    index = _open_index(index_path, slots_of, report, repair)
    try:
        if index is not None:
            report.problems += [
                f"{folder / slab_name(group)} is another slab than the one whose pages the index lists"
                for group in index.adopt(slab_ids)
                if group in found
            ]
            if index.is_new and any(r.tag is not None for _, reports in found.values() for r in reports):
                report.problems.append(f"{folder / INDEX_NAME} is empty, but slabs have pages")
        epoch, opens = _numbers(folder, index, found, report)
        for slab_report, (header, reports) in zip(report.slabs, found.values(), strict=True):
            rows = index.rows[header.group] if index is not None else None
            _compare(slab_report, reports, rows, epoch)
            if index is not None:
                slab_report.missing += sorted(index.beyond[header.group])
        if repair and index is not None and not index.is_new:
            index.opens = opens_so_far(opens, [index.opens])
            _forget_missing(index, report, list(found), epoch)
        elif repair:
            if index is None:
                index = SlotIndex(index_path, slots_of)
                index.adopt(slab_ids)
            _rewrite(index, found, epoch, opens)
        if repair and index is not None:
            write_epoch(folder, epoch)
            write_opens(folder, index.opens)
            for slab_report, (header, _) in zip(report.slabs, found.values(), strict=True):
                _empty_damaged(slab_report, header, groups[header.group])
            report.repaired = True
    finally:
        if index is not None:
            index.close()
    return report


def _open_index(path: Path, slots: list[int], report: FsckReport, repair: bool) -> SlotIndex | None:
    """Opens the index. Returns None if it is missing or unusable. With `repair`, sets the files of an unusable index
    aside.
    """
    if not path.exists():
        report.problems.append(f"{path} is missing")
        return None
    try:
        index = SlotIndex(path, slots)
    except UnusableIndexError as error:
        report.problems.append(str(error))
        if repair:
            set_aside_index(path, error.aside_name)
        return None
    report.index_faults = index.faults()
    report.problems += [f"{path}: {fault}" for fault in report.index_faults]
    return index


def _numbers(
    folder: Path,
    index: SlotIndex | None,
    found: dict[int, tuple[SlabHeader, list[SlotReport]]],
    report: FsckReport,
) -> tuple[int, int | None]:
    """Returns the current epoch, and the recorded count of openings (None if its file is missing or damaged).

    The epoch is the higher one of the epochs in the file `epoch` and in the index. Without an index, it is the highest
    epoch in the file and in any page. If there is neither an index nor an epoch in the file, the epoch is the next even
    number after the highest epoch in any page.
    """
    no_index = index is None or index.is_new
    pages = [int(r.tag["epoch"]) for _, reports in found.values() for r in reports if r.tag is not None]
    written_epoch = number_if_whole(read_epoch, folder, report.problems.append)
    opens = number_if_whole(read_opens, folder, report.problems.append)
    # If there are neither pages nor an index, a crash may have ended the first opening before it wrote the files
    # `epoch` and `opens`.
    if pages or not no_index:
        report.problems += [
            f"{folder / name} is missing: {WRITTEN_BACK}"
            for name in (EPOCH_NAME, OPENS_NAME)
            if not (folder / name).exists()
        ]
    epoch = max(written_epoch or 0, index.epoch if index is not None else 0)
    if not no_index or not pages:
        return epoch, opens
    epoch = max(epoch, max(pages))
    return after_all(epoch) if written_epoch is None else epoch, opens


def _compare(report: SlabReport, reports: list[SlotReport], rows: Rows | None, epoch: int) -> None:
    of_group = {group.group: group for group in report.groups}
    for slot in reports:
        row = rows[slot.slot] if rows is not None and rows["generation"][slot.slot] else None
        whole = slot.miss == "none" and slot.tag is not None
        named = (
            whole
            and row is not None
            and slot.tag is not None
            and row["generation"] == slot.tag["generation"]
            and bytes(row["key"]) == bytes(slot.tag["key"])
            and row["group"] == slot.group
            and int(slot.tag["epoch"]) == epoch
        )
        if named:
            report.good += 1
            of_group[slot.group].good += 1
        elif row is not None:
            report.missing.append(slot.slot)
        if named:
            continue
        if slot.empty:
            report.empty += 1
        elif not whole:
            report.damaged.append((slot.slot, slot.reason))
        elif row is None and slot.tag is not None and int(slot.tag["epoch"]) == epoch:
            report.orphans.append(slot.slot)
        else:
            report.stale += 1


def _forget_missing(index: SlotIndex, report: FsckReport, groups: Sequence[int], epoch: int) -> None:
    if report.index_faults:
        index.remake()
    if index.epoch != epoch:
        index.clear()
    for group, slab in zip(groups, report.slabs, strict=True):
        slots = np.array([slot for slot in slab.missing if slot < slab.slots], np.int64)
        index.evict(group, slots, index.rows[group]["generation"][slots])
    index.epoch = epoch
    index.commit()


def _empty_damaged(report: SlabReport, header: SlabHeader, groups: Mapping[int, DiskGroup]) -> None:
    """Empties the slab's damaged slots. Precondition: the index is durable and lists no page in them any more."""
    codecs = [codec_of(group) for group in groups.values()]
    with report.path.open("r+b") as slab:
        end = os.fstat(slab.fileno()).st_size
        for (slot, _), codec in itertools.product(report.damaged, codecs):
            at = header.header_bytes + slot * header.slot_bytes + codec.trailer_offset
            if at + codec.trailer_bytes <= end:
                slab.seek(at)
                slab.write(bytes(codec.trailer_bytes))
        slab.flush()
        os.fsync(slab.fileno())


def _rewrite(
    index: SlotIndex,
    found: dict[int, tuple[SlabHeader, list[SlotReport]]],
    epoch: int,
    written_opens: int | None,
) -> None:
    used = [rows["used"].copy() for rows in index.rows]
    index.clear()
    counts = []
    for group, (_, reports) in found.items():
        rows, epochs = rows_of(iter(reports), len(reports))
        counts.append(opens_of(rows["generation"]))
        good = np.flatnonzero((rows["generation"] != 0) & (epochs == epoch))
        rows["used"] = np.where(used[group][: len(rows)] != 0, used[group][: len(rows)], rows["used"])
        index.restore(group, good, rows[good])
    index.opens, index.epoch = opens_so_far(written_opens, counts), epoch
    index.commit()
