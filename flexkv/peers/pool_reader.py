"""Loads pages from the host pools of other units. A thread copies the pages. If a page changes during its copy, the
copy fails.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from flexkv import c_ext
from flexkv.peers.page_formats import OtherFormat
from flexkv.storage.base import DiskGroup
from flexkv.storage.page_reader import DIGEST, InFlight, PageReader
from flexkv.storage.tags import TagFields, tag_fields
from flexkv.transfer.graph import OpResult, OpStatus, TransferOp
from flexkv.transfer.host_pool import HostPool

PAGES_AT_ONCE = 16
"""The number of pages that one native call copies. With large pages one call takes some milliseconds, and the reader
can be closed only between calls.
"""

COPIED, ABSENT, CHANGED, DIGEST_FAULT, FORMAT = range(5)
OUTCOMES = ("copied", "absent", "changed", "digest", "format")
"""The outcomes of `PeerDirectory.bring` for a page, by number."""

REASONS = {
    ABSENT: "absent: no peer has the page any more",
    CHANGED: "changed: the peer gave the slot to another page during the copy",
    DIGEST_FAULT: "digest: a run of the peer's page does not match its digest",
    FORMAT: "format: the peer has left",
}
"""Why a page was not copied, by outcome of `PeerDirectory.bring` or `read`."""


class PoolReader(PageReader):
    """Carries out DISK_READ ops that copy pages from peers' host pools. Each page is found in `directory` by the key in
    the page's tag; the places in the ops have no meaning.

    A copied page is accepted only if the row of its slot on the peer's board identified the page both before and after
    the copy, with the same version. If the peer's slots contain run digests, the runs must match these digests too.

    Args:
        directory: the pages in peers' host pools.
        other: returns how pages of a peer (by number) and a KV group are converted; None if the peer has left. Only
            called if the peer's pages have another format.

    Attributes:
        outcomes: number of pages with each outcome, in the order of `OUTCOMES`.
    """

    def __init__(
        self,
        directory: c_ext.PeerDirectory,
        other: Callable[[int, int], OtherFormat | None],
        groups: Sequence[DiskGroup],
        pool: HostPool,
        queue_ops: int,
        stuck_s: float,
    ) -> None:
        super().__init__("flexkv-peerhost", groups, pool, queue_ops, stuck_s)
        self._directory = directory
        self._other = other
        self.outcomes = np.zeros(len(OUTCOMES), np.int64)
        self._image: NDArray[np.uint64] = np.zeros(0, np.uint64)

    def _read(self, moving: InFlight) -> OpResult:
        op, reason = moving.op, ""
        for first in range(0, op.pages, PAGES_AT_ONCE):
            with self._lock:
                moving.page, moving.since_s = first, time.monotonic()
                if self._closed:
                    return self._broken(moving, RuntimeError("closed"))
            tags = tag_fields(op.tags[first : first + PAGES_AT_ONCE])
            slots = np.ascontiguousarray(op.slots[first : first + PAGES_AT_ONCE])
            with self._writing:
                if self._down:
                    break
                keys = np.ascontiguousarray(tags["key"])
                ends, peers, places = self._directory.bring(
                    self._pool.native,
                    op.group,
                    keys,
                    tags["tokens"].astype(np.uint32),
                    np.ascontiguousarray(tags["expiry"]),
                    slots,
                )
                for page in np.flatnonzero(ends == FORMAT).tolist():
                    place = (int(peers[page]), int(places[page]))
                    ends[page] = self._rewrite(op.group, tags[page : page + 1], place, int(slots[page]))
            self.outcomes += np.bincount(ends, minlength=len(OUTCOMES))
            good = ends == COPIED
            self._pool.native.settle(slots[good], op.op_id, True)
            self._pool.native.settle(slots[~good], op.op_id, False)
            moving.failed += (np.flatnonzero(~good) + first).tolist()
            if not good.all():
                reason = reason or REASONS[int(ends[~good][0])]
        status = OpStatus.FAILED if moving.failed else OpStatus.OK
        return OpResult(op.op_id, status, np.array(moving.failed, np.int32), reason)

    def _bring(self, op: TransferOp, page: int) -> str:
        raise AssertionError("pages are copied together")

    def _rewrite(self, group: int, tag: TagFields, place: tuple[int, int], slot: int) -> int:
        """Copies a page of another format, verifies the copy, then converts it into the host slot. Returns the
        outcome.
        """
        how = self._other(place[0], group)
        if how is None:
            return FORMAT
        words = -(-how.codec.image_bytes // 8)
        if len(self._image) < words:
            self._image = np.zeros(words, np.uint64)
        image = self._image[:words].view(np.uint8)[: how.codec.image_bytes]
        key, tokens, expiry = np.ascontiguousarray(tag["key"]), int(tag["tokens"][0]), int(tag["expiry"][0])
        end = self._directory.read(*place, group, key, tokens, expiry, image)
        if end != COPIED:
            return end
        stripes = [(how.codec.stripe_offset(rank), size) for rank, size in enumerate(how.group.stripe_bytes)]
        if how.digests and not self._has_digests(how, image):
            return DIGEST_FAULT
        self._put_stripes(group, image, stripes, how.rewrites, self._pool.slot(slot))
        return COPIED

    @staticmethod
    def _has_digests(how: OtherFormat, image: NDArray[np.uint8]) -> bool:
        for rank, runs in enumerate(how.group.runs):
            start = how.codec.stripe_offset(rank)
            made = [c_ext.run_digest(image[start + at : start + at + size]) for at, size, _ in runs.tolist()]
            kept = how.codec.digest_offset(rank)
            if np.array(made, DIGEST).tobytes() != image[kept : kept + 8 * len(made)].tobytes():
                return False
        return True
