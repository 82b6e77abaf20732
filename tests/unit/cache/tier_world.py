"""The block indexes of several tiers, and a model of lookups in them. Indexes and model have the same pages."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from flexkv.c_ext import BlockIndex, Found, TierLookup
from flexkv.facts.keys import Keys
from tests.unit.cache.tier_model import Answer, Ask, Page, TierModel

NOW = 1000
SEGMENTS = ((1, 1), (1, 3), (2, 40), (60, 70), (5000, 5000))
"""Pairs of a shortest and a longest length, in blocks. A tier alternately has and lacks parts of a chain. The length of
each part lies between the two lengths of a pair.
"""


class TierWorld:
    """Tiers with random content. Each tier exists twice: as a real index, and in a model to compare it with.

    Args:
        blocks: number of blocks of the chain that lookups ask for.
    """

    def __init__(self, rng: random.Random, model: type[TierModel], blocks: int) -> None:
        self.rng, self.blocks = rng, blocks
        self.tiers, self.groups = rng.randint(1, 4), rng.randint(1, 3)
        self.model = model(self.tiers, self.groups)
        self.indexes = [BlockIndex([2 * blocks + 1] * self.groups) for _ in range(self.tiers)]
        self.lookup = TierLookup(self.indexes, self.groups)
        data = np.random.default_rng(rng.randrange(2**32))
        shared = rng.random() < 0.5
        chains = [data.integers(0, 256, (blocks, 16), np.uint8) for _ in range(self.groups)]
        self.keys: list[Keys] = [chains[0] if shared else chain for chain in chains]
        self.rows = [[row.tobytes() for row in keys] for keys in self.keys]
        self.held: list[tuple[Found, Answer]] = []
        for group in range(self.groups):
            for index in self.indexes:
                index.grow(group, 2 * blocks + 1)
            if rng.random() < 0.4:
                self._deal(group)
            else:
                for tier in range(self.tiers):
                    self._fill(tier, group)

    # --- pages ---

    def _fill(self, tier: int, group: int) -> None:
        """Inserts parts of the chain into a tier. All blocks of a part have the same state."""
        rng = self.rng
        if tier > 0 and rng.random() < 0.1:
            return
        shortest, longest = rng.choice(SEGMENTS)
        at = 0 if rng.random() < 0.7 else rng.randint(0, 8)
        parts: list[tuple[int, int]] = []
        while at < self.blocks:
            end = min(self.blocks, at + rng.randint(shortest, longest))
            parts.append((at, end))
            # In three of ten cases there is no gap, and the next part, which may have a different state, follows
            # directly.
            at = end + (0 if rng.random() < 0.3 else rng.randint(shortest, longest))
        if rng.random() < 0.3:
            rng.shuffle(parts)
        faults = rng.choice((0.0, 0.05, 0.3))
        for first, end in parts:
            state = rng.choice(("filling", "storing", "expires")) if rng.random() < faults else "ready"
            self.insert(tier, group, first, end, state)

    def _deal(self, group: int) -> None:
        """Inserts the complete chain in short parts, each into some of the tiers, so that every part is in at least one
        tier.
        """
        rng, longest = self.rng, self.rng.choice((1, 3, 40))
        at = 0
        while at < self.blocks:
            end = min(self.blocks, at + rng.randint(1, longest))
            for tier in rng.sample(range(self.tiers), rng.randint(1, self.tiers)):
                self.insert(tier, group, at, end, "ready" if rng.random() < 0.999 else "expires")
            at = end

    def insert(self, tier: int, group: int, first: int, end: int, state: str) -> None:
        index, rows = self.indexes[tier], self.rows[group][first:end]
        filler = self.rng.randint(1, 2**40) if state == "filling" else 0
        done = index.insert(group, self.keys[group][first:end], end - first, filler)
        pages = [
            Page(tier, group, rows[position], int(entry), int(slot), False, filler)
            for position, entry, slot in zip(*done[:3], strict=True)
        ]
        for page in pages:
            self.model.pages[tier, group, page.key] = page
        self.model.lease(pages)
        if state == "expires":
            times = [self.rng.choice((0, NOW - 1, NOW, NOW + 1)) for _ in pages]
            index.set_expiry(done[1], np.array(times, np.uint64))
            for page, time in zip(pages, times, strict=True):
                page.expiry = time
        if state in ("ready", "expires"):
            self.finish(pages, [True] * len(pages))

    def finish(self, pages: Sequence[Page], ok: Sequence[bool]) -> None:
        if not pages:
            return
        index = self.indexes[pages[0].tier]
        index.finish(np.array([p.entry for p in pages], np.uint32), np.array(ok, np.uint8))
        self.model.end_lease(pages)
        for page, good in zip(pages, ok, strict=True):
            if page.gone:
                continue
            page.ready = good
            if not good:
                self.model.remove(page)

    def pending(self, tier: int) -> list[Page]:
        """Returns the pages of a random group that are pending in a tier."""
        group = self.rng.randrange(self.groups)
        return [p for p in self.model.pages.values() if (p.tier, p.group) == (tier, group) and not p.ready]

    def evict(self) -> None:
        tier, group = self.rng.randrange(self.tiers), self.rng.randrange(self.groups)
        for row in self.indexes[tier].evict(group, self.rng.choice((1, 5, 10_000))):
            page = self.model.pages[tier, group, row.tobytes()]
            assert not self.model.leases[tier][page.entry], f"evicted a leased page of tier {tier}"
            self.model.remove(page)

    # --- lookups ---

    def ask(self) -> Ask:
        rng = self.rng
        room = rng.choice((2**40, 2**40, self.groups * self.blocks // 2, rng.randint(-2, 40)))
        tiers = (
            range(self.tiers) if rng.random() < 0.7 else (t for t in range(self.tiers) if rng.random() < 0.7)
        )
        start = rng.choice((0, 0, rng.randint(0, self.blocks + 1)))
        rows = [r[: rng.randint(0, len(r))] if rng.random() < 0.1 else r for r in self.rows]
        return Ask(rows, start, room, frozenset(tiers), rng.choice((0, NOW)), rng.random() < 0.8)

    def look(self, ask: Ask) -> None:
        keys = [all_keys[: len(rows)] for all_keys, rows in zip(self.keys, ask.keys, strict=True)]
        mask = sum(1 << tier for tier in ask.tiers)
        found = self.lookup.look(keys, ask.start, ask.room_pages, mask, ask.now, ask.coming)
        answer = self.model.look(ask)
        for pages in answer.pages:
            self.model.lease([page for page, _ in pages])
        self.held.append((found, answer))
        assert found.cut == answer.cut
        expired = {(t, g, e) for t, g, entries in found.expired for e in entries.tolist()}
        assert expired == answer.expired
        assert sum(len(entries) for _, _, entries in found.expired) == len(expired)
        for group in range(self.groups):
            given = self.lookup.present(group, keys[group], mask, ask.now)
            assert given.tolist() == self.model.present(ask, group)

    def trim(self, found: Found, answer: Answer, blocks: int) -> None:
        self.lookup.trim(found, blocks)
        for group, pages in enumerate(answer.pages):
            self.model.end_lease([page for page, _ in pages[blocks:]])
            answer.pages[group] = pages[:blocks]
        answer.blocks, answer.ready_blocks = blocks, min(answer.ready_blocks, blocks)

    def release(self, found: Found, answer: Answer) -> None:
        self.lookup.release(found)
        for pages in answer.pages:
            self.model.end_lease([page for page, _ in pages])

    def take_over(self, found: Found, answer: Answer) -> None:
        """Takes over the leases of a result, as an op does, and ends them through the tiers' own indexes."""
        found.detach()
        for group, pages in enumerate(answer.pages):
            entries = found.entries(group)
            for tier, _, first, count in found.runs(group).tolist():
                self.indexes[tier].unpin(entries[first : first + count])
            self.model.end_lease([page for page, _ in pages])

    # --- checks ---

    def check(self) -> None:
        for tier, index in enumerate(self.indexes):
            index.check_integrity(np.array(self.model.leased(tier), np.uint32))
        for found, answer in self.held:
            self._check_found(found, answer)

    def _check_found(self, found: Found, answer: Answer) -> None:
        assert (found.blocks, found.ready_blocks) == (answer.blocks, answer.ready_blocks)
        ready = []
        for group, pages in enumerate(answer.pages):
            assert found.entries(group).tolist() == [page.entry for page, _ in pages]
            assert found.slots(group).tolist() == [page.slot for page, _ in pages]
            assert [tuple(run) for run in found.runs(group).tolist()] == answer.runs(group)
            usable = [page.tier == 0 and page.ready and not page.gone for page, _ in pages]
            ready.append(usable.index(False) if False in usable else len(usable))
            for tier, index in enumerate(self.indexes):
                mine = [page for page, _ in pages if page.tier == tier]
                entries = np.array([page.entry for page in mine], np.uint32)
                wanted = [0 if page.ready or page.gone else page.filler for page in mine]
                assert index.fillers(entries).tolist() == wanted
                assert index.expiries(entries).tolist() == [page.expiry for page in mine]
        assert self.lookup.count_ready(found) == min(ready)
