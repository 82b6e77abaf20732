"""Joins the index rows of all disks for one group, or for the groups that share slabs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from flexkv.storage.base import IndexRows
from flexkv.storage.slot_rows import ROW, Rows
from flexkv.storage.striping import places_of

TOGETHER_MS = 1000
"""Uses within the same interval of this many milliseconds count as simultaneous. The recorded times of one use differ
between disks, because each disk's journal sets the time when it processes the record.
"""


def index_rows(disks: Sequence[Rows | None], now: int, shared: bool = False) -> IndexRows:
    """The rows of all disks with their places, least recently used first.

    If a key of one group is on several disks, which can happen if the disks were not always used together, only the row
    with the newest generation is returned.

    Args:
        disks: the rows of each disk; None for a disk without rows.
        now: Unix seconds; rows that have expired by then are left out.
        shared: whether several groups use the slabs.
    """
    parts, places = [], []
    for disk, rows in enumerate(disks):
        if rows is None:
            continue
        slots = np.flatnonzero((rows["generation"] != 0) & ((rows["expiry"] == 0) | (rows["expiry"] > now)))
        parts.append(rows[slots])
        places.append(places_of(slots, disk, len(disks)))
    found = np.concatenate(parts) if parts else np.empty(0, ROW)
    place = np.concatenate(places) if places else np.empty(0, np.int64)
    # Blocks that were used together have nearly the same time, which differs a little between disks. Among these, the
    # block that was written last is farthest from its prompt's start, so it is evicted first.
    order = np.lexsort((~found["generation"], found["used"] // TOGETHER_MS))
    found, place = found[order], place[order]
    keep = _newest_of_each_key(found)
    if not keep.all():
        found, place = found[keep], place[keep]
    return IndexRows(
        np.ascontiguousarray(found["key"]),
        place.astype(np.int32),
        np.ascontiguousarray(found["generation"]),
        found["tokens"].astype(np.int32),
        np.ascontiguousarray(found["expiry"]),
        found["group"].astype(np.int32) if shared else None,
    )


def _newest_of_each_key(rows: Rows) -> NDArray[np.bool_]:
    keep = np.ones(len(rows), bool)
    halves = np.ascontiguousarray(rows["key"]).view("<u8").reshape(-1, 2)
    # Half of a key distinguishes nearly all blocks, and can be sorted as a number.
    order = np.argsort(halves[:, 0], kind="stable")
    first = halves[order, 0]
    alike = np.flatnonzero(first[1:] == first[:-1])
    newest: dict[bytes, int] = {}
    for at in np.unique(np.concatenate((order[alike], order[alike + 1]))).tolist():
        key = rows["key"][at].tobytes() + rows["group"][at].tobytes()
        other = newest.get(key)
        if other is None:
            newest[key] = at
            continue
        older = other if rows["generation"][other] < rows["generation"][at] else at
        keep[older] = False
        newest[key] = at if older == other else other
    return keep
