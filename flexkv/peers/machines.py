"""The thread by which a unit shows its folders to units of other machines, and follows theirs, through files only.

All units' folders lie below one folder that every machine sees. Neither the machines' clocks nor the times of files
matter: a unit counts as running while the reader sees its heartbeat advance.
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
"""A unit whose heartbeat has stood still for this many of its intervals, or of this unit's if those are longer, is
gone."""

SCAN_BEATS = 5
"""How many looks at known files there are for one search for further ones."""

JITTER = 0.25
"""By which part an interval is shorter or longer, so that machines do not all ask their server at the same moment."""

AGAIN_S = 60.0
"""When a unit that was refused is tried again, unless it starts anew before."""

ASLEEP_BEATS = 25
"""Intervals between two looks at the file of a unit that is not followed and whose heartbeat stands still."""

MOST_UNITS = 64
"""Units of other machines that are followed."""

MOST_FILES = 1024
"""Files that are looked at, those of units that ended without removing them included."""

MOST_FOLDERS = 256
"""Folders beside this unit's that are searched."""

STOP_S = 2.0
"""How long a close waits for the thread, which a server that does not answer may hold up."""


def machine_id() -> str:
    """A name of this machine until its next boot: containers on one kernel have the same name, and no other machine has
    it.

    Raises:
        OSError: /proc is not there.
    """
    return MACHINE_FILE.read_text().strip()


def parent_of(folders: Sequence[Path]) -> Path:
    """The folder that all machines see: the one in which all of `disk.folders` lie.

    Args:
        folders: the unit's, each in the model's in one of `disk.folders`.

    Raises:
        ConfigError: they lie in several.
    """
    parents = {folder.parents[2] for folder in folders}
    if len(parents) != 1:
        raise ConfigError(
            f"peers.across_machines: disk.folders lie in {', '.join(sorted(map(str, parents)))}; allowed is one folder "
            "in which all of them lie"
        )
    return parents.pop()


class Mirror:
    """A board of this process that repeats the rows of a unit of another machine. Only pages of the latest epoch count:
    a unit has no others."""

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
    """A unit's file that was found.

    Attributes:
        alive_s: when its heartbeat was last seen to advance, on this process's monotonic clock.
        mirror: its pages; None while it is not followed.
        joined: as it named itself when `mirror` began.
        again_s: when it may be tried again after it was refused.
        asleep_s: when it is checked again; 0: in the next round.
        refused: the last logged reason why it was not joined.
        declined: its name for people, while it runs and is not joined.
        fault: the last logged fault of its file.
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
    """The thread that writes this unit's heartbeats and follows those of units on other machines.

    Args:
        parent: the folder that all machines see.
        writer: keeps this unit's own file.
        head: this unit's.
        join: takes a unit, by the path of its file, and the board that repeats its rows. Raises FlexKVError or OSError
            to leave it alone.
        left: a unit that was joined is gone.
        end_refusal: a unit that `join` left alone, by its name for people, has ended.
        follow: a board has changed.
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
        """What was last logged about this unit's own heartbeat and about the search."""
        self._beaten_s = 0.0
        # Does not use the engine's own generator, because a seed may make it equal everywhere.
        self._random = random.Random()
        self._thread = NamedThread("flexkv-machines", self._run)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """Tells the thread to leave. Idempotent."""
        self._closed.set()
        self._writer.end()

    def close(self) -> None:
        """Other units no longer find this one, and it stops following them. Idempotent."""
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
        except Exception:  # sharing across machines ends, but the unit continues to serve
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
            # Slow reads must not delay the heartbeat, by which others know that this unit runs.
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
        """Searches the folders beside this unit's for files of units with its fingerprint."""
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
        self._random.shuffle(found)  # if there are too many, they take turns
        for path in found:
            if len(self._units) >= MOST_FILES and not self._forget_one():
                fault = f"{path}: not followed: {MOST_FILES} files of units are looked at"
                break
            self._units[path] = DistantUnit(LiveReader(path, self._head.machine), time.monotonic())
        self._say_once("scan", fault)

    def _forget_one(self) -> bool:
        """Forgets the file that has been unchanged for the longest time, if there is one; the search finds it again."""
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
            return  # a unit of this machine is found by its board
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
        """Rarely checks a file that is not followed and does not change: its unit has ended, or runs on this
        machine.
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
        """Follows a unit from now on: the next look brings all its rows."""
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
        """Forgets that a unit was not taken: it has ended, or may be another when its heartbeat goes on."""
        if unit.declined:
            self._end_refusal(unit.declined)
        unit.again_s, unit.refused, unit.declined = 0.0, "", ""

    def _leave(self, path: Path, unit: DistantUnit, why: str) -> None:
        if unit.mirror is None:
            return
        unit.mirror = None
        logger.info("%s: its pages are not promised any more: %s", path.parent, why)
        self._left(str(path))
