"""The epoch of the weights as a folder keeps it, apart from its index: so that no rebuilt index goes back behind it."""

from __future__ import annotations

from pathlib import Path

from flexkv.storage.number_file import read_number, write_number

EPOCH_NAME = "epoch"
MOST_EPOCH = (1 << 32) - 1
"""Trailers have 32 bits for it."""


def write_epoch(folder: Path, epoch: int) -> None:
    """Raises: OSError: it could not be written."""
    write_number(folder / EPOCH_NAME, epoch)


def read_epoch(folder: Path) -> int | None:
    """The last epoch written, None if there is none; raises as `read_number`.

    An opening that finds none writes it, also 0, before a page is written. So a folder with pages and without it has
    lost it, and nothing but the index knows of which weights the pages are.
    """
    return read_number(folder / EPOCH_NAME, MOST_EPOCH)


def after_all(epochs: int) -> int:
    """An epoch after these, the highest of which is `epochs`, of which a restart keeps its pages: an even one."""
    return epochs + 2 - epochs % 2
