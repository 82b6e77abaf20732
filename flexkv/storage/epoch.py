"""The epoch of the weights, which a folder keeps apart from its index, so that no rebuilt index falls behind it."""

from __future__ import annotations

from pathlib import Path

from flexkv.storage.number_file import read_number, write_number

EPOCH_NAME = "epoch"
MOST_EPOCH = (1 << 32) - 1
"""Trailers have 32 bits for it."""


def write_epoch(folder: Path, epoch: int) -> None:
    """Makes the epoch durable. Raises OSError if it could not be written."""
    write_number(folder / EPOCH_NAME, epoch)


def read_epoch(folder: Path) -> int | None:
    """The last epoch written, None if there is none; raises as `read_number`.

    An opening that finds no epoch writes one, even 0, before it writes a page. So a folder with pages but no epoch has
    lost the file, and only the index knows the pages' epoch.
    """
    return read_number(folder / EPOCH_NAME, MOST_EPOCH)


def after_all(epochs: int) -> int:
    """Returns an even epoch higher than all of `epochs`: even, because a restart keeps the pages of even epochs."""
    return epochs + 2 - epochs % 2
