"""Shares a unit's folders with units on other machines, and follows the folders of those units. All these folders lie
below one folder that every machine sees.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from flexkv.c_ext import PeerDirectory, SlotBoard
from flexkv.errors import ClosedError, DiskError, FlexKVError
from flexkv.observe import get_logger
from flexkv.peers.board_rows import BoardRows
from flexkv.peers.card import SharedDisk, UnitCard
from flexkv.peers.live_file import LIVE_NAME, MOST_PLACES, LiveHead, LiveWriter, decode_head
from flexkv.peers.machines import MachineWatch, machine_id, parent_of
from flexkv.peers.page_formats import PeerFormats
from flexkv.storage.peer_folders import PeerFolder

logger = get_logger(__name__)


class SharingTerms(Protocol):
    """Decides with which units this unit shares pages. `flexkv.peers.share.PeerShare` implements it."""

    refused: dict[str, str]

    def wants(self, facts: dict[str, Any], whom: str) -> bool: ...
    def end_refusal(self, whom: str) -> None: ...
    def check_pages(self, card: UnitCard, whom: str) -> PeerFormats: ...
    def open_slabs(self, unit: str, folders: Sequence[str]) -> tuple[tuple[PeerFolder, ...], ...]: ...


class DistantUnits:
    """The units on other machines with which this unit shares pages through folders.

    Args:
        directory: the list of the pages that peers have; this object adds the pages in the units' folders to it.
        beat_s: seconds between this unit's heartbeats.
        terms: decides with which units this unit shares.
    """

    def __init__(self, directory: PeerDirectory, beat_s: float, terms: SharingTerms) -> None:
        self._directory, self._beat_s, self._terms = directory, beat_s, terms
        self._watch: MachineWatch | None = None
        self._parent = Path()
        self._ended = False
        self._lock = threading.Lock()
        """Guards the attributes below, which the watch's thread changes and the readers' threads read."""
        self._joined: dict[str, tuple[LiveHead, int]] = {}
        """The description of each followed unit and its number in the directory, by the path of the unit's file."""
        self._slabs: dict[int, tuple[tuple[PeerFolder, ...], ...]] = {}

    def start(self, card: UnitCard, board: SlotBoard, folders: Sequence[Path]) -> None:
        """Shows the unit's folders to units on other machines, and begins to follow the folders of those units. If that
        fails, the log says why.

        Args:
            board: lists which page each place (slot) in `folders` holds.
            folders: the unit's folders, in the order of its places.
        """
        try:
            parent = parent_of(folders)
            rows = BoardRows(board, MOST_PLACES)
            names = tuple(str(folder.relative_to(parent)) for folder in folders)
            shown = replace(card, host=None, disk=SharedDisk(0, names))
            head = LiveHead(shown, machine_id(), socket.gethostname(), self._beat_s, len(rows))
            decode_head(head.encode())  # raises here if other units would not accept the card
            writer = LiveWriter(folders[0] / LIVE_NAME, head, rows)
        except (FlexKVError, OSError) as error:
            logger.warning("nothing is shared with other machines: %s", error)
            return
        self._parent = parent
        self._watch = MachineWatch(
            parent, writer, head, self._join, self._left, self._terms.end_refusal, self._directory.follow
        )
        self._watch.start()
        logger.info("unit %s shares its folders with units of other machines below %s", card.unit, parent)

    def end(self) -> None:
        """Stops promising pages from other machines, and signals the watch's thread to end. Does not wait for the
        thread, which a file server may block. Idempotent.
        """
        with self._lock:
            if self._ended:
                return
            self._ended = True
            peers = [peer for _, peer in self._joined.values()]
        if self._watch is not None:
            self._watch.end()
        for peer in peers:
            self._directory.drop(peer)

    def close(self) -> None:
        """Ends sharing, and waits up to `machines.STOP_S` seconds for the watch's thread, which closes the slabs. If a
        file server blocks the thread, the slabs are closed when the process exits. Idempotent.
        """
        self.end()
        if self._watch is not None:
            self._watch.close()

    def folders(self, peer: int, group: int) -> Sequence[PeerFolder]:
        """The slabs of a KV group of the unit with the number `peer`, in the order of the unit's places; empty if the
        unit is not known.
        """
        with self._lock:
            slabs = self._slabs.get(peer)
        return () if slabs is None else slabs[group]

    def _join(self, path: str, head: LiveHead, board: SlotBoard) -> None:
        card, whom = head.card, head.whom
        if not self._terms.wants(card.short(), whom):
            raise DiskError(self._terms.refused.get(whom, "it is another model's"))
        self._terms.check_pages(card, whom)
        assert card.disk is not None
        # The slabs are opened before the lock is taken, because a file server may not answer, and readers must not wait
        # for it.
        slabs = self._terms.open_slabs(
            card.unit, [str(self._parent / folder) for folder in card.disk.folders]
        )
        if not slabs:
            raise DiskError("its folders cannot be read here")
        room = min(peer.slab.row[3] for peer in slabs[0]) * len(slabs[0])
        if room < head.places:
            raise DiskError(
                f"its folders have room for {room} pages, and its file names {head.places} places"
            )
        with self._lock:
            if self._ended:
                raise ClosedError("this unit shares no more")
            peer = self._directory.add((board.fd, board.bytes), None, [((), ())] * len(card.groups))
            self._slabs[peer] = slabs
            self._joined[path] = (head, peer)
        self._terms.end_refusal(whom)
        logger.info("unit %s (process %s): its folders are read here", card.unit, whom)

    def _left(self, path: str) -> None:
        """Forgets all pages of a unit that has left, because the unit no longer reports which of them it replaces. Only
        the watch's thread calls this, because it may close the slabs' files, and a file server may delay that.
        """
        with self._lock:
            known = self._joined.pop(path, None)
            if known is None:
                return
            slabs = self._slabs.pop(known[1], None)
            is_dropped = self._ended
        # Dropping a unit with many pages takes a while, and readers must not wait for the lock that long.
        if not is_dropped:
            self._directory.drop(known[1])
        del slabs

    @property
    def joined(self) -> int:
        return 0 if self._ended else len(self._joined)

    def peers(self) -> list[dict[str, Any]]:
        """Describes the units that are followed."""
        with self._lock:
            joined = [] if self._ended else list(self._joined.values())
        return [
            {
                "unit": head.card.unit,
                "pid": head.card.pid,
                "model": head.card.model,
                "machine": head.host,
                "host_pages": 0,
                "disk_pages": self._directory.pages(peer),
            }
            for head, peer in joined
        ]
