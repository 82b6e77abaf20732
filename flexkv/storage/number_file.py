"""Keeps a number with its digest in a file of its own, apart from the index, durable before anything relies on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from flexkv.errors import DiskError
from flexkv.storage.durable_line import line_digest, write_line
from flexkv.storage.private_files import open_at_once

MOST_BYTES = 64


class DamagedNumberError(DiskError):
    """The file does not hold a number as it was written."""


def write_number(path: Path, number: int) -> None:
    """Writes the number durably. A power cut leaves this number or the one before.

    Raises:
        OSError: it could not be written.
    """
    write_line(path, str(number))


def read_number(path: Path, most: int) -> int | None:
    """The number written last, or None if there is no such file. Also accepts a number alone on a line, without a
    digest.

    Raises:
        DamagedNumberError: the file holds no number up to `most`, or its digest does not match.
        DiskError: the file cannot be read.
    """
    try:
        with open(path, "rb", opener=open_at_once) as file:
            text = (file.read(MOST_BYTES) or b"").decode("ascii", "replace")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DiskError(f"{path}: {error.strerror}") from error
    line, newline, rest = text.partition("\n")
    number, space, digest = line.partition(" ")
    is_number = number.isascii() and number.isdecimal() and len(number) <= len(str(most))
    whole = newline and not rest and is_number and int(number) <= most
    if not whole or (space and digest != line_digest(number)):
        raise DamagedNumberError(f"{path}: {text[:40]!r} is no number with its digest")
    return int(number)


def number_if_whole(
    read: Callable[[Path], int | None], folder: Path, damaged: Callable[[str], object]
) -> int | None:
    """The number that `read` finds in a folder; None if it is missing or damaged. Reports damage to `damaged`."""
    try:
        return read(folder)
    except DamagedNumberError as error:
        damaged(str(error))
        return None
