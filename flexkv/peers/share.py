"""Shares a unit's pages with other units of its user, on this machine and on others, and finds those units' pages."""

from __future__ import annotations

import math
import os
import secrets
import stat
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flexkv import c_ext
from flexkv.errors import ClosedError, DiskError, FlexKVError
from flexkv.observe import NamedThread, get_logger
from flexkv.peers.card import PROTOCOL, GroupCard, SharedDisk, SharedHost, UnitCard, name_of
from flexkv.peers.distant_units import DistantUnits
from flexkv.peers.page_formats import OtherFormat, PeerFormats, UnitPages
from flexkv.peers.pool_reader import OUTCOMES
from flexkv.peers.runtime_folder import runtime_folder
from flexkv.peers.watch import PeerWatch
from flexkv.storage.base import DiskIdentity
from flexkv.storage.folder import slab_name
from flexkv.storage.peer_folders import GROUP, PeerFolder, open_slab
from flexkv.transfer.host_pool import HostPool

logger = get_logger(__name__)

UNIT_DIGITS = 16

DEPARTED_S = 10.0
"""With `peers.store: once`, an ended unit's pool stays mapped, and its memory in use, for up to this many seconds."""

LEAVE_S = 5.0
"""The maximum number of seconds that `close` waits for the thread that `retire` has started."""

MOST_REASON = 300
"""The maximum length of a reason for a refusal, in characters. A reason may repeat text from a peer."""

MOST_REFUSED = 64
"""At most this many refused units are remembered, so that units that come and go do not accumulate."""


@dataclass(slots=True)
class OnceCounts:
    """Running totals of `peers.store: once`, in pages.

    Attributes:
        left_out: pages not stored in this unit's tiers, because a peer keeps them.
        promoted: copies that became this unit's own pages, because no peer keeps them any more.
        lost: pages that this unit left out, and of which no copy remained when the last peer that had them dropped
            them.
    """

    left_out: int = 0
    promoted: int = 0
    lost: int = 0


class PeerShare:
    """Shares this unit's pages with other units, and follows the pages of those units. Call `show_host` and
    `show_disk`, then `start`.

    Args:
        folder: the setting `peers.folder`; None if it is not set.
        pages: this unit's KV groups.
        host, disk: whether to share host memory, and whether to share folders.
        once: whether `peers.store` is `once`, so that an ended peer's pool stays readable for up to DEPARTED_S.
        beat_s: seconds between heartbeats for units on other machines; None to share on this machine only.

    Attributes:
        host: the directory of peers' host pools; None if host memory is not shared.
        disk: the directory of peers' folders; None if folders are not shared.
        once: the totals of `peers.store: once`; None if `peers.store` has another value.
        departed: numbers of the peers in `host` that have ended and whose pools can still be read.
    """

    def __init__(
        self,
        folder: str | None,
        identity: DiskIdentity,
        pages: UnitPages,
        host: bool,
        disk: bool,
        once: bool = False,
        beat_s: float | None = None,
    ) -> None:
        self._setting = folder
        self._identity, self._pages = identity, pages
        self.host = c_ext.PeerDirectory() if host else None
        self.disk = c_ext.PeerDirectory() if disk else None
        self.once = OnceCounts() if once else None
        self.departed: tuple[int, ...] = ()
        self._boards: list[c_ext.SlotBoard] = []
        self._shown: tuple[SharedHost | None, SharedDisk | None] = (None, None)
        self._pool: HostPool | None = None
        self._watch: PeerWatch | None = None
        self._ended = False
        self._leaving: NamedThread | None = None
        self._lock = threading.Lock()
        """Guards the attributes below, which the watches' threads change and the readers' threads read."""
        self._others: dict[int, tuple[OtherFormat, ...]] = {}
        """Maps each peer in `host` whose pages have another format to the formats of its KV groups."""
        self._slabs: dict[int, tuple[tuple[PeerFolder, ...], ...]] = {}
        """Maps each peer in `disk` to the peer's slabs, listed per KV group."""
        self._kept: dict[tuple[str, ...], int] = {}
        """Peers that have ended and whose pages stay known. Maps a peer's folders to its number in `disk`."""
        self._drop_at_s: dict[int, float] = {}
        """The latest time at which each peer in `departed` is dropped, in seconds of the monotonic clock."""
        self._joined: dict[str, tuple[UnitCard, int | None, int | None]] = {}
        self.refused: dict[str, str] = {}
        """Maps another unit's name for users to the reason why this unit shares nothing with it, although both have the
        same fingerprint. Keeps at most MOST_REFUSED entries.
        """
        self._distant = None if beat_s is None or self.disk is None else DistantUnits(self.disk, beat_s, self)

    # --- sharing this unit's pages ---

    def show_host(self, index: c_ext.BlockIndex, pool: HostPool, slots: int) -> c_ext.SlotBoard:
        """Shares the pages in the slots of `pool`. Returns the board (memory that peers can read) in which `index`
        shows what each slot holds.
        """
        board = c_ext.SlotBoard(slots)
        index.tell(board)
        _, _, _, file_bytes = pool.native.address()
        offset, per_extent, stride = pool.native.file_layout
        self._shown = (
            SharedHost(
                board.bytes,
                file_bytes,
                offset,
                pool.slot_bytes,
                per_extent,
                stride,
                self._pages.groups[0].host_digests,
            ),
            self._shown[1],
        )
        self._pool = pool
        self._boards.insert(0, board)
        return board

    def show_disk(self, board: c_ext.SlotBoard, folders: Sequence[Path]) -> None:
        """Shares the pages in this unit's folders. `board` shows peers what each place (slot on disk) holds."""
        self._shown = (self._shown[0], SharedDisk(board.bytes, tuple(map(str, folders))))
        self._boards.append(board)

    def start(self, weights: bytes) -> None:
        """Shows this unit to other units, and begins to follow those units. If that fails, the unit shares nothing, and
        the log says why. Only the first call has an effect.

        Args:
            weights: 32-byte digest of the whole content of the weights; empty if the fingerprint covers it.
        """
        if self._watch is not None or self._ended:
            return
        host, disk = self._shown
        card = UnitCard(
            unit=secrets.token_hex(UNIT_DIGITS // 2),
            pid=os.getpid(),
            model=self._identity.model,
            fingerprint=self._identity.fingerprint.hex(),
            weights=weights.hex(),
            groups=tuple(GroupCard.of(group) for group in self._pages.groups),
            host=host,
            disk=disk,
        )
        self._card = card
        files = [board.fd for board in self._boards]
        opened = []
        watch = None
        try:
            card.encode()  # raises here if the card is too long
            folder = runtime_folder(self._setting)
            if self._pool is not None:
                files.append(self._pool.native.address()[1])
            # Each file is opened again, read-only, so that peers cannot map it for writing.
            opened = [os.open(f"/proc/self/fd/{file}", os.O_RDONLY | os.O_CLOEXEC) for file in files]
            self._files = opened
            watch = PeerWatch(
                folder,
                card,
                opened,
                self.wants,
                self._join,
                self._left,
                lambda facts: self.end_refusal(name_of(facts)),
                self._follow,
                self.status,
            )
            watch.start()
        except (FlexKVError, OSError) as error:
            logger.warning("nothing is shared with other units: %s", error)
            if watch is not None:
                watch.close()
            for file in opened:
                os.close(file)
            self._ended = True
            return
        self._watch = watch
        logger.info(
            "unit %s shares %s with units of the same model: %s",
            card.unit,
            " and ".join(card.short()["shares"]),
            folder,
        )
        if self._distant is not None and card.disk is not None:
            self._distant.start(card, self._boards[-1], [Path(folder) for folder in card.disk.folders])

    def retire(self) -> None:
        """Ends sharing permanently, because the unit's weights are no longer the weights on its card. Never waits:
        another thread does the slow part (see `leaves`).
        """
        for board in self._boards:
            board.retire()
        if (watch := self._end()) is not None:
            self._leaving = NamedThread("flexkv-unshare", self._leave, (watch,))
            try:
                self._leaving.start()
            except RuntimeError:  # the system cannot start another thread
                self._leave(watch)

    @property
    def leaves(self) -> bool:
        """Whether the thread that `retire` has started is running; `close` would wait for it."""
        return self._leaving is not None and self._leaving.is_alive()

    def close(self) -> None:
        """Ends sharing. Copies in flight may still finish. Idempotent."""
        if (watch := self._end()) is not None:
            self._leave(watch)
        if self.leaves:
            assert self._leaving is not None
            self._leaving.join(LEAVE_S)
        if self._distant is not None:
            self._distant.close()

    def _end(self) -> PeerWatch | None:
        """Ensures that no more peers join. Returns the watch, which the caller must close. Returns None if `_end` was
        called before.
        """
        with self._lock:
            self._ended = True
            watch, self._watch = self._watch, None
        return watch

    def _leave(self, watch: PeerWatch) -> None:
        """Drops all peers, and stops showing this unit. Does not wait for a file server."""
        if self._distant is not None:
            self._distant.end()
        watch.close()
        for file in self._files:
            os.close(file)
        with self._lock:
            joined = list(self._joined.values())
            self._joined.clear()
        for _, host, disk in joined:
            self._drop(host, disk)
        self._drop_departed()

    def _drop(self, host: int | None, disk: int | None) -> None:
        """Drops a peer, given by its numbers in `host` and `disk`. Do not hold the lock during this call, because it
        takes a while if the peer has many pages.
        """
        if self.host is not None and host is not None:
            self.host.drop(host)
        if self.disk is not None and disk is not None:
            self.disk.drop(disk)
        with self._lock:
            if host is not None:
                self._others.pop(host, None)
            if disk is not None:
                self._slabs.pop(disk, None)

    def _drop_departed(self, until_s: float = math.inf) -> None:
        """Drops the ended peers whose pools need not stay readable after `until_s`. Unmapping a pool may take seconds,
        so this method does not hold the lock meanwhile.
        """
        with self._lock:
            due = [peer for peer, at_s in self._drop_at_s.items() if at_s <= until_s]
        for peer in due:
            assert self.host is not None
            self.host.drop(peer)
            # The peer is removed from `departed` only after the drop, because a known peer that is not in `departed`
            # counts as running.
            with self._lock:
                self._drop_at_s.pop(peer, None)
                self._others.pop(peer, None)
                self.departed = tuple(self._drop_at_s)

    # --- called with `peers.store: once` ---

    def end_departed(self, peers: Collection[int]) -> None:
        """Makes the watch's thread unmap the pools of these ended peers soon."""
        with self._lock:
            for peer in self._drop_at_s.keys() & set(peers):
                self._drop_at_s[peer] = -math.inf

    @property
    def turn(self) -> tuple[int, int]:
        """This unit's position in a sorted list, and the list's length. The list has the ids of this unit and of the
        units that it follows on this machine. If all these units follow each other, each has a different position in
        the same list.
        """
        with self._lock:
            units = sorted([*self._joined, self._card.unit])
        return units.index(self._card.unit), len(units)

    # --- called by readers ---

    def other_format(self, peer: int, group: int) -> OtherFormat | None:
        """How a peer's host pages of a KV group are converted; None if the peer is gone or needs no conversion."""
        with self._lock:
            others = self._others.get(peer)
        return None if others is None else others[group]

    def folders(self, peer: int, group: int) -> Sequence[PeerFolder]:
        """The slabs of a peer for a KV group, in the order of the peer's places; empty if the peer is not known."""
        with self._lock:
            slabs = self._slabs.get(peer)
        if slabs is not None:
            return slabs[group]
        return () if self._distant is None else self._distant.folders(peer, group)

    # --- called by the watch's thread ---

    def wants(self, facts: dict[str, Any], whom: str = "") -> bool:
        """Whether this unit may share pages with another unit, judging by that unit's facts in its file. If only
        versions or weights differ, records why not. `whom` is the other unit's name for users.
        """
        mine, whom = self._card, whom or name_of(facts)
        if facts.get("fingerprint") != mine.fingerprint:
            return False
        if facts.get("protocol") != PROTOCOL:
            self._refuse(whom, f"it speaks version {facts.get('protocol')}, this one {PROTOCOL}")
            return False
        if facts.get("weights") != mine.weights:
            self._refuse(whom, "its weights are others")
            return False
        return True

    def _refuse(self, whom: str, why: str) -> None:
        with self._lock:
            if whom not in self.refused:
                logger.warning("the unit of process %s is not shared with: %s", whom, why)
                if len(self.refused) >= MOST_REFUSED:
                    del self.refused[next(iter(self.refused))]
            self.refused[whom] = why[:MOST_REASON]

    def end_refusal(self, whom: str) -> None:
        """Forgets why another unit was refused. Call this when the other unit is accepted after all, or has ended."""
        with self._lock:
            self.refused.pop(whom, None)

    def _join(self, card: UnitCard, files: list[int]) -> None:
        if not self.wants(card.short()):
            raise DiskError("its card is not that of its file")
        if len(files) != (2 if card.host else 0) + (1 if card.disk else 0):
            raise DiskError(f"its card came with {len(files)} descriptors")
        whom = name_of(card.short())
        formats = self.check_pages(card, whom)
        # The slabs are opened before the lock is taken, because a peer's disk may hang, and readers and `close` must
        # not wait for it.
        slabs = (
            () if self.disk is None or card.disk is None else self.open_slabs(card.unit, card.disk.folders)
        )
        host = disk = kept = None
        try:
            with self._lock:
                if self._ended:
                    raise ClosedError("this unit shares no more")
                if self.host is not None and card.host is not None:
                    host = self._join_host(card.host, formats, files)
                if slabs and card.disk is not None:
                    disk = self._join_disk(card.disk, slabs, files[1 if card.host else 0])
                    kept = self._kept.pop(card.disk.folders, None)
                self._joined[card.unit] = (card, host, disk)
        except FlexKVError:
            self._drop(host, None)
            raise
        self._drop(None, kept)
        self.end_refusal(whom)
        shared = {
            (True, True): "host memory and folders are",
            (True, False): "host memory is",
            (False, True): "folders are",
            (False, False): "pages are not",
        }[host is not None, disk is not None]
        logger.info("unit %s (process %d): its %s read here", card.unit, card.pid, shared)

    def check_pages(self, card: UnitCard, whom: str) -> PeerFormats:
        """Returns how another unit's pages become this unit's pages.

        Raises:
            GeometryError, ConfigError, DiskError: this unit cannot use the pages; the reason is recorded in `refused`.
        """
        try:
            return self._pages.formats_of(card.disk_groups)
        except FlexKVError as error:
            self._refuse(whom, str(error))
            raise

    def _join_host(self, told: SharedHost, formats: PeerFormats, files: list[int]) -> int:
        assert self.host is not None
        peer = self.host.add(
            (files[0], told.board_bytes),
            (
                files[-1],
                told.file_bytes,
                told.slots_offset,
                told.slot_bytes,
                told.slots_per_extent,
                told.extent_stride,
            ),
            formats.plain,
        )
        if formats.others:
            self._others[peer] = formats.others
        return peer

    def open_slabs(self, unit: str, folders: Sequence[str]) -> tuple[tuple[PeerFolder, ...], ...]:
        """Opens a peer's slabs and returns them: for each KV group one per folder, in the order in which the peer's
        places are striped over its folders. Returns an empty tuple if a slab cannot be opened.
        """
        slabs = []
        try:
            for folder in folders:
                path = Path(folder) / slab_name(GROUP)
                found = path.lstat()
                if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
                    raise DiskError(f"{path} is not a file of user {os.geteuid()}")
                slabs.append(open_slab(path, self._identity, self._pages.groups, self._pages.heads))
        except (FlexKVError, OSError) as error:
            logger.warning("unit %s: its folders are not read here: %s", unit, error)
            return ()
        return tuple(zip(*slabs, strict=True))

    def _join_disk(self, told: SharedDisk, slabs: tuple[tuple[PeerFolder, ...], ...], file: int) -> int:
        assert self.disk is not None
        peer = self.disk.add((file, told.board_bytes), None, [((), ())] * len(self._pages.groups))
        self._slabs[peer] = slabs
        return peer

    def _left(self, unit: str) -> None:
        """Forgets the pages in an ended peer's host memory: at once, or after a while if `peers.store` is `once`. The
        peer's pages on disk stay known, because each page's trailer says whether the page is still there.
        """
        with self._lock:
            card, host, disk = self._joined.pop(unit)
            if self.once is not None and host is not None and not _retired(self.host, host):
                self._drop_at_s[host] = time.monotonic() + DEPARTED_S
                self.departed = tuple(self._drop_at_s)
                host = None
            if card.disk is not None and disk is not None and not _retired(self.disk, disk):
                assert self.disk is not None
                self.disk.drop(disk, keep=True)
                self._kept[card.disk.folders] = disk
                disk = None
        self._drop(host, disk)

    def _follow(self) -> None:
        if self._drop_at_s:
            self._drop_departed(time.monotonic())
        for directory in (self.host, self.disk):
            if directory is not None:
                directory.follow()

    # --- status for users ---

    @property
    def joined(self) -> int:
        return len(self._joined) + (0 if self._distant is None else self._distant.joined)

    def status(self) -> dict[str, Any]:
        """Describes this unit, its peers, and the units with which it does not share."""
        return {
            "unit": self._card.unit,
            "pid": self._card.pid,
            "model": self._card.model,
            "shares": self._card.short()["shares"],
            "peers": self.peers(),
            "refused": dict(self.refused),
        } | ({} if self.once is None else {"once": asdict(self.once)})

    def peers(self) -> list[dict[str, Any]]:
        """Describes the units that are followed, and counts the pages that were read from each, by outcome."""
        with self._lock:
            joined = list(self._joined.values())
        rows = []
        for card, host, disk in joined:
            counts = (0,) * len(OUTCOMES) if self.host is None or host is None else self.host.counts(host)
            rows.append(
                {
                    "unit": card.unit,
                    "pid": card.pid,
                    "model": card.model,
                    "host_pages": 0 if self.host is None or host is None else self.host.pages(host),
                    "disk_pages": 0 if self.disk is None or disk is None else self.disk.pages(disk),
                    "machine": "",
                }
                | dict(zip(OUTCOMES, counts, strict=True))
            )
        for told in () if self._distant is None else self._distant.peers():
            rows.append(told | dict.fromkeys(OUTCOMES, 0))
        return rows


def _retired(directory: c_ext.PeerDirectory | None, peer: int) -> bool:
    return directory is None or directory.retired(peer)
