"""Creates, checks and sizes the slabs of a unit's folder."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from flexkv import c_ext
from flexkv.errors import DiskError
from flexkv.observe import unix_now_s
from flexkv.storage.base import DiskGroup, DiskIdentity
from flexkv.storage.folder import native_path, slab_name
from flexkv.storage.header import (
    DamagedHeaderError,
    SlabHeader,
    pack_header,
    parse_header,
    slab_format,
    slot_bytes,
)
from flexkv.storage.header_copy import FoundHeader, find_header, mend_header, write_copy
from flexkv.storage.private_files import open_private
from flexkv.storage.sharing import groups_of_slab

logger = logging.getLogger(__name__)


def open_slab(
    folder: Path,
    number: int,
    groups: Sequence[DiskGroup],
    identity: DiskIdentity,
    slots: int,
    epoch: int,
    lock_fd: int,
    preallocate: bool,
) -> tuple[c_ext.SlabFile, SlabHeader, bool]:
    """Opens or creates the slab with number `number`, and gives it `slots` slots. Returns the slab, its header, and
    whether it was created.

    Restores a damaged header from its copy. If header and copy are both damaged, replaces the slab, because it is
    unknown whose pages it holds.

    Raises:
        DiskError: the file is a slab of another model, group, format or version, the disk is full, or the system
            returns an error.
    """
    path = folder / slab_name(number)
    try:
        found = _existing(path)
        made = found is None
        if found is None:
            header = _make(path, number, groups, identity, epoch)
        else:
            header = found.header
            _require_same(path, header, number, groups, identity)
            mend_header(path, found)
        _resize(path, header, slots, preallocate)
    except OSError as error:
        if isinstance(error, DiskError):
            raise
        raise DiskError(f"{path}: {error.strerror}") from error
    slab = c_ext.SlabFile(
        native_path(path), header.header_bytes, header.slot_bytes, slots, header.slab_id, lock_fd
    )
    if not slab.direct:
        logger.warning("%s: %s: pages go through the page cache", path, slab.buffered_because)
    return slab, header, made


def _existing(path: Path) -> FoundHeader | None:
    if not path.exists():
        return None
    try:
        return find_header(path)
    except DamagedHeaderError as error:
        logger.error("%s: its pages are lost, the slab is made anew", error)
        path.unlink()
        return None


def _make(
    path: Path, number: int, groups: Sequence[DiskGroup], identity: DiskIdentity, epoch: int
) -> SlabHeader:
    raw = pack_header(
        groups,
        number,
        secrets.randbits(64),
        unix_now_s(),
        epoch,
        identity.fingerprint,
        identity.model,
        identity.unit,
    )
    # The file has a temporary name until its header is complete, so that a file with the slab's name always has a
    # header.
    new = path.with_suffix(".new")
    fd = open_private(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        if os.pwrite(fd, raw, 0) != len(raw):
            raise DiskError(f"{new}: the header was not written whole")
        os.fsync(fd)
    finally:
        os.close(fd)
    os.replace(new, path)
    write_copy(path, raw)
    return parse_header(raw, str(path))[0]


def _require_same(
    path: Path, header: SlabHeader, number: int, groups: Sequence[DiskGroup], identity: DiskIdentity
) -> None:
    if header.fingerprint != identity.fingerprint:
        raise DiskError(
            f"{path} holds another model's pages ({header.model!r}, {header.fingerprint.hex()[:16]}): it is left alone"
        )
    if header.group != number:
        raise DiskError(
            f"{path} is a copy of the slab of group {header.group}, expected that of group {number}: it is left alone; "
            "remove it"
        )
    image = slot_bytes(groups_of_slab(groups, number))
    if header.format != slab_format(groups, number) or header.slot_bytes != image:
        raise DiskError(f"{path} holds pages in another format ({header.format_id}): it is left alone")


def _resize(path: Path, header: SlabHeader, slots: int, preallocate: bool) -> None:
    size = header.header_bytes + slots * header.slot_bytes
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        had = os.fstat(fd)
        if had.st_size != size:
            os.ftruncate(fd, size)
        if preallocate and had.st_blocks * 512 < size:
            try:
                os.posix_fallocate(fd, 0, size)
            except OSError as error:
                os.ftruncate(fd, had.st_size)
                free = os.statvfs(path.parent)
                raise DiskError(
                    f"{path}: {size} bytes for {slots} slots: {error.strerror}; "
                    f"{free.f_bavail * free.f_frsize} are free"
                ) from error
        os.fsync(fd)
    finally:
        os.close(fd)
