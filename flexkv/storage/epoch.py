"""The epoch of the weights as a folder keeps it, apart from its index."""

from __future__ import annotations

import os
from pathlib import Path

from flexkv import c_ext
from flexkv.errors import DiskError
from flexkv.storage.folder import sync_folder

EPOCH_NAME = "epoch"
MOST_EPOCH = (1 << 32) - 1
"""Trailers have 32 bits for it."""
EPOCH_DIGITS = len(str(MOST_EPOCH))


class DamagedEpochError(DiskError):
    """The file holds something else than was written."""


def write_epoch(folder: Path, epoch: int) -> None:
    """Writes the epoch down, durably, apart from the index: so that no rebuilt index goes back behind it.

    Raises:
        OSError: it could not be written.
    """
    new = folder / f"{EPOCH_NAME}.new"
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        os.write(fd, f"{epoch} {_digest(str(epoch))}\n".encode())
        os.fsync(fd)
    finally:
        os.close(fd)
    os.replace(new, folder / EPOCH_NAME)
    sync_folder(folder)


def read_epoch(folder: Path) -> int:
    """The last epoch written down, 0 if there is none. A number without a digest, on a line of its own, is one too.

    Raises:
        DamagedEpochError: what is there is no epoch, or does not match its digest.
        DiskError: it cannot be read.
    """
    path = folder / EPOCH_NAME
    try:
        text = path.read_bytes()[: 4 * EPOCH_DIGITS].decode("ascii", "replace")
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise DiskError(f"{path}: {error.strerror}") from error
    line, newline, rest = text.partition("\n")
    number, space, digest = line.partition(" ")
    is_number = number.isascii() and number.isdecimal() and len(number) <= EPOCH_DIGITS
    whole = newline and not rest and is_number and int(number) <= MOST_EPOCH
    if not whole or (space and digest != _digest(number)):
        raise DamagedEpochError(f"{path}: {text[:40]!r} is no epoch")
    return int(number)


def after_all(epochs: int) -> int:
    """An epoch after these, the highest of which is `epochs`, of which a restart keeps its pages: an even one."""
    return epochs + 2 - epochs % 2


def _digest(text: str) -> str:
    return f"{c_ext.run_digest(text.encode()):016x}"
