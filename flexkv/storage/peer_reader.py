"""Loads pages from peer folders. A thread reads them one by one, verifies them, and converts them to this unit's
encoding.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import numpy as np

from flexkv.observe import unix_now_s
from flexkv.storage.base import DiskGroup
from flexkv.storage.page_reader import PageReader
from flexkv.storage.peer_folders import PeerFolder
from flexkv.storage.striping import striped_slot
from flexkv.storage.tags import TagFields, tag_fields
from flexkv.transfer.graph import TransferOp
from flexkv.transfer.host_pool import HostPool


class PeerReader(PageReader):
    """Carries out DISK_READ ops whose places are those of `PeerPages`.

    A page is copied to its host slot only after its trailer has matched the op's tag and every run has matched its
    digest.

    Args:
        folders: the folders of `PeerPages`, in the same order.
    """

    def __init__(
        self,
        folders: Sequence[PeerFolder],
        groups: Sequence[DiskGroup],
        pool: HostPool,
        queue_ops: int,
        stuck_s: float,
    ) -> None:
        super().__init__("flexkv-peers", groups, pool, queue_ops, stuck_s)
        self._folders = list(folders)
        self._images = [mmap.mmap(-1, peer.codec.image_bytes) for peer in folders]

    def _bring(self, op: TransferOp, page: int) -> str:
        number, theirs = striped_slot(int(op.places[page]), len(self._folders))
        peer = self._folders[number]
        asked = tag_fields(op.tags[page].copy())
        asked["epoch"] = peer.epoch
        return self._take(peer, op.group, self._images[number], theirs, asked, int(op.slots[page]))

    def _take(
        self, peer: PeerFolder, group: int, image: mmap.mmap, theirs: int, asked: TagFields, slot: int
    ) -> str:
        """Reads, verifies and converts one page, which must match `asked`. Returns the reason if that fails; empty if
        it succeeds.

        Args:
            image: buffer for the page as the other unit encodes it.
            theirs: the slot in the other unit's slab that holds the page.
            slot: host slot that gets the page.
        """
        try:
            read = os.preadv(peer.slab.fd, [image], peer.slab.offset(theirs))
        except OSError as error:
            return f"io: {peer.folder}: {error.strerror}"
        if read != len(image):
            return f"short: {peer.folder}: {read} of {len(image)} bytes"
        miss, reason = peer.codec.check(image, peer.header.slab_id, theirs, asked.tobytes(), unix_now_s())
        if miss != "none":
            return f"{miss}: {reason}"
        with self._writing:
            if self._down:
                return self._down  # the slot may belong to another page already
            self._put_stripes(
                group, np.frombuffer(image, np.uint8), peer.stripes, peer.rewrites, self._pool.slot(slot)
            )
        return ""
