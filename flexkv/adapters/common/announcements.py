"""Tracks which of a unit's pages have been announced to routers as present in host memory or on the unit's own disks.

Routers count announcements, so a page is announced only once per medium until its removal from that medium is
announced. An adapter turns the announcements that `take` returns into its engine's events.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from flexkv.adapters.common.event_book import Entry, EventBook
from flexkv.cache.base import CacheListener
from flexkv.facts.keys import KEY_BYTES, Keys

MOST_STORED = 512
"""Largest number of pages per medium that one call of `take` announces in addition to those that are new since the last
call. Announcing this many pages takes about a millisecond of the engine's step."""


class Medium(enum.IntEnum):
    """A medium that a page can be in. A set of media is a plain integer with these bits, because an operation on an
    `enum.IntFlag` takes more than a microsecond, and each page needs about ten such operations."""

    HOST = 1
    DISK = 2


MEDIA = (Medium.HOST, Medium.DISK)


class Tier(Protocol):
    """The methods of a tier that announcements use."""

    @property
    def in_use(self) -> bool:
        """Whether the tier's pages may be used now."""
        ...

    def present(self, group: int, keys: Keys) -> NDArray[np.bool_]: ...


class OwnDisks(Tier, Protocol):
    """The methods of the unit's own disks that announcements use."""

    def generations(self, group: int, keys: Keys) -> NDArray[np.uint64]:
        """The generation of each key's visible page, uint64 [keys]; 0 for a key without a visible page."""
        ...

    def forget(self, group: int, keys: Keys) -> int: ...


class Record(Protocol):
    """The description of a page in an adapter's events. Records are immutable. They must be compact, because one is
    kept for each announced page."""

    def packed(self) -> bytes:
        """The record as bytes, as `EventBook` writes it to its file for the next process."""
        ...


class Named(NamedTuple):
    """An adapter's description of a page that a store operation writes.

    Attributes:
        record: the description of the page in events.
        lasts: whether the record has the same meaning in the next process.
    """

    record: Record
    lasts: bool


@dataclass(slots=True)
class _Page:
    """One page: which media hold it, and for which media it has been announced.

    Attributes:
        group: number of the KV group.
        record, lasts: see `Named`.
        generation: generation of the page on disk; 0 if the page is not on disk.
        there: set of the media that hold the page.
        told: set of the media for which the page is announced to routers.
        stores: number of unfinished store operations that write the page.
        waits: set of the media in whose queues the page waits to be announced.
    """

    group: int
    record: Record
    lasts: bool
    generation: int = 0
    there: int = 0
    told: int = 0
    stores: int = 0
    waits: int = 0

    def entry(self, key: bytes) -> Entry:
        """The page's entry in the event book."""
        return Entry(key, self.group, self.generation, self.record.packed())


class Told(NamedTuple):
    """An announcement that a page came to a medium or left it."""

    medium: Medium
    record: Record


@dataclass(slots=True)
class News:
    """The next announcements, to be published in the order of the fields.

    Attributes:
        cleared: whether all pages announced so far are gone, because the unit was reset.
        removed: pages that left a medium for which they had been announced.
        stored: pages that are in a medium for which they had not been announced.
    """

    cleared: bool = False
    removed: list[Told] = field(default_factory=list)
    stored: list[Told] = field(default_factory=list)


class Announcements(CacheListener):
    """Records which media hold which pages, and what has been announced. All calls must come from one thread.

    A page is recorded when a store operation for it begins, even if the page turns out to be stored already. It is also
    recorded when it is found in the event book, which lists the pages that an earlier process left on disk.

    Args:
        host: the tier in host memory.
        disk: the tier on the unit's own disks; None if the unit has none.
    """

    def __init__(self, host: Tier, disk: OwnDisks | None) -> None:
        self._host, self._disk = host, disk
        self._tiers: list[tuple[Medium, Tier]] = [(Medium.HOST, host)]
        if disk is not None:
            self._tiers.append((Medium.DISK, disk))
        self._in_use = 0
        """Set of the media whose tiers were in use at the last call of `take`."""
        self._pages: dict[bytes, _Page] = {}
        self._waiting: dict[Medium, deque[bytes]] = {medium: deque() for medium in MEDIA}
        """For each medium, the keys of pages to be announced, parents before their children. A page may have left the
        medium since it was queued."""
        self._new = dict.fromkeys(MEDIA, 0)
        """Number of pages that this process's own store operations and disk writes have added to each queue since the
        last `take`."""
        self._news = News()
        self._book: EventBook | None = None

    def open_book(self, path: Path, identity: bytes) -> None:
        """Opens the event book, the file that lists the pages on the disks with their records. Starts a thread that
        reads an earlier process's entries from the book and writes entries for the next process. Must be called before
        any page leaves the disks.

        Args:
            path: path of the file, in the folder of the slabs (the files that hold the pages).
            identity: identifies the meaning of packed records; see `EventBook`.
        """
        # The number of all recorded pages serves as the upper bound of the pages on disk. To count exactly, the book's
        # thread would have to iterate over `_pages`, which the engine's thread changes.
        self._book = EventBook(path, identity, self._is_current, self._pages.__len__)

    def _is_current(self, entry: Entry) -> bool:
        """Whether an entry's page is still on disk in the entry's generation. The book's thread calls this. The entry's
        `words` (its packed record) are not compared, because one page may have two descriptions: one with its tokens,
        and one from a store operation that had only the page's hash.
        """
        page = self._pages.get(entry.key)
        return (
            page is not None
            and page.lasts
            and bool(page.there & Medium.DISK)
            and (page.group, page.generation) == (entry.group, entry.generation)
        )

    def close(self) -> None:
        """Writes the remaining entries of the event book for the next process. Must be called after the last disk
        write. Idempotent."""
        if self._book is not None:
            self._book.close()

    # --- stores ---

    def begin_store(self, group: int, keys: Keys, named: Sequence[Named]) -> list[bytes]:
        """Records the pages that a store operation writes. Must be called before any of them can become visible.

        Args:
            keys: keys of the pages that events can describe, one per entry of `named`.

        Returns:
            The argument for `end_store`.
        """
        rows = [row.tobytes() for row in keys]
        for key, (record, lasts) in zip(rows, named, strict=True):
            self._pages.setdefault(key, _Page(group, record, lasts)).stores += 1
        return rows

    def note_present(self, group: int, keys: Keys) -> None:
        """Records which of these pages are already in host memory or on disk. Called after an operation has begun to
        store the pages."""
        rows = [row.tobytes() for row in keys]
        for medium, tier in self._tiers:
            if rows and tier.in_use:
                there = tier.present(group, keys).tolist()
                self._appeared((key for key, is_there in zip(rows, there, strict=True) if is_there), medium)

    def end_store(self, rows: Iterable[bytes]) -> None:
        """Records that a store operation has finished, so that no more of its pages will become visible.

        Args:
            rows: the value that `begin_store` returned.
        """
        for key in rows:
            page = self._pages[key]
            page.stores -= 1
            self._drop_if_unused(key, page)

    def _drop_if_unused(self, key: bytes, page: _Page) -> None:
        if not page.there and not page.stores:
            del self._pages[key]

    # --- called by the manager ---

    def on_publish(self, group: int, keys: Keys) -> None:
        self._appeared((row.tobytes() for row in keys), Medium.HOST)

    def on_evict(self, group: int, keys: Keys) -> None:
        self._left(keys, Medium.HOST)

    def on_write(self, group: int, keys: Keys, generations: NDArray[np.uint64]) -> None:
        rows = [row.tobytes() for row in keys]
        entries = []
        for key, generation in zip(rows, generations.tolist(), strict=True):
            if (page := self._pages.get(key)) is not None:
                page.generation = generation
                if page.lasts:
                    entries.append(page.entry(key))
        # The pages must be recorded as on disk before `put`, because the book's thread, when it rewrites the file,
        # leaves out every page that is not recorded as on disk.
        self._appeared(rows, Medium.DISK)
        if entries and self._book is not None:
            self._book.put(entries)

    def on_unwrite(self, group: int, keys: Keys) -> None:
        if self._book is not None:
            gone = [row.tobytes() for row in keys]
            if self._book.is_settled:
                gone = [key for key in gone if (page := self._pages.get(key)) is not None and page.lasts]
            # Until the whole event book has been read, it may list pages that are not in `_pages` yet, so every key is
            # passed to `drop`.
            self._book.drop(gone)
        self._left(keys, Medium.DISK)

    def on_reset(self, epoch: int) -> None:
        for key, page in list(self._pages.items()):
            if page.stores:
                self._pages[key] = _Page(page.group, page.record, page.lasts, stores=page.stores)
            else:
                del self._pages[key]
        for waiting in self._waiting.values():
            waiting.clear()
        self._new = dict.fromkeys(MEDIA, 0)
        self._news = News(cleared=True)

    def _appeared(self, keys: Iterable[bytes], medium: Medium) -> None:
        for key in keys:
            if (page := self._pages.get(key)) is not None:
                page.there |= medium
                if self._wait(key, page, medium):
                    self._new[medium] += 1

    def _wait(self, key: bytes, page: _Page, medium: Medium) -> bool:
        """Adds the page to the medium's queue and returns True; returns False if the page is already in the queue or
        announced."""
        if (page.waits | page.told) & medium:
            return False
        page.waits |= medium
        self._waiting[medium].append(key)
        return True

    def _left(self, keys: Keys, medium: Medium) -> None:
        for row in keys:
            key = row.tobytes()
            if (page := self._pages.get(key)) is None:
                continue
            page.there &= ~medium
            if page.told & medium:
                page.told &= ~medium
                self._news.removed.append(Told(medium, page.record))
            self._drop_if_unused(key, page)

    # --- what is announced to routers ---

    def forget_told(self) -> None:
        """Queues all pages to be announced again. Must be called when the engine has published that all its blocks are
        gone, because routers then forget flexkv's pages too."""
        for key, page in self._pages.items():
            page.told = 0
            for medium in MEDIA:
                if page.there & medium:
                    self._wait(key, page, medium)
        self._news = News(cleared=self._news.cleared)

    def _turned(self, medium: Medium) -> None:
        """Announces the removal of a tier's pages if the tier has gone out of use, and queues its pages to be announced
        if the tier has come into use."""
        for key, page in self._pages.items():
            if page.told & medium:
                page.told &= ~medium
                self._news.removed.append(Told(medium, page.record))
            elif page.there & medium:
                self._wait(key, page, medium)

    @property
    def has_more(self) -> bool:
        """Whether `take` would announce more pages, either now or after more of the event book has been read."""
        is_read = self._book is None or self._book.is_settled
        return any(self._waiting.values()) or not (is_read or self._disk is None or not self._disk.in_use)

    def _find(self, unpacked: Callable[[bytes], Record]) -> None:
        """Records the next pages that an earlier process listed in the event book and that are still in a tier."""
        if self._book is None or self._disk is None or not self._disk.in_use:
            return
        by_group: dict[int, list[Entry]] = {}
        for entry in self._book.take():
            by_group.setdefault(entry.group, []).append(entry)
        for group, found in by_group.items():
            self._find_in(group, found, self._disk, unpacked)

    def _find_in(
        self, group: int, found: list[Entry], disk: OwnDisks, unpacked: Callable[[bytes], Record]
    ) -> None:
        """Records those pages from the event book that are on disk or in host memory.

        If a page left the disk and was stored again before a crash, the disk index may still list the older copy. The
        slot of that copy may hold a different page by now. Even if the slot still holds the older copy, that copy would
        be served without being announced. Therefore this method makes the disks forget the older copy.
        """
        keys = np.frombuffer(b"".join(each.key for each in found), np.uint8).reshape(-1, KEY_BYTES)
        generations = disk.generations(group, keys)
        recorded = np.array([each.generation for each in found], np.uint64)
        if (is_older := (generations != 0) & (generations < recorded)).any():
            disk.forget(group, keys[is_older])
        on_disk = ((generations != 0) & ~is_older).tolist()
        in_host = self._host.present(group, keys).tolist()
        rewritten: list[Entry] = []
        for each, is_on_disk, is_in_host in zip(found, on_disk, in_host, strict=True):
            if not (is_on_disk or is_in_host):
                continue
            page = self._pages.get(each.key)
            if page is None:
                page = self._pages[each.key] = _Page(group, unpacked(each.words), lasts=True)
            elif not page.lasts:
                # This process stores the page too, but with a record that has no meaning in the next process.
                page.record, page.lasts = unpacked(each.words), True
                if is_on_disk and page.generation:  # this process wrote the page, but no entry for it
                    rewritten.append(page.entry(each.key))
            if is_on_disk:
                page.generation = page.generation or each.generation
                page.there |= Medium.DISK
                self._wait(each.key, page, Medium.DISK)
            if is_in_host:
                page.there |= Medium.HOST
                self._wait(each.key, page, Medium.HOST)
        if rewritten and self._book is not None:
            self._book.put(rewritten)

    def take(self, unpacked: Callable[[bytes], Record]) -> News:
        """Returns the announcements since the last call and marks them as announced. The number of pages that one call
        announces for a medium is at most MOST_STORED plus the number of pages that are new in the medium. The remaining
        pages wait for the next call. The pages of a tier that goes out of use are announced as removed, and again as
        stored when the tier is back in use.

        Args:
            unpacked: makes a record from the bytes of `Record.packed`, which an earlier process wrote.
        """
        if not self._waiting[Medium.DISK]:
            self._find(unpacked)
        for medium, tier in self._tiers:
            if tier.in_use != bool(self._in_use & medium):
                self._in_use ^= medium
                self._turned(medium)
        news, self._news = self._news, News()
        for medium, waiting in self._waiting.items():
            room, self._new[medium] = MOST_STORED + self._new[medium], 0
            while waiting and room:
                room -= 1
                page = self._pages.get(waiting.popleft())
                if page is None:
                    continue
                page.waits &= ~medium
                if page.there & self._in_use & ~page.told & medium:
                    page.told |= medium
                    news.stored.append(Told(medium, page.record))
        return news
