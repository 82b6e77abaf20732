"""Which of a unit's pages routers know to be in host memory and on the unit's own disks.

Routers count announcements, so a page is announced once per medium until it is removed there. An adapter turns what
`take` returns into its engine's events.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from flexkv.cache.base import CacheListener
from flexkv.facts.keys import Keys

GROUP = 0
"""The KV group of all pages: only units of one group are announced so."""

MOST_STORED = 512
"""Most announcements of stored pages that one `take` returns: about a millisecond of the engine's step."""


class Medium(enum.IntFlag):
    """Where a page is."""

    NONE = 0
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


@dataclass(slots=True)
class _Page:
    """
    Attributes:
        words: the page's data for events, in the adapter's form.
        there: where it is.
        told: where routers believe it to be.
        stores: stores of it that have not ended.
        waits: it is in the queue of pages to be announced.
    """

    words: bytes
    there: Medium = Medium.NONE
    told: Medium = Medium.NONE
    stores: int = 0
    waits: bool = False


class Told(NamedTuple):
    """One announcement of a page."""

    medium: Medium
    words: bytes


@dataclass(slots=True)
class News:
    """The next announcements, in the order of the fields.

    Attributes:
        cleared: no page is anywhere any more.
        removed: pages that left a medium where they were announced.
        stored: pages that are in a medium now.
    """

    cleared: bool = False
    removed: list[Told] = field(default_factory=list)
    stored: list[Told] = field(default_factory=list)


class Announcements(CacheListener):
    """Notes where pages are. One thread calls it.

    A page is known from the first store of it on, also if that finds it stored already. So what an earlier process left
    on disk is announced once a request has used it.

    Args:
        host: host memory.
        disk: the unit's own disks; None without them.
    """

    def __init__(self, host: Tier, disk: Tier | None) -> None:
        self._tiers = [(Medium.HOST, host)] + ([] if disk is None else [(Medium.DISK, disk)])
        self._in_use = Medium.NONE
        """The media whose tiers were in use when `take` last looked."""
        self._pages: dict[bytes, _Page] = {}
        self._stores: deque[list[bytes]] = deque()
        self._waiting: deque[bytes] = deque()
        """Pages to be announced, parents before their children; some of them may have left."""
        self._news = News()

    # --- stores, which end in the order in which they began ---

    def begin_store(self, keys: Keys, words: Sequence[bytes]) -> None:
        """Called before a store is planned.

        Args:
            keys: of the pages that events can name, one per entry of `words`.
        """
        rows = [row.tobytes() for row in keys]
        assert len(rows) == len(words)
        self._stores.append(rows)
        for key, of_page in zip(rows, words, strict=True):
            self._pages.setdefault(key, _Page(of_page)).stores += 1
        for medium, tier in self._tiers:
            if rows and tier.in_use:
                there = tier.present(GROUP, keys).tolist()
                self._appeared((key for key, is_there in zip(rows, there, strict=True) if is_there), medium)

    def end_store(self) -> None:
        """Called when the oldest store has ended: nothing more of it will become visible."""
        for key in self._stores.popleft():
            page = self._pages[key]
            page.stores -= 1
            self._drop_if_unused(key, page)

    def end_stores(self) -> None:
        while self._stores:
            self.end_store()

    def _drop_if_unused(self, key: bytes, page: _Page) -> None:
        if not page.there and not page.stores:
            del self._pages[key]

    # --- what the manager notifies of ---

    def on_publish(self, group: int, keys: Keys) -> None:
        self._appeared((row.tobytes() for row in keys), Medium.HOST)

    def on_evict(self, group: int, keys: Keys) -> None:
        self._left(keys, Medium.HOST)

    def on_write(self, group: int, keys: Keys, generations: NDArray[np.uint64]) -> None:
        self._appeared((row.tobytes() for row in keys), Medium.DISK)

    def on_unwrite(self, group: int, keys: Keys) -> None:
        self._left(keys, Medium.DISK)

    def on_reset(self, epoch: int) -> None:
        self._pages = {
            key: _Page(page.words, stores=page.stores) for key, page in self._pages.items() if page.stores
        }
        self._waiting.clear()
        self._news = News(cleared=True)

    def _appeared(self, keys: Iterable[bytes], medium: Medium) -> None:
        for key in keys:
            if (page := self._pages.get(key)) is not None:
                page.there |= medium
                self._wait(key, page)

    def _wait(self, key: bytes, page: _Page) -> None:
        if not page.waits:
            page.waits = True
            self._waiting.append(key)

    def _left(self, keys: Keys, medium: Medium) -> None:
        for row in keys:
            key = row.tobytes()
            if (page := self._pages.get(key)) is None:
                continue
            page.there &= ~medium
            if page.told & medium:
                page.told &= ~medium
                self._news.removed.append(Told(medium, page.words))
            self._drop_if_unused(key, page)

    # --- what routers are told ---

    def forget_told(self) -> None:
        """Called when the engine has told routers that it has no block any more: the pages are announced again, some of
        them with each `take`."""
        for key, page in self._pages.items():
            page.told = Medium.NONE
            if page.there:
                self._wait(key, page)
        self._news = News(cleared=self._news.cleared)

    def _turned(self, medium: Medium) -> None:
        """The tier came into use, or went out of it."""
        for key, page in self._pages.items():
            if page.told & medium:
                page.told &= ~medium
                self._news.removed.append(Told(medium, page.words))
            elif page.there & medium:
                self._wait(key, page)

    def take(self) -> News:
        """Takes the changes since the last call; pages beyond MOST_STORED wait for the next one. Pages of a tier that
        is out of use count as removed, and are announced again once it is back."""
        for medium, tier in self._tiers:
            if tier.in_use != bool(self._in_use & medium):
                self._in_use ^= medium
                self._turned(medium)
        news, self._news = self._news, News()
        while self._waiting and len(news.stored) < MOST_STORED:
            page = self._pages.get(self._waiting.popleft())
            if page is None:
                continue
            page.waits = False
            new = page.there & self._in_use & ~page.told
            news.stored += [Told(medium, page.words) for medium in MEDIA if new & medium]
            page.told |= new
        return news
