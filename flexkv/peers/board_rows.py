"""Reads the rows of a unit's own board: shared memory that lists the unit's pages for other units. A row says which
page a place (a slot on disk) holds.
"""

from __future__ import annotations

import mmap

import numpy as np
from numpy.typing import NDArray

from flexkv.c_ext import SlotBoard
from flexkv.errors import ContractError

ROWS_AT = 4096 + (1 << 14) * 4
"""Offset in bytes of a board's first row. The board's header and its ring, the list of changed slots, come before the
rows (see `board_parts` in csrc/share/slot_board.cpp).
"""

BOARD_MAGIC = 0x3130445242564B46
"""The number at the start of a board, which identifies its version (`kBoardMagic` in csrc/share/slot_board.h). In a
board of another version, rows may have a different layout.
"""

BOARD_ROW = np.dtype(
    [
        ("version", "<u8"),
        ("key", "u1", 16),
        ("about", "<u8"),
        ("generation", "<u8"),
        ("expiry", "<u8"),
        ("epoch", "<u8"),
        ("spare", "<u8"),
    ]
)
"""The layout of a board's row (`BoardRow` in csrc/share/slot_board.h). The field `version` is even while the row
identifies a page.
"""

PLACED = np.dtype(
    [
        ("key", "u1", 16),
        ("generation", "<u8"),
        ("expiry", "<u8"),
        ("tokens", "<u4"),
        ("place", "<u4"),
        ("group", "<u4"),
    ]
)
"""The layout of a row that `BoardRows` returns: a place (a slot on disk) and the page in it. If `tokens` is 0, the
place holds no page.
"""

PlacedRows = NDArray[np.void]
"""Pages with their places, dtype PLACED, shape [places]."""

NO_PAGE = 1
"""The version of a row that has never identified a page."""

TOKENS = np.uint64(0xFFFFFFFF)
GROUP_SHIFT = np.uint64(32)
"""The field `about` of a row is group << 32 | tokens."""


class BoardRows:
    """Reads the first `most` rows of a board of this process. A row that changes during the read counts as a row
    without a page, and the next call of `changes` reads it again. A row with mixed old and new content would only cost
    a miss, because each page on disk identifies itself in its trailer.

    Raises:
        ContractError: the board has another version.
    """

    def __init__(self, board: SlotBoard, most: int) -> None:
        memory = mmap.mmap(board.fd, board.bytes, mmap.MAP_SHARED, mmap.PROT_READ)
        if (magic := int.from_bytes(memory[:8], "little")) != BOARD_MAGIC:
            raise ContractError(f"a board with magic {magic:#x}; expected is {BOARD_MAGIC:#x}")
        self._rows = np.frombuffer(memory, BOARD_ROW, offset=ROWS_AT)[:most]
        self._seen = np.full(len(self._rows), NO_PAGE, np.uint64)

    def __len__(self) -> int:
        return len(self._rows)

    def changes(self) -> tuple[int, PlacedRows]:
        """Returns the epoch (the number of the weights) of the pages, and the rows of the places that have changed
        since the last call.
        """
        changed = np.flatnonzero(self._rows["version"] != self._seen)
        versions = self._rows["version"][changed]
        found = self._rows[changed]
        whole = (versions % 2 == 0) & (self._rows["version"][changed] == versions)
        self._seen[changed] = versions
        epoch = int(found["epoch"][whole].max(initial=0))
        whole &= found["epoch"] == epoch
        rows = np.zeros(len(changed), PLACED)
        rows["place"] = changed
        for name in ("key", "generation", "expiry"):
            rows[name][whole] = found[name][whole]
        rows["tokens"][whole] = (found["about"] & TOKENS)[whole]
        rows["group"][whole] = (found["about"] >> GROUP_SHIFT)[whole]
        return epoch, rows

    def everything(self) -> tuple[int, PlacedRows]:
        """Returns the epoch (the number of the weights) of the pages, and the rows of all places that hold a page."""
        self._seen[:] = NO_PAGE
        epoch, rows = self.changes()
        return epoch, rows[rows["tokens"] != 0]
