"""A router that knows only the announced pages predicts what a rank serves. This holds even when pages are evicted or
dropped, or the engine is flushed, reset or restarted. SGLang need not be installed.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from flexkv.adapters.common import announcements, event_book
from flexkv.adapters.common.announcements import Announcements, Medium, Named, Told
from flexkv.adapters.common.prompt_keys import GROUP
from flexkv.facts.keys import Keys
from tests.soak import soak_factor

from .conftest import World, hashes_of

REQUESTS = 120
PREFIXES, LONGEST = 6, 5
HOST_SLOTS, DISK_SLOTS = 12, 24
PAGE_BYTES = 4096
IMAGE_BYTES = 8192
WAIT_S = 60.0
IDENTITY = bytes(32)


class Page(str):
    """Stands for SGLang's record of a page: the page's hash, and a name that shows from which announcement the record
    came.
    """

    by: str

    def __new__(cls, page: str, by: str = "") -> Page:
        made = super().__new__(cls, page)
        made.by = by
        return made

    def packed(self) -> bytes:
        return f"{self}/{self.by}".encode()

    @classmethod
    def unpacked(cls, words: bytes) -> Page:
        return cls(*words.decode().split("/"))


class Router:
    """Keeps the pages that were announced to it, by medium. Fails if a page is announced twice, or removed without
    having been announced, because the routers of Dynamo and llm-d count announcements.

    Args:
        misses_one: for control tests. The router ignores one event that reports a removal: the one that removes the
            first page of a prompt from the last medium that has it.
    """

    def __init__(self, misses_one: bool = False) -> None:
        self.has: dict[Medium, set[str]] = {Medium.HOST: set(), Medium.DISK: set()}
        self.removals = 0
        self._misses_one = misses_one
        self._missed: Told | None = None

    def clear(self) -> None:
        for pages in self.has.values():
            pages.clear()

    def hear(self, told: Announcements) -> None:
        news = told.take(Page.unpacked)
        if news.cleared:
            self.clear()
        for each in news.removed:
            self._removed(each)
        for medium, page in news.stored:
            assert isinstance(page, Page)
            if self._missed is not None and page == self._missed.record:
                self.has[self._missed.medium].discard(page)
                self._missed = None
            assert page not in self.has[medium], f"announced twice: {medium!r}"
            self.has[medium].add(page)

    def _removed(self, each: Told) -> None:
        self.removals += 1
        page = each.record
        assert isinstance(page, Page)
        assert page in self.has[each.medium], f"never announced: {each.medium!r}"
        (other,) = self.has.keys() - {each.medium}
        is_last = page not in self.has[other]
        if self._misses_one and self._missed is None and is_last and page in FIRSTS:
            self._missed = each
        else:
            self.has[each.medium].remove(page)

    def predicted(self, hashes: list[str]) -> int:
        known = self.has[Medium.HOST] | self.has[Medium.DISK]
        return next((at for at, page in enumerate(hashes) if page not in known), len(hashes))


def chain(prefix: int, parted: int, turn: int, pages: int) -> list[str]:
    """Returns the hashes of the pages of a prompt that shares its first `parted` pages with other prompts."""
    common = hashes_of(*((prefix, at) for at in range(parted)))
    return common + hashes_of(*((prefix, parted, turn, at) for at in range(pages - parted)))


FIRSTS = {
    page
    for prefix in range(PREFIXES)
    for page in [*chain(prefix, 1, 0, 1), *chain(prefix, 0, 1, 1), *chain(prefix, 0, 2, 1)]
}
"""The first page of every prompt that the tests draw."""


class Announced:
    """A rank with little host memory and a disk, its router, and random requests."""

    def __init__(
        self, worlds: Callable[..., World], folder: Path, router: Router, seed: int, **settings: Any
    ) -> None:
        disk: dict[str, Any] = {
            "host__bytes": HOST_SLOTS * PAGE_BYTES,
            "disk__folders": str(folder),
            "disk__bytes_per_folder": DISK_SLOTS * IMAGE_BYTES + (64 << 10),
            "disk__compute_if_faster": False,
        }
        self.world = worlds(**disk | settings)
        self.router = router
        self.told = self.world.cache.announce(IDENTITY)
        self.shortened = 0
        """Number of lookups that lost pages that they were about to read from disk."""
        self.resets = 0
        self._random = random.Random(seed)

    def prompt(self) -> list[str]:
        pages = self._random.randint(1, LONGEST)
        return chain(
            self._random.randrange(PREFIXES),
            self._random.randint(0, pages),
            self._random.randint(1, 2),
            pages,
        )

    def store(self, hashes: list[str]) -> bool:
        """Offloads a node's pages as SGLang's linker does, and waits for the end of the offload. Returns whether the
        pages were stored.
        """
        named = [Named(Page(page), True) for page in hashes]
        keys = self.world.cache.keys(hashes)
        rows = self.told.begin_store(GROUP, keys, named)
        self.told.note_present(GROUP, keys)
        stored = self.world.store(hashes, list(range(1, len(hashes) + 1)))
        self.told.end_store(rows)
        return stored

    def write_all(self) -> None:
        """Waits until the disk has written all pages."""
        ends_s = time.monotonic() + WAIT_S
        while self.world.cache.disk_busy:
            assert time.monotonic() < ends_s
            self.world.cache.poll()

    def settle(self) -> None:
        """Waits until the disk has written all pages, and passes all announcements to the router."""
        self.write_all()
        ends_s = time.monotonic() + WAIT_S
        while self.told.has_more or self.told._news.removed or self.told._news.cleared:
            assert time.monotonic() < ends_s
            self.router.hear(self.told)

    def served(self, hashes: list[str]) -> int:
        pages = self.world.cache.match("r", self.world.cache.keys(hashes), WAIT_S)
        self.world.cache.manager.release("r")
        return pages

    def serve_one(self) -> tuple[int, int]:
        """Serves a request and stores it. Returns the number of pages that the router predicted, and the number that
        was served.

        A lookup that reads from disk evicts pages from host memory. If an evicted page is written to a full disk, the
        disk may evict a page of this prompt. The router then predicts again from the new announcements, and `shortened`
        counts the case.
        """
        hashes = self.prompt()
        self.settle()
        predicted, served = self.router.predicted(hashes), self.served(hashes)
        if predicted > served:
            self.settle()
            predicted = self.router.predicted(hashes)
            self.shortened += 1
        self.store(hashes)
        return predicted, served

    def disturb(self) -> None:
        drawn = self._random.random()
        if drawn < 0.05:
            self.world.cache.manager.forget(0, self.world.cache.keys(self.prompt()))
        elif drawn < 0.06:
            self.world.cache.manager.reset()
            self.resets += 1
        elif drawn < 0.08:
            self.router.clear()
            self.told.forget_told()


Make = Callable[..., Announced]


@pytest.fixture
def make(worlds: Callable[..., World], tmp_path: Path) -> Make:
    def made(seed: int = 0, misses_one: bool = False, **settings: Any) -> Announced:
        return Announced(worlds, tmp_path, Router(misses_one), seed, **settings)

    return made


@pytest.mark.soak
@pytest.mark.parametrize("mode", ["through", "back", "evict"])
def test_a_router_predicts_what_is_served(make: Make, mode: str) -> None:
    announced = make(disk__mode=mode)
    hits = 0
    for _ in range(REQUESTS * soak_factor()):
        predicted, served = announced.serve_one()
        assert predicted == served
        hits += served > 0
        announced.disturb()
    assert hits > REQUESTS / 4
    assert announced.router.removals > REQUESTS / 4
    assert announced.shortened <= (REQUESTS * soak_factor() / 20 if mode == "evict" else 0)


def test_control_a_removal_that_is_not_heard_is_seen(make: Make) -> None:
    announced = make(misses_one=True)
    pairs = [announced.serve_one() for _ in range(REQUESTS)]
    assert any(predicted > served for predicted, served in pairs)


@pytest.mark.soak
@pytest.mark.parametrize("mode", ["through", "evict"])
def test_a_router_predicts_what_is_served_over_restarts(make: Make, mode: str) -> None:
    """Over several restarts, a router predicts exactly what is served, from the announcements of the running process
    alone.
    """
    is_left = False  # whether the previous process left pages that this process finds
    for number in range(1 + 2 * soak_factor()):
        announced = make(number, disk__mode=mode)
        announced.settle()
        assert bool(announced.router.has[Medium.DISK]) == is_left
        for _ in range(REQUESTS // 2):
            predicted, served = announced.serve_one()
            assert predicted == served
            announced.disturb()
        announced.world.cache.close()
        is_left = not announced.resets  # pages computed with new weights cannot be found later


def test_pages_of_an_earlier_process_are_announced(make: Make) -> None:
    first, prompt = make(), chain(0, 3, 1, 3)
    first.store(prompt)
    first.settle()
    assert first.router.has == {Medium.HOST: set(prompt), Medium.DISK: set(prompt)}
    first.world.cache.close()
    second = make()
    second.settle()
    assert second.router.has == {Medium.HOST: set(), Medium.DISK: set(prompt)}
    assert second.served(prompt) == 3
    second.settle()
    assert second.router.has == {Medium.HOST: set(prompt), Medium.DISK: set(prompt)}


def test_pages_that_left_or_that_the_next_process_cannot_name_are_not_announced(make: Make) -> None:
    first, prompt = make(), chain(0, 3, 1, 3)
    keys = first.world.cache.keys(prompt)
    rows = first.told.begin_store(
        GROUP, keys, [Named(Page(page), lasts=at > 0) for at, page in enumerate(prompt)]
    )
    assert first.world.store(prompt, [1, 2, 3])
    first.told.end_store(rows)
    first.settle()
    assert first.router.has[Medium.DISK] == set(prompt)
    first.world.cache.manager.forget(0, keys[2:])
    first.settle()
    first.world.cache.close()
    second = make()
    second.settle()
    assert second.router.has == {Medium.HOST: set(), Medium.DISK: {prompt[1]}}


def test_words_of_another_meaning_are_not_announced(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    first = make()
    first.store(chain(0, 3, 1, 3))
    first.settle()
    first.world.cache.close()
    monkeypatch.setattr(f"{__name__}.IDENTITY", bytes([1] * 32))
    second = make()
    second.settle()
    assert second.router.has == {Medium.HOST: set(), Medium.DISK: set()}


def test_a_page_on_both_media_leaves_each(make: Make) -> None:
    announced, prompt = make(), chain(0, 2, 1, 2)
    announced.store(prompt)
    announced.settle()
    announced.world.cache.manager.hub.evict(0, HOST_SLOTS)
    announced.settle()
    assert announced.router.has == {Medium.HOST: set(), Medium.DISK: set(prompt)}
    announced.world.cache.manager.forget(0, announced.world.cache.keys(prompt))
    announced.settle()
    assert announced.router.has == {Medium.HOST: set(), Medium.DISK: set()}
    assert announced.told._pages == {}


def test_pages_on_disks_that_are_out_of_use_leave(make: Make) -> None:
    announced, prompt = make(), chain(0, 2, 1, 2)
    announced.store(prompt)
    announced.settle()
    announced.world.cache.manager.tiers[1].go_down("a test takes them away")
    announced.router.hear(announced.told)
    assert announced.router.has == {Medium.HOST: set(prompt), Medium.DISK: set()}
    announced.world.cache.manager.hub.evict(0, HOST_SLOTS)
    announced.router.hear(announced.told)
    assert announced.router.predicted(prompt) == announced.served(prompt) == 0


def test_pages_on_a_disk_that_waits_for_its_weights_are_announced_with_these(make: Make) -> None:
    announced, prompt = make(), chain(0, 2, 1, 2)
    announced.store(prompt)
    announced.settle()
    disk = announced.world.cache.manager.tiers[1]
    disk.hold("a test withholds the name")
    announced.router.hear(announced.told)
    assert announced.router.has == {Medium.HOST: set(prompt), Medium.DISK: set()}
    disk.held = ""
    announced.settle()
    announced.router.hear(announced.told)
    assert announced.router.has == {Medium.HOST: set(prompt), Medium.DISK: set(prompt)}


def test_a_page_that_left_before_anybody_was_told_is_not_mentioned(make: Make) -> None:
    announced = make()
    announced.store(hashes_of(1))
    announced.world.cache.manager.reset()
    announced.told.take(Page.unpacked)
    announced.store(hashes_of(2))
    announced.world.cache.manager.forget(0, announced.world.cache.keys(hashes_of(2)))
    news = announced.told.take(Page.unpacked)
    assert (news.removed, news.stored) == ([], [])


def test_pages_that_events_cannot_name_are_left_out(make: Make) -> None:
    announced = make()
    rows = announced.told.begin_store(GROUP, announced.world.cache.keys([]), [])
    assert announced.world.store(hashes_of(1), [1])
    announced.told.end_store(rows)
    announced.settle()
    assert announced.router.has == {Medium.HOST: set(), Medium.DISK: set()}
    assert announced.told._pages == {}


def stored_in(news: announcements.News, medium: Medium) -> list[str]:
    return [str(told.record) for told in news.stored if told.medium is medium]


def test_new_pages_are_announced_at_once_and_others_in_several_steps_parents_first(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announcements, "MOST_STORED", 3)
    announced, prompt = make(), chain(0, 5, 1, 5)
    announced.store(prompt)
    assert stored_in(announced.told.take(Page.unpacked), Medium.HOST) == prompt
    announced.settle()
    announced.told.forget_told()
    parts = [announced.told.take(Page.unpacked) for _ in range(3)]
    for medium in announcements.MEDIA:
        assert [stored_in(news, medium) for news in parts] == [prompt[:3], prompt[3:], []]
    assert not announced.told.has_more


def test_many_new_pages_in_host_memory_keep_none_on_disk_waiting(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announcements, "MOST_STORED", 1)
    announced, first = make(), chain(0, 5, 1, 5)
    announced.store(first)
    announced.write_all()
    second = chain(1, 1, 1, 1)
    announced.store(second)
    news = announced.told.take(Page.unpacked)
    assert stored_in(news, Medium.HOST) == first + second
    assert stored_in(news, Medium.DISK) == first


def waiting(announced: Announced) -> int:
    """Makes flexkv announce all pages again. Returns the number of pages on disk that wait to be announced."""
    announced.told.forget_told()
    return len(announced.told._waiting[Medium.DISK])


def test_new_pages_in_host_memory_make_no_room_for_old_ones_on_disk(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announcements, "MOST_STORED", 1)
    announced = make(host__bytes=2 * HOST_SLOTS * PAGE_BYTES)
    announced.store(chain(0, 5, 1, 5))
    announced.settle()
    assert waiting(announced) == 5
    new = chain(1, 3, 1, 3)
    announced.store(new)
    parts = [announced.told.take(Page.unpacked) for _ in range(2)]
    assert [len(stored_in(news, Medium.HOST)) for news in parts] == [1 + len(new), 1]
    assert [len(stored_in(news, Medium.DISK)) for news in parts] == [1, 1]


def test_pages_that_wait_already_are_not_new_to_another_store(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announcements, "MOST_STORED", 1)
    announced, prompt = make(), chain(0, 5, 1, 5)
    announced.store(prompt)
    announced.settle()
    assert waiting(announced) == 5
    announced.store(prompt)
    assert stored_in(announced.told.take(Page.unpacked), Medium.DISK) == prompt[:1]


def test_announced_pages_that_are_stored_again_do_not_wait(make: Make) -> None:
    announced, prompt = make(), chain(0, 5, 1, 5)
    announced.store(prompt)
    announced.settle()
    announced.store(prompt)
    assert not announced.told.has_more


@pytest.mark.parametrize("lasts", [True, False])
def test_a_found_page_stays_in_the_file_if_a_store_names_it_in_another_way(
    make: Make, monkeypatch: pytest.MonkeyPatch, lasts: bool
) -> None:
    """If a store describes a page that an earlier process has announced, the page's earlier record remains in the file.
    The new description may be of less use: lazy stores know only the hashes of pages, so their records of pages contain
    no tokens. For a page in a caller's namespace, the record is of no use to later processes.
    """
    first, prompt = make(), chain(0, 3, 1, 3)
    first.store(prompt)
    first.settle()
    first.world.cache.close()
    second = make()
    keys = second.world.cache.keys(prompt)
    # The store begins before the second process has read the pages' records in the file.
    rows = second.told.begin_store(GROUP, keys, [Named(Page(page, "another"), lasts) for page in prompt])
    second.settle()
    assert second.router.has[Medium.DISK] == set(prompt)
    second.told.end_store(rows)
    monkeypatch.setattr(event_book, "SLACK_RECORDS", 0)
    monkeypatch.setattr(event_book, "RECORDS_PER_PAGE", 0)
    second.store(hashes_of(7))  # the record of this page makes the file too long, so it is rewritten
    second.settle()
    second.world.cache.close()
    third = make()
    third.settle()
    assert third.router.has[Medium.DISK] == {*prompt, *hashes_of(7)}


def test_a_found_page_that_was_written_anew_has_an_entry_for_the_next_process(make: Make) -> None:
    first, prompt = make(), chain(0, 3, 1, 3)
    first.store(prompt)
    first.settle()
    first.world.cache.close()
    second = make()
    keys = second.world.cache.keys(prompt)
    rows = second.told.begin_store(GROUP, keys, [Named(Page(page), lasts=False) for page in prompt])
    second.world.cache.manager.forget(GROUP, keys)
    assert second.world.store(prompt, [1, 2, 3])
    second.told.end_store(rows)
    second.write_all()
    second.settle()
    assert second.router.has[Medium.DISK] == set(prompt)
    second.world.cache.close()
    third = make()
    third.settle()
    assert third.router.has[Medium.DISK] == set(prompt)


class HasNone:
    """Stands for a disk tier from which all pages have been removed."""

    in_use = True

    def generations(self, group: int, keys: Keys) -> NDArray[np.uint64]:
        return np.zeros(len(keys), np.uint64)


def test_a_found_page_that_only_host_memory_still_has_is_announced_there(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, prompt = make(), chain(0, 3, 1, 3)
    first.store(prompt)
    first.settle()
    first.world.cache.close()
    second = make()
    assert second.served(prompt) == 3
    monkeypatch.setattr(second.told, "_disk", HasNone())
    second.settle()
    assert second.router.has == {Medium.HOST: set(prompt), Medium.DISK: set()}
