"""Writes a line of text and its digest durably to a file of its own."""

from __future__ import annotations

import os
from pathlib import Path

from flexkv import c_ext
from flexkv.storage.folder import sync_folder
from flexkv.storage.private_files import open_private


def write_line(path: Path, text: str) -> None:
    """Writes the text and its digest durably. After a power cut, the file contains either this line or the previous
    one.

    Raises:
        OSError: the file could not be written.
    """
    new = path.with_name(f"{path.name}.new")
    with os.fdopen(open_private(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
        file.write(f"{text} {line_digest(text)}\n".encode())
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)
    sync_folder(path.parent)


def line_digest(text: str) -> str:
    """The digest that follows the text in the file: 16 hex digits."""
    return f"{c_ext.run_digest(text.encode()):016x}"
