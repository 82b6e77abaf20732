"""What one unit shares with other units of its user, on this machine and on others, and what it gets from them."""

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
"""How long the host pool of a unit that has ended stays mapped with `peers.store: once`, at most: its memory is not
free before."""

LEAVE_S = 5.0
"""How long a close waits for a thread that leaves; see `retire`."""

MOST_REASON = 300
"""Characters of a reason, which may repeat what a peer wrote."""

MOST_REFUSED = 64
"""Units that are named as ones that share nothing, so that processes that come and go do not add up."""


@dataclass(slots=True)
class OnceCounts:
    """Running totals of `peers.store: once`, in pages.

    Attributes:
        left_out: not stored in this unit's tiers, because a peer keeps them.
        promoted: copies that became this unit's own, because no peer keeps them any more.
        lost: left out, and given up by the last peer before this unit had a copy.
    """

    left_out: int = 0
    promoted: int = 0
    lost: int = 0


class PeerShare:
    """Made with the unit's plan; `start` shows the unit to others, once every shared page may be shared.

    Args:
        folder: `peers.folder`.
        pages: the unit's.
        once: the host pool of a peer that has ended stays readable for a while.
        beat_s: time between heartbeats for units of other machines; None to share with units of this one only.

    Attributes:
        host: the directory of peers' host pools; None if host memory is not shared.
        disk: the directory of peers' folders; None if folders are not shared.
        once: the totals of `peers.store: once`; None without it.
        departed: the peers in `host` that have ended and whose pools can still be read.
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
        """Guards the attributes below, which the watches' threads change and readers look up."""
        self._others: dict[int, tuple[OtherFormat, ...]] = {}
        """By peer in `host`, one for each KV group."""
        self._slabs: dict[int, tuple[tuple[PeerFolder, ...], ...]] = {}
        """By peer in `disk`, its slabs for each KV group."""
        self._kept: dict[tuple[str, ...], int] = {}
        """By its folders, the peer in `disk` that has ended and whose pages stay known."""
        self._drop_at_s: dict[int, float] = {}
        """When each of `departed` is dropped at the latest, on the monotonic clock."""
        self._joined: dict[str, tuple[UnitCard, int | None, int | None]] = {}
        self.refused: dict[str, str] = {}
        """Units with this unit's fingerprint that run and share nothing with it, and why; the last MOST_REFUSED."""
        self._distant = None if beat_s is None or self.disk is None else DistantUnits(self.disk, beat_s, self)

    # --- what this unit shows ---

    def show_host(self, index: c_ext.BlockIndex, pool: HostPool, slots: int) -> c_ext.SlotBoard:
        """Publishes what the slots of `pool` hold, according to `index`."""
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
        """Publishes what the places of this unit's folders hold, which `board` says."""
        self._shown = (self._shown[0], SharedDisk(board.bytes, tuple(map(str, folders))))
        self._boards.append(board)

    def start(self, weights: bytes) -> None:
        """Shows this unit to others, and begins to follow them. Only the first call has an effect. If that cannot be,
        the unit shares nothing, and the log says why.

        Args:
            weights: 32 bytes that name all content of the weights; empty if the fingerprint does.
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
            card.encode()  # a card that is too long is named here
            folder = runtime_folder(self._setting)
            if self._pool is not None:
                files.append(self._pool.native.address()[1])
            # Opened anew, so that peers can map it read-only.
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
        """Ends sharing permanently, because the weights are no longer those that the card names. Never waits: another
        thread leaves, see `leaves`.
        """
        for board in self._boards:
            board.retire()
        if (watch := self._end()) is not None:
            self._leaving = NamedThread("flexkv-unshare", self._leave, (watch,))
            try:
                self._leaving.start()
            except RuntimeError:  # the system has no thread for it
                self._leave(watch)

    @property
    def leaves(self) -> bool:
        """Whether a thread is leaving, for which `close` would wait."""
        return self._leaving is not None and self._leaving.is_alive()

    def close(self) -> None:
        """Leaves. Copies under way end by themselves. Idempotent."""
        if (watch := self._end()) is not None:
            self._leave(watch)
        if self.leaves:
            assert self._leaving is not None
            self._leaving.join(LEAVE_S)
        if self._distant is not None:
            self._distant.close()

    def _end(self) -> PeerWatch | None:
        """Lets no further peer join. Returns the watch if it has not been ended yet."""
        with self._lock:
            self._ended = True
            watch, self._watch = self._watch, None
        return watch

    def _leave(self, watch: PeerWatch) -> None:
        """Leaves the peers, without waiting for a file server."""
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
        """Call without the lock: forgetting many pages takes a while."""
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
        so it is done without the lock.
        """
        with self._lock:
            due = [peer for peer, at_s in self._drop_at_s.items() if at_s <= until_s]
        for peer in due:
            assert self.host is not None
            self.host.drop(peer)
            # Only now, because a peer that is not in `departed` counts as running.
            with self._lock:
                self._drop_at_s.pop(peer, None)
                self._others.pop(peer, None)
                self.departed = tuple(self._drop_at_s)

    # --- what a unit that stores once asks ---

    def end_departed(self, peers: Collection[int]) -> None:
        """Has the watch's thread unmap the pools of these of `departed`."""
        with self._lock:
            for peer in self._drop_at_s.keys() & set(peers):
                self._drop_at_s[peer] = -math.inf

    @property
    def turn(self) -> tuple[int, int]:
        """This unit's number among the units that run, itself and those that it follows, and how many these are. All of
        them get the same count if all follow each other.
        """
        with self._lock:
            units = sorted([*self._joined, self._card.unit])
        return units.index(self._card.unit), len(units)

    # --- what readers ask ---

    def other_format(self, peer: int, group: int) -> OtherFormat | None:
        """How pages of a KV group in a peer's host pool become this unit's."""
        with self._lock:
            others = self._others.get(peer)
        return None if others is None else others[group]

    def folders(self, peer: int, group: int) -> Sequence[PeerFolder]:
        """The slabs of a peer for a KV group, in the order of its places."""
        with self._lock:
            slabs = self._slabs.get(peer)
        if slabs is not None:
            return slabs[group]
        return () if self._distant is None else self._distant.folders(peer, group)

    # --- what the watch's thread calls ---

    def wants(self, facts: dict[str, Any], whom: str = "") -> bool:
        """Whether this unit may share with a unit, according to its short facts; records why not. `whom` names it for
        people.
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
        """Forgets why a unit was refused, because this unit shares with it now, or it has ended."""
        with self._lock:
            self.refused.pop(whom, None)

    def _join(self, card: UnitCard, files: list[int]) -> None:
        if not self.wants(card.short()):
            raise DiskError("its card is not that of its file")
        if len(files) != (2 if card.host else 0) + (1 if card.disk else 0):
            raise DiskError(f"its card came with {len(files)} descriptors")
        whom = name_of(card.short())
        formats = self.check_pages(card, whom)
        # Before the lock is taken: a disk may hang, and neither readers nor `close` wait for a peer's.
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
        """How a unit's pages become this unit's.

        Raises:
            GeometryError, ConfigError, DiskError: they cannot be taken.
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
        """For each KV group, the slabs in a peer's folders in the order of its places; none if one of them cannot be
        read."""
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
        """Forgets a peer's host memory: at once, or with `once` after a while. Its pages on disk stay known: the
        trailer of each says whether it is still there."""
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

    # --- what people see ---

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
        """The units that are followed, and what each was asked."""
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
