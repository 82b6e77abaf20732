"""Numbers that the control plane names things by."""

from __future__ import annotations

from typing import NewType

import numpy as np
from numpy.typing import NDArray

TierId = NewType("TierId", int)
"""Place of a tier in the order in which a lookup asks them."""

HUB = TierId(0)
"""Host memory, which every other tier reads into and is written from."""

EntryIds = NDArray[np.uint32]
"""Entries of a tier's native block index, each pinned once for every lease or op that names it."""

NO_ENTRIES: EntryIds = np.empty(0, np.uint32)

NO_ENTRY = np.uint32(0xFFFFFFFF)
"""In place of an entry: the index does not know the key."""
