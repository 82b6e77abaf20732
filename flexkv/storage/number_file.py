"""Stores a number and its digest durably in a file beside the index."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from flexkv.errors import DiskError
from flexkv.storage.durable_line import line_digest, write_line
from flexkv.storage.private_files import open_at_once

MOST_BYTES = 64


class DamagedNumberError(DiskError):
    """The file does not contain a number with a matching digest."""


def write_number(path: Path, number: int) -> None:
    """Writes the number durably. After a power cut, the file contains either this number or the previous one.

    Raises:
        OSError: the file could not be written.
    """
    write_line(path, str(number))


def read_number(path: Path, most: int) -> int | None:
    """Returns the number that was written last; None if the file does not exist. A number without a digest is also
    accepted, if it is alone on its line.

    Raises:
        DamagedNumberError: the file does not contain a number up to `most`, or the digest does not match.
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
    """Returns the number that `read` finds in a folder; None if the file is missing or damaged. If it is damaged,
    passes a description of the damage to `damaged`.
    """
    try:
        return read(folder)
    except DamagedNumberError as error:
        damaged(str(error))
        return None
