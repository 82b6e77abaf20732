"""Reads the log of what a process did to its files, and makes disk images that a power cut at any moment could leave.

A sync covers the writes that ended before it began. A write that no sync has covered yet may be on the disk, may be
missing, or may be there in some of its 512-byte sectors only. Later writes may be on the disk even if it is missing. A
sync of a folder covers the changes of its names (creation, rename, deletion). If a change that is not covered is
missing, all later changes that are not covered are missing too, as in a file system with a journal.
"""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass, field
from pathlib import Path

RECORD = struct.Struct("<IIQQQQ")
WRITE, TRUNCATE, SYNC, CREATE, RENAME, UNLINK, END = range(1, 8)
SECTOR_BYTES = 512
NEVER = 1 << 62


@dataclass(slots=True)
class Call:
    """One call of the process.

    Attributes:
        kind: kind of the record, such as WRITE.
        file, folder: inodes of the file, and of the folder for changes of names.
        offset: offset of a write, or size of a truncation.
        data: the bytes of a write, or the names.
        begin, end: positions in the log at which the call began and ended.
        covered: position in the log from which on a sync covers the call.
    """

    kind: int
    file: int
    folder: int
    offset: int
    data: bytes
    begin: int
    end: int = NEVER
    covered: int = NEVER


@dataclass(slots=True)
class WriteLog:
    """The calls of one process, in order.

    Attributes:
        root: the folder that was recorded.
        calls: all calls except syncs and writes of marks.
        length: number of positions in the log.
        marks: position and text of each line that was written to a file named `marks`.
    """

    root: Path
    calls: list[Call]
    length: int
    marks: list[tuple[int, str]] = field(default_factory=list)


def read_log(path: Path, root: Path) -> WriteLog:
    """Reads the log that recorder.cpp wrote. Leaves out the last record if it is incomplete."""
    raw = path.read_bytes()
    calls: list[Call] = []
    open_calls: dict[int, Call] = {}
    at = position = 0
    while at + RECORD.size <= len(raw):
        kind, size, number, file, folder, offset = RECORD.unpack_from(raw, at)
        at += RECORD.size
        if at + size > len(raw):
            break
        position += 1
        if kind == END:
            open_calls.pop(number).end = position
        else:
            call = Call(kind, file, folder, offset, raw[at : at + size], position)
            open_calls[number] = call
            calls.append(call)
        at += size
    _cover(calls)
    log = WriteLog(root, calls, position)
    marks = {c.file for c in calls if c.kind == CREATE and c.data.endswith(b"/marks")}
    for call in calls:
        if call.kind == WRITE and call.file in marks:
            log.marks += [(call.begin, line) for line in call.data.decode().splitlines()]
    log.calls = [c for c in calls if c.file not in marks and c.kind != SYNC]
    return log


def _cover(calls: list[Call]) -> None:
    syncs: dict[int, list[Call]] = {}
    for call in calls:
        if call.kind == SYNC:
            syncs.setdefault(call.file, []).append(call)
    for call in calls:
        names = call.kind in (CREATE, RENAME, UNLINK)
        for sync in syncs.get(call.folder if names else call.file, ()):
            if sync.begin > call.end:
                call.covered = min(call.covered, sync.end)


class Disks:
    """Makes images of the disks at positions of one log. The caller must give the positions in ascending order, because
    the object applies each covered write only once.
    """

    def __init__(self, log: WriteLog, rng: random.Random) -> None:
        self._root = str(log.root)
        self._rng = rng
        self._files: dict[int, list[Call]] = {}
        self._names: list[Call] = []
        for call in log.calls:
            if call.kind in (WRITE, TRUNCATE):
                self._files.setdefault(call.file, []).append(call)
            else:
                self._names.append(call)
        self._settled: dict[int, tuple[int, bytearray]] = {file: (0, bytearray()) for file in self._files}

    def image(self, cut: int) -> dict[str, bytes]:
        """Returns the files as a power cut at position `cut` could leave them, as a dict from relative path to
        content."""
        paths: dict[str, int] = {}
        lost = False
        for call in self._names:
            if call.begin > cut:
                break
            # If a change of names is missing, all later changes that are not covered are missing, too, as in a file
            # system with a journal.
            lost = lost or (call.covered > cut and self._rng.random() < 0.3)
            if lost and call.covered > cut:
                continue
            text = call.data.decode()
            if call.kind == CREATE:
                paths[text] = call.file
            elif call.kind == UNLINK:
                paths.pop(text, None)
            else:
                old, new = text.split("\n")
                if old in paths:
                    paths[new] = paths.pop(old)
        return {
            path.removeprefix(self._root).lstrip("/"): bytes(self._content(file, cut))
            for path, file in paths.items()
        }

    def _content(self, file: int, cut: int) -> bytearray:
        calls = self._files.get(file, [])
        done, base = self._settled.get(file, (0, bytearray()))
        while done < len(calls) and calls[done].covered <= cut:
            _apply(base, calls[done], None)
            done += 1
        self._settled[file] = (done, base)
        content = bytearray(base)
        for call in calls[done:]:
            if call.begin > cut:
                break
            if call.covered <= cut:
                _apply(content, call, None)
                continue
            fate = self._rng.random()
            if fate < 0.35:
                continue
            _apply(content, call, self._rng if fate > 0.7 else None)
        return content


def _apply(content: bytearray, call: Call, torn: random.Random | None) -> None:
    if call.kind == TRUNCATE:
        size = call.offset
        if size < len(content):
            del content[size:]
        content.extend(bytes(size - len(content)))
        return
    end = call.offset + len(call.data)
    if torn is None:
        content.extend(bytes(max(0, end - len(content))))
        content[call.offset : end] = call.data
        return
    for at in range(0, len(call.data), SECTOR_BYTES):
        if torn.random() < 0.5:
            sector = call.data[at : at + SECTOR_BYTES]
            begin = call.offset + at
            content.extend(bytes(max(0, begin + len(sector) - len(content))))
            content[begin : begin + len(sector)] = sector
