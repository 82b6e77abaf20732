"""The thread that shows a unit's folders to units on other machines and follows the folders of those units, through
files only.

The folders of all units lie below one folder that every machine sees. The machines' clocks and the files' times do not
matter: a unit counts as running as long as its heartbeat advances between two reads of its file.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flexkv import c_ext
from flexkv.errors import ConfigError, DiskError, FlexKVError
from flexkv.observe import NamedThread, get_logger
from flexkv.peers.board_rows import PLACED, PlacedRows
from flexkv.peers.live_file import LIVE_NAME, LiveHead, LiveNews, LiveReader, LiveWriter
from flexkv.storage.folder import DIGEST_DIGITS

logger = get_logger(__name__)

MACHINE_FILE = Path("/proc/sys/kernel/random/boot_id")

GONE_BEATS = 5
"""If a unit's heartbeat has not advanced for this many heartbeat intervals, the unit counts as gone. The interval is
that unit's or this unit's, whichever is longer.
"""

SCAN_BEATS = 5
"""After the thread has read the known files this many times, it searches for new files."""

JITTER = 0.25
"""The interval between two rounds of heartbeat and reads is randomly shorter or longer by up to this fraction, so that
machines do not all ask their file server at the same moment.
"""

AGAIN_S = 60.0
"""A unit that was refused is tried again after this many seconds, or earlier if the unit restarts."""

ASLEEP_BEATS = 25
"""The number of heartbeat intervals between two reads of a file whose unit is not followed and does not advance its
heartbeat.
"""

MOST_UNITS = 64
"""The maximum number of units on other machines that are followed at a time."""

MOST_FILES = 1024
"""The maximum number of units' files that are read. The files that a unit has left behind at its end count, too."""

MOST_FOLDERS = 256
"""One search reads at most this many subfolders of the folder that all machines see."""

STOP_S = 2.0
"""The maximum number of seconds that a close waits for the thread. A file server that does not answer may block the
thread.
"""


def machine_id() -> str:
    """Returns an id that this machine has until its next boot. Containers on one kernel have the same id; no other
    machine has it.

    Raises:
        OSError: /proc cannot be read.
    """
    return MACHINE_FILE.read_text().strip()


def parent_of(folders: Sequence[Path]) -> Path:
    """Returns the folder that all machines see. All of `disk.folders` lie in it.

    Args:
        folders: the unit's folders. Each lies in a model's folder in one of `disk.folders`.

    Raises:
        ConfigError: `disk.folders` do not all lie in the same folder.
    """
    parents = {folder.parents[2] for folder in folders}
    if len(parents) != 1:
        raise ConfigError(
            f"peers.across_machines: disk.folders lie in {', '.join(sorted(map(str, parents)))}; allowed is one folder "
            "in which all of them lie"
        )
    return parents.pop()


class Mirror:
    """A board in this process that lists the pages of a unit on another machine. It lists only pages of the latest
    epoch, because a unit serves no pages of earlier epochs.
    """

    def __init__(self, places: int) -> None:
        self.board = c_ext.SlotBoard(places)
        self._rows: PlacedRows = np.zeros(places, PLACED)
        self._epoch = 0

    def take(self, news: LiveNews) -> None:
        rows, epoch = self._rows, self._epoch
        touched = np.zeros(len(rows), np.bool_)
        if news.is_all:
            rows = np.zeros_like(rows)
        for told, part in news.frames:
            if told > epoch:
                rows, epoch = np.zeros_like(rows), told
            places = part["place"]
            rows[places] = part
            if told < epoch:
                rows["tokens"][places] = 0
            touched[places] = True
        if epoch != self._epoch:
            touched[:] = True
        elif rows is not self._rows:
            touched = (_bytes(rows) != _bytes(self._rows)).any(axis=1)
        self._rows, self._epoch = rows, epoch
        self._show(np.flatnonzero(touched).astype(np.int32))

    def _show(self, places: NDArray[np.int32]) -> None:
        self.board.hide(places)
        there = places[self._rows["tokens"][places] != 0]
        rows = self._rows[there]
        tokens, generations, expiries, keys = (
            np.ascontiguousarray(rows[name]) for name in ("tokens", "generation", "expiry", "key")
        )
        self.board.note(there, tokens, generations, expiries, self._epoch)
        for group in np.unique(rows["group"]).tolist():
            those = rows["group"] == group
            self.board.show(there[those], group, np.ascontiguousarray(keys[those]))


def _bytes(rows: PlacedRows) -> NDArray[np.uint8]:
    return rows.view(np.uint8).reshape(len(rows), -1)


@dataclass(slots=True)
class DistantUnit:
    """A file that the search has found, and the state of its unit.

    Attributes:
        alive_s: when this process last saw the unit's heartbeat advance, in seconds of this process's monotonic clock.
        mirror: lists the unit's pages; None while the unit is not followed.
        joined: the unit's description in the file when `join` accepted the unit; None if the unit has not joined.
        again_s: when the unit may be tried again after it was refused, on the same clock.
        asleep_s: when the file is read again, on the same clock; 0 for the next round of reads.
        refused: the last logged reason why the unit was refused; empty if there is none.
        declined: the unit's name for users while the unit runs and is refused, else empty.
        fault: the last logged fault of the file; empty if there is none.
    """

    reader: LiveReader
    alive_s: float
    mirror: Mirror | None = None
    joined: LiveHead | None = None
    again_s: float = 0.0
    asleep_s: float = 0.0
    refused: str = ""
    declined: str = ""
    fault: str = ""


class MachineWatch:
    """The thread that writes this unit's heartbeats, and follows units on other machines.

    Args:
        parent: the folder that all machines see.
        writer: writes this unit's file.
        head: describes this unit.
        join: called with a unit that is to be followed: the path of its file, its description, and the board (in
            memory) that lists its pages. Raises FlexKVError or OSError to refuse the unit.
        left: called when a unit that was joined is gone, with the path of its file.
        end_refusal: called when a unit that `join` has refused may have ended, with its name for users.
        follow: called after all files were read, to read the changes of the boards.
    """

    def __init__(
        self,
        parent: Path,
        writer: LiveWriter,
        head: LiveHead,
        join: Callable[[str, LiveHead, c_ext.SlotBoard], None],
        left: Callable[[str], None],
        end_refusal: Callable[[str], None],
        follow: Callable[[], object],
    ) -> None:
        self._parent, self._writer, self._head = parent, writer, head
        self._join, self._left, self._end_refusal, self._follow = join, left, end_refusal, follow
        self._units: dict[Path, DistantUnit] = {}
        self._closed = threading.Event()
        self._said: dict[str, str] = {}
        """The last fault of this unit's own heartbeat and the last fault of the search. A fault that stays the same is
        not logged again.
        """
        self._beaten_s = 0.0
        # The generator of the module `random` is not used: engines may seed it, and then all machines would draw the
        # same numbers.
        self._random = random.Random()
        self._thread = NamedThread("flexkv-machines", self._run)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """Signals the thread to end. Idempotent."""
        self._closed.set()
        self._writer.end()

    def close(self) -> None:
        """Stops showing this unit to other units, and stops following them. Waits up to STOP_S seconds for the thread.
        Idempotent.
        """
        self.end()
        if self._thread.is_alive():
            self._thread.join(STOP_S)

    def _run(self) -> None:
        looks = 0
        try:
            while not self._closed.is_set():
                self._beat()
                if looks % SCAN_BEATS == 0:
                    self._scan()
                looks += 1
                self._look_at_all()
                self._follow()
                self._closed.wait(self._head.beat_s * self._random.uniform(1 - JITTER, 1 + JITTER))
        except Exception:  # the unit continues without sharing across machines
            logger.exception("following units of other machines")
        for path, unit in self._units.items():
            self._leave(path, unit, "this unit leaves")
        try:
            self._writer.remove()
        except OSError as error:
            logger.warning("this unit's file for other machines stays: %s", error)

    def _look_at_all(self) -> None:
        for path, unit in list(self._units.items()):
            if self._closed.is_set():
                return
            now_s = time.monotonic()
            # Slow reads must not delay the heartbeat, which shows other units that this one is running.
            if now_s - self._beaten_s >= self._head.beat_s:
                self._beat()
            if now_s >= unit.asleep_s:
                self._look(path, unit)

    def _beat(self) -> None:
        fault = ""
        self._beaten_s = time.monotonic()
        try:
            self._writer.beat()
        except OSError as error:
            fault = f"other machines do not see that this unit runs: {error}"
        self._say_once("beat", fault)

    def _scan(self) -> None:
        """Searches the folder that all machines see for files of units with this unit's fingerprint."""
        names = f"*-{self._head.card.fingerprint[:DIGEST_DIGITS]}-*/*/{LIVE_NAME}"
        fault = ""
        try:
            with os.scandir(self._parent) as entries:
                roots = sorted(entry.path for entry in entries if entry.is_dir())
            found = [path for root in roots[:MOST_FOLDERS] for path in Path(root).glob(names)]
            if len(roots) > MOST_FOLDERS:
                fault = f"{self._parent}: it has more than {MOST_FOLDERS} folders; the first are searched"
        except OSError as error:
            found, fault = [], f"{self._parent}: units of other machines are not searched: {error}"
        found = [path for path in found if path not in self._units]
        self._random.shuffle(found)  # if there are too many files, each search leaves out different ones
        for path in found:
            if len(self._units) >= MOST_FILES and not self._forget_one():
                fault = f"{path}: not followed: {MOST_FILES} files of units are looked at"
                break
            self._units[path] = DistantUnit(LiveReader(path, self._head.machine), time.monotonic())
        self._say_once("scan", fault)

    def _forget_one(self) -> bool:
        """Among the files that are read rarely, forgets the file whose unit has shown no heartbeat for the longest
        time. Returns whether there was such a file. A later search may find the file again.
        """
        asleep = [(unit.alive_s, path) for path, unit in self._units.items() if unit.asleep_s]
        if asleep:
            del self._units[min(asleep)[1]]
        return bool(asleep)

    def _say_once(self, about: str, fault: str) -> None:
        if fault and fault != self._said.get(about):
            logger.warning("%s", fault)
        self._said[about] = fault

    def _look(self, path: Path, unit: DistantUnit) -> None:
        try:
            news = unit.reader.look()
        except FileNotFoundError:
            self._leave(path, unit, "it has left")
            self._forgive(unit)
            del self._units[path]
            return
        except (FlexKVError, OSError) as error:
            news = LiveNews(fault=str(error))
        now_s = time.monotonic()
        if news.is_new or (unit.mirror is not None and unit.reader.head != unit.joined):
            self._leave(path, unit, "its unit has started anew")
            self._forgive(unit)
            unit.alive_s = now_s
        if news.fault and news.fault != unit.fault:
            if unit.mirror is None:
                logger.warning("%s: its unit is not followed from here: %s", path.parent, news.fault)
            else:
                logger.warning("%s: what was read before stays: %s", path.parent, news.fault)
        unit.fault = news.fault
        self._rest(unit, news, now_s)
        head = unit.reader.head
        if head is None or head.machine == self._head.machine:
            return  # `PeerWatch` follows the units on this machine
        if news.is_alive:
            unit.alive_s = now_s
            if unit.mirror is None:
                self._take(path, unit, head, now_s)
                return
        if unit.mirror is not None:
            unit.mirror.take(news)
            if now_s - unit.alive_s > GONE_BEATS * max(self._head.beat_s, head.beat_s):
                self._leave(path, unit, "its heartbeat stands still")

    def _rest(self, unit: DistantUnit, news: LiveNews, now_s: float) -> None:
        """Makes the thread read a file rarely if the file's unit is not followed and the file does not change. The unit
        of such a file has ended, or runs on this machine.
        """
        unit.asleep_s = 0.0
        if unit.mirror is not None or news.is_new or news.frames:
            return
        head = unit.reader.head
        beat_s = self._head.beat_s if head is None else max(self._head.beat_s, head.beat_s)
        if now_s - unit.alive_s > GONE_BEATS * beat_s:
            unit.asleep_s = now_s + ASLEEP_BEATS * self._head.beat_s
            self._forgive(unit)

    def _take(self, path: Path, unit: DistantUnit, head: LiveHead, now_s: float) -> None:
        """Begins to follow a unit, unless `join` refuses it, and reads all its rows."""
        if now_s < unit.again_s:
            return
        mirror = Mirror(head.places)
        try:
            if sum(other.mirror is not None for other in self._units.values()) >= MOST_UNITS:
                raise DiskError(f"{MOST_UNITS} units are followed")
            self._join(str(path), head, mirror.board)
        except (FlexKVError, OSError) as error:
            if str(error) != unit.refused:
                logger.warning("%s: its unit is not followed from here: %s", path.parent, error)
            unit.refused, unit.declined = str(error), head.whom
            unit.again_s = now_s + AGAIN_S
            return
        unit.mirror, unit.joined, unit.refused, unit.declined = mirror, head, "", ""
        unit.reader.rewind()
        self._look(path, unit)

    def _forgive(self, unit: DistantUnit) -> None:
        """Forgets that a unit was refused, because the unit has ended or restarted."""
        if unit.declined:
            self._end_refusal(unit.declined)
        unit.again_s, unit.refused, unit.declined = 0.0, "", ""

    def _leave(self, path: Path, unit: DistantUnit, why: str) -> None:
        if unit.mirror is None:
            return
        unit.mirror = None
        logger.info("%s: its pages are not promised any more: %s", path.parent, why)
        self._left(str(path))
