"""Which of a unit's pages routers know to be in host memory and on the unit's own disks.

Routers count announcements, so a page is announced once per medium until it is removed there. An adapter turns what
`take` returns into its engine's events.
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
"""Most announcements per medium that one `take` returns besides those of new pages: about a millisecond of the engine's
step."""


class Medium(enum.IntEnum):
    """Where a page is. Sets of media are plain integers with these bits: an operation of `enum.IntFlag` takes more than
    a microsecond, and a page needs about ten of them."""

    HOST = 1
    DISK = 2


MEDIA = (Medium.HOST, Medium.DISK)


class Tier(Protocol):
    """The part of a tier that announcements need."""

    @property
    def in_use(self) -> bool:
        """Whether its pages may be used now."""
        ...

    def present(self, group: int, keys: Keys) -> NDArray[np.bool_]: ...


class OwnDisks(Tier, Protocol):
    """The part of the unit's own disks that announcements need."""

    def generations(self, group: int, keys: Keys) -> NDArray[np.uint64]:
        """Generations of the visible pages, uint64 [keys]; 0 where there is none."""
        ...

    def forget(self, group: int, keys: Keys) -> int: ...


class Record(Protocol):
    """What events say about a page, in the adapter's form. It does not change, and is compact: one is kept for each
    page that is announced."""

    def packed(self) -> bytes:
        """What the next process announces, as in the book."""
        ...


class Named(NamedTuple):
    """A page as a store names it.

    Attributes:
        lasts: whether the record has the same meaning in the next process.
    """

    record: Record
    lasts: bool


@dataclass(slots=True)
class _Page:
    """One page, and what routers know about it.

    Attributes:
        group: number of the KV group.
        record, lasts: see `Named`.
        generation: that of the page on disk; 0 if it is not there.
        there: the media that it is in.
        told: the media in which routers believe it to be.
        stores: number of its stores that have not ended.
        waits: the media whose queues of pages to be announced it is in.
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
        """What the book says of it."""
        return Entry(key, self.group, self.generation, self.record.packed())


class Told(NamedTuple):
    """One announcement of a page."""

    medium: Medium
    record: Record


@dataclass(slots=True)
class News:
    """The next announcements, in the order of the fields.

    Attributes:
        cleared: there are no pages any more.
        removed: pages that left a medium where they were announced.
        stored: pages that are in a medium now.
    """

    cleared: bool = False
    removed: list[Told] = field(default_factory=list)
    stored: list[Told] = field(default_factory=list)


class Announcements(CacheListener):
    """Records where pages are. One thread calls it.

    A page is known from its first store on, even if the store finds it already stored, or from the book of what an
    earlier process left on disk.

    Args:
        host: host memory.
        disk: the unit's own disks; None without them.
    """

    def __init__(self, host: Tier, disk: OwnDisks | None) -> None:
        self._host, self._disk = host, disk
        self._tiers: list[tuple[Medium, Tier]] = [(Medium.HOST, host)]
        if disk is not None:
            self._tiers.append((Medium.DISK, disk))
        self._in_use = 0
        """The media whose tiers were in use when `take` last looked."""
        self._pages: dict[bytes, _Page] = {}
        self._waiting: dict[Medium, deque[bytes]] = {medium: deque() for medium in MEDIA}
        """Pages to be announced, parents before their children; some of them may have left."""
        self._new = dict.fromkeys(MEDIA, 0)
        """How many pages this process's own stores and writes have added to each queue since the last `take`."""
        self._news = News()
        self._book: EventBook | None = None

    def open_book(self, path: Path, identity: bytes) -> None:
        """Begins to read what an earlier process left on the disks, and to note what the next one is to announce.
        Called before any page leaves the disks.

        Args:
            path: file beside these disks.
            identity: what packed records mean; see `EventBook`.
        """
        # All known pages, as an upper bound: to count those on disk, the book's thread would have to walk `_pages`.
        self._book = EventBook(path, identity, self._is_current, self._pages.__len__)

    def _is_current(self, entry: Entry) -> bool:
        """Whether the page of an entry is on disk in the entry's generation. The book's thread calls it. The words
        may differ: a store by its hash alone names a page that the file describes with its tokens.
        """
        page = self._pages.get(entry.key)
        return (
            page is not None
            and page.lasts
            and bool(page.there & Medium.DISK)
            and (page.group, page.generation) == (entry.group, entry.generation)
        )

    def close(self) -> None:
        """Writes what the next process will announce. Called when no page is written any more. Idempotent."""
        if self._book is not None:
            self._book.close()

    # --- stores ---

    def begin_store(self, group: int, keys: Keys, named: Sequence[Named]) -> list[bytes]:
        """Called before any page of a store can become visible; returns what `end_store` takes.

        Args:
            keys: keys of the pages that events can name, one per entry of `named`.
        """
        rows = [row.tobytes() for row in keys]
        for key, (record, lasts) in zip(rows, named, strict=True):
            self._pages.setdefault(key, _Page(group, record, lasts)).stores += 1
        return rows

    def note_present(self, group: int, keys: Keys) -> None:
        """Notes which pages of a store that has begun are there already."""
        rows = [row.tobytes() for row in keys]
        for medium, tier in self._tiers:
            if rows and tier.in_use:
                there = tier.present(group, keys).tolist()
                self._appeared((key for key, is_there in zip(rows, there, strict=True) if is_there), medium)

    def end_store(self, rows: Iterable[bytes]) -> None:
        """Called when a store has ended: no more of its pages will become visible."""
        for key in rows:
            page = self._pages[key]
            page.stores -= 1
            self._drop_if_unused(key, page)

    def _drop_if_unused(self, key: bytes, page: _Page) -> None:
        if not page.there and not page.stores:
            del self._pages[key]

    # --- what the manager notifies of ---

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
        # First, because the book's thread leaves out what is not on disk when it shrinks the file.
        self._appeared(rows, Medium.DISK)
        if entries and self._book is not None:
            self._book.put(entries)

    def on_unwrite(self, group: int, keys: Keys) -> None:
        if self._book is not None:
            gone = [row.tobytes() for row in keys]
            if self._book.is_settled:
                gone = [key for key in gone if (page := self._pages.get(key)) is not None and page.lasts]
            # Until the book is settled, it may name pages that are not in `_pages` yet, so every key is dropped.
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
        """Adds the page to the medium's queue, unless it is there or announced already; returns whether it did."""
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
        """Called when the engine has told routers that it has no block any more: the pages are announced again, some of
        them with each `take`."""
        for key, page in self._pages.items():
            page.told = 0
            for medium in MEDIA:
                if page.there & medium:
                    self._wait(key, page, medium)
        self._news = News(cleared=self._news.cleared)

    def _turned(self, medium: Medium) -> None:
        """Called when the tier comes into use or goes out of use."""
        for key, page in self._pages.items():
            if page.told & medium:
                page.told &= ~medium
                self._news.removed.append(Told(medium, page.record))
            elif page.there & medium:
                self._wait(key, page, medium)

    @property
    def has_more(self) -> bool:
        """Whether `take` would announce more, now or once more of the book has been read."""
        is_read = self._book is None or self._book.is_settled
        return any(self._waiting.values()) or not (is_read or self._disk is None or not self._disk.in_use)

    def _find(self, unpacked: Callable[[bytes], Record]) -> None:
        """Takes pages from the book that an earlier process left and that are still there."""
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
        """Takes those of these pages that are on disk or in host memory.

        After a crash the index may still name an older page, of a key that left and was stored again. Its place may
        have another page by now; if it has not, a router would not know of what is served. So the disks forget such a
        page.
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
                # This process stores the page too, and could not tell that its record lasts.
                page.record, page.lasts = unpacked(each.words), True
                if is_on_disk and page.generation:  # written by this process, without an entry
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
        """Takes the changes since the last call. If many pages are to be announced that are not new, some wait for the
        next call: for each medium, a call takes as many pages as are new there, and MOST_STORED more. Pages of a tier
        that is out of use count as removed, and are announced again once it is back.

        Args:
            unpacked: makes a record from what an earlier process packed.
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
