"""Presents the pages of all peer folders as one tier that can only be read."""

from __future__ import annotations

from collections.abc import Sequence

from flexkv.errors import BlockRangeError, ContractError
from flexkv.observe import unix_now_s
from flexkv.storage.base import Generations, IndexRows, Places, StoredPages
from flexkv.storage.peer_folders import GROUP, PeerFolder
from flexkv.storage.rows import index_rows


class PeerPages(StoredPages):
    """The pages of all peer folders. Each folder counts as a disk: place p is slot `p // disks` of folder `p % disks`.

    The epoch starts at 0, whatever the folders' own epochs are. When `PeerReader` reads a page, it replaces the epoch
    in the op's tag with the folder's.

    Args:
        folders: the peer folders, at least one.
    """

    def __init__(self, folders: Sequence[PeerFolder]) -> None:
        if not folders:
            raise ContractError("PeerPages needs a peer folder")
        self._slots = max(len(peer.rows) for peer in folders)
        self._rows = [peer.rows for peer in folders]
        self._disks = len(folders)
        self._weights = [peer.weights for peer in folders]
        self._epoch = 0

    @property
    def disks(self) -> int:
        return self._disks

    @property
    def alive(self) -> tuple[bool, ...]:
        return (True,) * self._disks

    def slots(self, group: int) -> int:
        if group != GROUP:
            raise BlockRangeError(f"group {group}: peer folders have group {GROUP}")
        return self._slots * self._disks

    def rows(self, group: int) -> IndexRows:
        found, self._rows = self._rows, []
        return index_rows(found, unix_now_s())

    @property
    def epoch(self) -> int:
        return self._epoch

    def strange_disks(self, weights: bytes) -> tuple[int, ...]:
        return tuple(disk for disk, named in enumerate(self._weights) if named != weights)

    def record_evict(self, group: int, places: Places, generations: Generations) -> None:
        """Does nothing, because the pages' folder belongs to another unit. The caller's own index forgets the pages."""

    def record_use(self, group: int, places: Places) -> None:
        """Does nothing, because the folder belongs to another unit."""

    def reset(self, epoch: int, deadline_s: float = 30.0) -> None:
        if epoch <= self._epoch:
            raise ContractError(f"reset to epoch {epoch}: the current one is {self._epoch}")
        self._epoch = epoch
