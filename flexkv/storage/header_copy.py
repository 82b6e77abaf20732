"""Keeps a copy of a slab's header in a file beside the slab, so that a flipped bit in the header loses no page."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flexkv.errors import DiskError
from flexkv.storage.base import DiskGroup
from flexkv.storage.folder import sync_folder
from flexkv.storage.header import DamagedHeaderError, SlabHeader, parse_header, raw_header
from flexkv.storage.private_files import open_private

logger = logging.getLogger(__name__)

COPY_SUFFIX = ".header"


@dataclass(frozen=True, slots=True)
class FoundHeader:
    """A slab's header, read from the slab or, if it is damaged there, from its copy.

    Attributes:
        groups: the slab's groups, by number.
        slab_fault: the fault of the slab's own header, as text; empty if it has none.
        copy_fault: the fault of the copy, as text; empty if the copy has none or does not exist.
        has_copy: whether an undamaged copy of the same header exists.
    """

    raw: bytes
    header: SlabHeader
    groups: Mapping[int, DiskGroup]
    slab_fault: str = ""
    copy_fault: str = ""
    has_copy: bool = False


def copy_path(slab: Path) -> Path:
    return slab.with_suffix(COPY_SUFFIX)


def find_header(slab: Path) -> FoundHeader:
    """Reads and verifies the header of the slab at `slab`, or its copy if the slab's own header is damaged.

    Raises:
        DamagedHeaderError: the slab's own header is damaged, and its copy does not help: the copy is damaged or
            missing, or the slab has no slots behind the header.
        DiskError: the header has another version or impossible content, or the file cannot be read.
    """
    copy, copy_fault = None, ""
    if copy_path(slab).exists():  # a slab without a copy is not damaged; the next start writes the copy
        try:
            copy = _whole(copy_path(slab))
        except DiskError as error:
            copy_fault = str(error)
    try:
        own = _whole(slab)
    except DamagedHeaderError as error:
        if copy is None or not _holds_slots(slab, len(copy.raw)):
            raise
        return FoundHeader(copy.raw, copy.header, copy.groups, str(error), copy_fault, True)
    if copy is not None and copy.raw != own.raw:
        copy_fault = f"{copy_path(slab)}: the copy of another slab's header"
    return FoundHeader(own.raw, own.header, own.groups, "", copy_fault, copy is not None and not copy_fault)


def mend_header(slab: Path, found: FoundHeader) -> None:
    """Repairs a slab's header and its copy, using the header that `find_header` found. Writes the slab's own header if
    it is damaged, and the copy if it is damaged or missing. If the copy cannot be written, only logs a warning.

    Raises:
        OSError: the slab's own header cannot be written.
    """
    if found.slab_fault:
        logger.warning("%s: the header is written back from its copy", found.slab_fault)
        _write(slab, os.O_WRONLY, found.raw)
    if found.has_copy:
        return
    try:
        write_copy(slab, found.raw)
    except OSError as error:
        logger.warning("%s: the header's copy could not be written: %s", copy_path(slab), error)


def write_copy(slab: Path, raw: bytes) -> None:
    """Writes the copy of a slab's header durably.

    Raises:
        OSError: the copy could not be written.
    """
    new = slab.with_name(f"{slab.stem}{COPY_SUFFIX}.new")
    _write(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, raw)
    os.replace(new, copy_path(slab))
    sync_folder(slab.parent)


def _whole(path: Path) -> FoundHeader:
    """Reads and verifies the header in one file, a slab or a copy.

    Raises:
        DamagedHeaderError, DiskError: see `find_header`.
    """
    raw = raw_header(str(path))
    header, groups = parse_header(raw, str(path))
    return FoundHeader(raw[: header.header_bytes], header, groups)


def _holds_slots(slab: Path, header_bytes: int) -> bool:
    status = slab.stat()
    return stat.S_ISREG(status.st_mode) and status.st_size > header_bytes


def _write(path: Path, flags: int, raw: bytes) -> None:
    fd = open_private(path, flags)
    try:
        if os.pwrite(fd, raw, 0) != len(raw):
            raise DiskError(f"{path}: the header was not written whole")
        os.fsync(fd)
    finally:
        os.close(fd)
