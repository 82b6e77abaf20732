"""Loads pages from the folders of other running units."""

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
    """Carries out DISK_READ ops that read pages from peers' folders. Each page is found in `directory` by the key in
    the page's tag; the places in the ops have no meaning.

    Args:
        directory: the pages in peers' folders.
        folders: returns the slabs of a peer (by number) for a KV group, in the order in which the peer's places are
            striped over them; empty if the peer is no longer known.
    """

    def __init__(
        self,
        directory: c_ext.PeerDirectory,
        folders: Callable[[int, int], Sequence[PeerFolder]],
        groups: Sequence[DiskGroup],
        pool: HostPool,
        queue_ops: int,
        stuck_s: float,
    ) -> None:
        super().__init__((), groups, pool, queue_ops, stuck_s)
        self._directory = directory
        self._slabs = folders
        self.outcomes = np.zeros(len(OUTCOMES), np.int64)  # stays 0: pages from folders count as disk pages
        self._images = [mmap.mmap(-1, codec.image_bytes) for codec in self._codecs]

    def _bring(self, op: TransferOp, page: int) -> str:
        asked = tag_fields(op.tags[page].copy())
        key = np.ascontiguousarray(asked["key"]).reshape(1, -1)
        peers, places, generations, _, epochs = self._directory.find(op.group, key)
        folders = self._slabs(int(peers[0]), op.group)
        if not folders:
            return "absent: no peer has the page any more"
        number, theirs = striped_slot(int(places[0]), len(folders))
        peer = folders[number]
        if len(self._images[op.group]) != peer.codec.image_bytes:
            self._images[op.group] = mmap.mmap(-1, peer.codec.image_bytes)
        asked["generation"], asked["epoch"] = generations[0], epochs[0]
        return self._take(peer, op.group, self._images[op.group], theirs, asked, int(op.slots[page]))
