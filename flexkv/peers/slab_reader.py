"""Loads pages from the folders of units that are running."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence

import numpy as np

from flexkv import c_ext
from flexkv.peers.pool_reader import OUTCOMES
from flexkv.storage.base import DiskGroup
from flexkv.storage.peer_folders import PeerFolder
from flexkv.storage.peer_reader import PeerReader
from flexkv.storage.striping import striped_slot
from flexkv.storage.tags import tag_fields
from flexkv.transfer.graph import TransferOp
from flexkv.transfer.host_pool import HostPool


class SlabReader(PeerReader):
    """Carries out DISK_READ ops whose tags name pages that `directory` knows. Their places mean nothing.

    Args:
        folders: the slabs of a peer, by its number, in the order in which its places are striped over them; empty once
            it is unknown.
    """

    def __init__(
        self,
        directory: c_ext.PeerDirectory,
        folders: Callable[[int], Sequence[PeerFolder]],
        group: DiskGroup,
        pool: HostPool,
        queue_ops: int,
        stuck_s: float,
    ) -> None:
        super().__init__((), group, pool, queue_ops, stuck_s)
        self._directory = directory
        self._slabs = folders
        self.outcomes = np.zeros(len(OUTCOMES), np.int64)  # what folders gave is counted with the disks
        self._image = mmap.mmap(-1, self._codec.image_bytes)

    def _bring(self, op: TransferOp, page: int) -> str:
        asked = tag_fields(op.tags[page].copy())
        key = np.ascontiguousarray(asked["key"]).reshape(1, -1)
        peers, places, generations, _, epochs = self._directory.find(op.group, key)
        folders = self._slabs(int(peers[0]))
        if not folders:
            return "absent: no peer has the page any more"
        number, theirs = striped_slot(int(places[0]), len(folders))
        peer = folders[number]
        if len(self._image) != peer.codec.image_bytes:
            self._image = mmap.mmap(-1, peer.codec.image_bytes)
        asked["generation"], asked["epoch"] = generations[0], epochs[0]
        return self._take(peer, self._image, theirs, asked, int(op.slots[page]))
