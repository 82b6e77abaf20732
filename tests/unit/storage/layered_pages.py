"""Helpers that read pages of many layers from disk, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from flexkv.storage.tags import make_tags
from flexkv.transfer.base import Ticket
from flexkv.transfer.graph import OpId, OpKind, Priority, TransferGraph, TransferOp
from tests.unit.storage.disk_world import BLOCK_TOKENS, DiskWorld, ids, keys_of

LAYERS = 32
"""Number of layers of a page. A layerwise read reads them in four ranges: layers 0 to 1, 2 to 5, 6 to 13 and 14 to 31.
"""
PAGES = 4
READ = OpId(900)


def begin_read(
    world: DiskWorld, slots: Sequence[int], generations: NDArray[np.uint64], layerwise: bool = True
) -> Ticket:
    """Submits op READ, which reads blocks 0 to PAGES - 1 into `slots`. Block n is in disk slot n."""
    tags = make_tags(keys_of(range(PAGES)), 0, generations, BLOCK_TOKENS)
    places = ids(range(PAGES))
    op = TransferOp(READ, OpKind.DISK_READ, 0, Priority.LOAD, ids([]), ids(slots), layerwise, places, tags)
    ticket = world.engine.submit(TransferGraph((op,)))
    assert ticket is not None
    return ticket
