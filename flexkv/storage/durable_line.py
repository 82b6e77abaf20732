"""Keeps a line of text with its digest in a file of its own, durable before anything relies on it."""

from __future__ import annotations

import os
from pathlib import Path

from flexkv import c_ext
from flexkv.storage.folder import sync_folder
from flexkv.storage.private_files import open_private


def write_line(path: Path, text: str) -> None:
    """Writes the text and its digest durably. A power cut leaves this line or the one before.

    Raises:
        OSError: it could not be written.
    """
    new = path.with_name(f"{path.name}.new")
    fd = open_private(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        os.write(fd, f"{text} {line_digest(text)}\n".encode())
        os.fsync(fd)
    finally:
        os.close(fd)
    os.replace(new, path)
    sync_folder(path.parent)


def line_digest(text: str) -> str:
    """The digest that follows the text, 16 hex digits."""
    return f"{c_ext.run_digest(text.encode()):016x}"
