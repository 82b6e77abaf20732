"""Reads and writes the file with the epoch of the weights. Each folder has this file beside its index, so that the
epoch is still known if the index must be rebuilt.
"""

from __future__ import annotations

from pathlib import Path

from flexkv.storage.number_file import read_number, write_number

EPOCH_NAME = "epoch"
MOST_EPOCH = (1 << 32) - 1
"""Trailers store the epoch in 32 bits."""


def write_epoch(folder: Path, epoch: int) -> None:
    """Makes the epoch durable. Raises OSError if it could not be written."""
    write_number(folder / EPOCH_NAME, epoch)


def read_epoch(folder: Path) -> int | None:
    """Returns the epoch that was written last; None if the file does not exist. Raises what `read_number` raises.

    When the tier opens a folder without this file, it writes the file, even if the epoch is 0, before any page is
    stored. So if a folder has pages but no such file, the file was lost, and only the index still has the epoch.
    """
    return read_number(folder / EPOCH_NAME, MOST_EPOCH)


def after_all(epochs: int) -> int:
    """Returns the lowest even epoch above `epochs`, the highest epoch so far. The result is even, because a restart
    drops the pages of an odd epoch: only the process that stored them knew their weights.
    """
    return epochs + 2 - epochs % 2
