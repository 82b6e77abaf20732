"""One disk of a unit: its folder's lock, its slabs and its index, opened together."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from flexkv import c_ext
from flexkv.errors import CapacityError, DiskError
from flexkv.storage.base import DiskGroup, DiskIdentity, DiskOptions
from flexkv.storage.epoch import after_all, read_epoch, write_epoch
from flexkv.storage.folder import FolderLock, slab_name, sync_folder, unit_folder
from flexkv.storage.generations import opens_of, opens_so_far, read_opens
from flexkv.storage.group_tables import codec_of
from flexkv.storage.header import slot_bytes_of_all
from flexkv.storage.header_copy import find_header
from flexkv.storage.index import SlotIndex
from flexkv.storage.index_database import INDEX_NAME, set_aside_index
from flexkv.storage.index_trouble import OtherVersionError, UnusableIndexError
from flexkv.storage.number_file import number_if_whole
from flexkv.storage.other_keys import name_other_keys
from flexkv.storage.private_files import keep_private
from flexkv.storage.scan import Scanned, read_slots, rows_of
from flexkv.storage.sharing import groups_of_slab, slab_numbers
from flexkv.storage.slabs import open_slab
from flexkv.storage.slot_rows import ROW
from flexkv.storage.spare import free_spare, take_spare

logger = logging.getLogger(__name__)

COPIES_OF_ROWS = 2
"""Number of copies of each slot's index row in memory while a disk is opened: one in the index, one in the tier.
"""


def slots_of(groups: Sequence[DiskGroup], bytes_per_disk: int) -> int:
    """Returns the number of slots of each slab on one disk.

    Raises:
        CapacityError: `bytes_per_disk` does not hold one slot of each slab, or the index does not fit into memory.
    """
    slabs = set(slab_numbers(groups))
    image = slot_bytes_of_all(groups)
    slots = bytes_per_disk // image
    if slots < 1:
        raise CapacityError(f"{bytes_per_disk} bytes of disk hold no slot of {image} bytes; give it more")
    slots = min(slots, (1 << 31) - 1)
    require_memory(slots, len(slabs), bytes_per_disk)
    return slots


def require_memory(slots: int, slabs: int, bytes_per_disk: int) -> None:
    """Checks that the index rows of a disk's slots fit into memory.

    Raises:
        CapacityError: the index rows of `slots` slots in each of `slabs` slabs do not fit into the available memory.
    """
    needed = COPIES_OF_ROWS * ROW.itemsize * slots * slabs
    available, limit = c_ext.available_memory()
    if needed > available:
        raise CapacityError(
            f"{bytes_per_disk} bytes of disk have {slots} slots a slab: their index takes {needed} bytes of memory, "
            f"and {limit} allows {available}; give the tier less disk, or pages that are larger"
        )


def _name_others(folder: Path) -> None:
    """If `folder` is new, logs which other folders hold pages of the same model and unit in another format or with
    other KV groups. Lookups do not find those pages.

    Raises:
        OSError: the folders cannot be listed.
    """
    if (folder / slab_name(0)).exists():
        return
    fingerprint = folder.parent.name.split("-")[-2]
    for slab in sorted(folder.parent.parent.glob(f"*-{fingerprint}-*/{folder.name}/{slab_name(0)}")):
        try:
            found = find_header(slab)
            rules = ", ".join(group.rule_text for group in found.groups.values())
            what = (
                f"version {found.header.version}, {found.header.format_id}, rules of its KV groups: {rules}"
            )
        except DiskError as error:
            what = str(error)
        logger.info(
            "%s is begun: the pages in %s are of another format or of other KV groups, and stay as they are (%s)",
            folder,
            slab.parent,
            what,
        )


class DiskVolume:
    """Opens a disk's lock, index and slabs, in this order. If one of them cannot be opened, closes those that are open.

    Attributes:
        slabs: the slab of each group; groups that share a slab have the same one.
        is_new: whether the unit had no slab in this folder before.

    Raises:
        FolderLockedError: the folder is in use.
        DiskError: the disk cannot be used.
        CapacityError: `bytes_per_disk` holds no slot, or the index does not fit into memory.
    """

    def __init__(
        self, root: Path, identity: DiskIdentity, groups: Sequence[DiskGroup], options: DiskOptions
    ) -> None:
        self.folder = unit_folder(root, identity, groups)
        self.slots = slots_of(groups, options.bytes_per_disk)
        with contextlib.suppress(OSError):  # both calls only log; FolderLock raises for an unreadable folder
            _name_others(self.folder)
            name_other_keys(self.folder)
        self._lock = FolderLock(self.folder)
        try:
            self._prepare_folder()
            self._numbers = slab_numbers(groups)
            self.index = self._open_index(
                [self.slots if slab == number else 0 for number, slab in enumerate(self._numbers)]
            )
            try:
                self._open_slabs(identity, groups, options)
            except BaseException:
                self.index.close()
                raise
        except BaseException:
            self._lock.release()
            raise

    def _prepare_folder(self) -> None:
        """Removes unfinished files that an earlier process left under temporary names, and frees the disk space that is
        reserved for the index.
        """
        try:
            for path in self.folder.glob("*.new"):
                path.unlink()
            free_spare(self.folder)
            for folder in (self.folder.parent, self.folder):
                keep_private(folder)
        except OSError as error:
            raise DiskError(f"{error.filename}: {error.strerror}") from error

    def _open_index(self, slots: Sequence[int]) -> SlotIndex:
        path = self.folder / INDEX_NAME
        try:
            return SlotIndex(path, slots)
        except UnusableIndexError as error:
            level = logging.INFO if isinstance(error, OtherVersionError) else logging.ERROR
            logger.log(level, "%s: it is set aside and made anew from the slabs", error)
            set_aside_index(path, error.aside_name)
        return SlotIndex(path, slots)

    def _open_slabs(self, identity: DiskIdentity, groups: Sequence[DiskGroup], options: DiskOptions) -> None:
        written_epoch, written_opens = self._read_number(read_epoch), self._read_number(read_opens)
        epoch = max(self.index.epoch, written_epoch or 0)
        slab_ids, some_kept = self._open_each_slab(identity, groups, options, epoch)
        self.is_new = not some_kept
        rebuild = self.index.is_new and some_kept
        found = self._scan(groups, slab_ids) if rebuild else {}
        self._settle_epoch(written_epoch, found)
        if rebuild or not self.index.is_new:
            counts = [self.index.opens, *(opens_of(rows["generation"]) for rows, _ in found.values())]
            self.index.opens = opens_so_far(written_opens, counts)
        else:
            self.index.opens = written_opens or 0
        self._restore(found)
        self.index.adopt(slab_ids)
        try:
            if written_epoch is None:
                write_epoch(self.folder, self.index.epoch)
            sync_folder(self.folder)
            sync_folder(self.folder.parent)
        except OSError as error:
            raise DiskError(f"{self.folder}: {error.strerror}") from error

    def _read_number(self, read: Callable[[Path], int | None]) -> int | None:
        return number_if_whole(read, self.folder, lambda fault: logger.error("%s: the index decides", fault))

    def _open_each_slab(
        self, identity: DiskIdentity, groups: Sequence[DiskGroup], options: DiskOptions, epoch: int
    ) -> tuple[list[int], bool]:
        """Opens the slabs. Returns the slab id of each group (0 for a group that uses an earlier group's slab), and
        whether any of the slabs existed before.
        """
        self.slabs: list[c_ext.SlabFile] = []
        slab_ids, some_kept = [], False
        for number, slab_number in enumerate(self._numbers):
            if slab_number != number:
                self.slabs.append(self.slabs[slab_number])
                slab_ids.append(0)
                continue
            slab, header, made = open_slab(
                self.folder,
                number,
                groups,
                identity,
                self.slots,
                epoch,
                self._lock.fd,
                options.preallocate,
            )
            self.slabs.append(slab)
            slab_ids.append(header.slab_id)
            some_kept |= not made
        return slab_ids, some_kept

    def _scan(self, groups: Sequence[DiskGroup], slab_ids: Sequence[int]) -> dict[int, Scanned]:
        """Reads the trailer of every slot. Returns the index rows of each slab, by the slab's number."""
        found = {}
        try:
            for number in sorted(set(self._numbers)):
                codecs = [codec_of(group, n) for n, group in groups_of_slab(groups, number).items()]
                reports = read_slots(self.slabs[number], slab_ids[number], codecs, self.slots, data=False)
                found[number] = rows_of(reports, self.slots)
        except OSError as error:
            raise DiskError(f"{self.folder}: reading the slabs: {error}") from error
        return found

    def _settle_epoch(self, written: int | None, found: Mapping[int, Scanned]) -> None:
        """Sets the index's epoch to the highest known epoch, or to a higher one if the epoch's file was lost. If the
        index's own epoch is lower, its rows are dropped.
        """
        epochs = (int(epochs.max(initial=0)) for _, epochs in found.values())
        epoch = max([self.index.epoch, written or 0, *epochs])
        # When a folder is opened, the epoch's file is written before any page is stored. So if there are pages, the
        # file was lost.
        if written is None and any(rows["generation"].any() for rows, _ in found.values()):
            epoch = after_all(epoch)  # a lost file may have had a higher epoch
        if self.index.epoch < epoch:
            self.index.clear()
            self.index.epoch = epoch

    def _restore(self, found: Mapping[int, Scanned]) -> None:
        for slab, (rows, epochs) in found.items():
            good = np.flatnonzero((rows["generation"] != 0) & (epochs == self.index.epoch))
            self.index.restore(slab, good, rows[good])
            numbers, counts = np.unique(rows["group"][good], return_counts=True)
            for number, count in zip(numbers.tolist() or [slab], counts.tolist() or [0], strict=True):
                logger.warning("%s: %d pages of group %d found again", self.folder, count, number)

    def begin_use(self, opens: int, epoch: int) -> None:
        """Begins to use the index (`SlotIndex.begin_use`), and reserves disk space for the index's next opening."""
        self.index.begin_use(opens, epoch)
        take_spare(self.folder)

    def release(self) -> None:
        """Drops the slabs and releases the lock. While a lane still has the slabs, the folder stays locked.
        Idempotent.
        """
        if self._lock.fd >= 0:
            take_spare(self.folder)
        self.slabs = []
        self._lock.release()
