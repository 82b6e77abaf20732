"""A lookup finds the longest hit that groups with different rules can restore together. The tests compare it with a
search over every length.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from flexkv.c_ext import BlockIndex, BoundaryLookup, FoundLengths, GroupRule, TierLookup
from flexkv.errors import BlockRangeError, ConfigError, ContractError
from flexkv.facts.keys import Keys
from tests.soak import soak_rounds

NO_ENTRY = 2**32 - 1
ALL = 2**40
NOW = 1000


@dataclass(frozen=True)
class Rule:
    """A model of a group's rule, by its definition: `needs` computes token by token which pages a hit needs."""

    kind: str
    block: int
    reach: int = 0

    def needs(self, start: int, end: int) -> set[int]:
        tokens = range(start, end)
        if self.kind == "window":
            tokens = range(max(start, end - self.reach * self.block), end)
        elif self.kind == "chunk":
            tokens = range(max(start, end - end % self.reach), end)
        elif self.kind == "state":
            tokens = range(end - 1, end) if end > start else range(0)
        return {token // self.block for token in tokens}

    def most(self, start: int, end: int) -> int:
        pages = (end - start) // self.block
        if self.kind == "window":
            return min(pages, self.reach)
        if self.kind == "chunk":
            return min(pages, -(-self.reach // self.block))
        return min(pages, 1) if self.kind == "state" else pages

    def native(self) -> GroupRule:
        return GroupRule(self.kind, self.block, self.reach)


class WindowOneShort(Rule):
    def needs(self, start: int, end: int) -> set[int]:
        pages = super().needs(start, end)
        return pages - {min(pages)} if self.kind == "window" and len(pages) > 1 else pages


class StateBefore(Rule):
    def needs(self, start: int, end: int) -> set[int]:
        pages = super().needs(start, end)
        return {max(0, page - 1) for page in pages} if self.kind == "state" else pages


class ChunkAsWindow(Rule):
    def needs(self, start: int, end: int) -> set[int]:
        if self.kind != "chunk":
            return super().needs(start, end)
        return {token // self.block for token in range(max(start, end - self.reach), end)}


class FullFromTheMiddle(Rule):
    def needs(self, start: int, end: int) -> set[int]:
        pages = super().needs(start, end)
        return {page for page in pages if page >= max(pages) // 2} if self.kind == "full" and pages else pages


class World:
    """Groups with random rules, and tiers that hold random subsets of one request's pages."""

    def __init__(self, rng: random.Random, rule: type[Rule] = Rule) -> None:
        self.rng = rng
        sizes = rng.choice(([16], [16, 32], [16, 32, 64], [32, 544], [4]))
        self.rules = [self._rule(rng, rule, rng.choice(sizes)) for _ in range(rng.randint(1, 6))]
        self.alignment = int(np.lcm.reduce([rule.block for rule in self.rules])) * rng.choice((1, 1, 1, 2))
        self.tokens = self.alignment * rng.randint(0, 40) + rng.randint(0, self.alignment - 1)
        self.tiers = rng.randint(1, 3)
        counts = [self.tokens // rule.block for rule in self.rules]
        data = np.random.default_rng(rng.randrange(2**32))
        self.keys = [data.integers(0, 256, (count, 16), np.uint8) for count in counts]
        self.indexes = [BlockIndex([count + 1 for count in counts]) for _ in range(self.tiers)]
        self.lookup = TierLookup(self.indexes, len(self.rules))
        natives = [rule.native() for rule in self.rules]
        self.boundaries = BoundaryLookup(self.lookup, natives, self.alignment)
        self.state: list[list[dict[int, str]]] = []
        self.entries: list[list[dict[int, int]]] = []
        for index in self.indexes:
            self.state.append([])
            self.entries.append([])
            for group, count in enumerate(counts):
                index.grow(group, count + 1)
                self._fill(index, group, count)

    @staticmethod
    def _rule(rng: random.Random, rule: type[Rule], block: int) -> Rule:
        kind = rng.choice(("full", "full", "window", "window", "chunk", "state"))
        reach = {"window": rng.randint(1, 9), "chunk": rng.randint(1, 9 * block)}.get(kind, 0)
        return rule(kind, block, reach)

    def _fill(self, index: BlockIndex, group: int, count: int) -> None:
        rng, states, entries = self.rng, dict[int, str](), dict[int, int]()
        lacks = rng.choice((0.0, 0.02, 0.1, 0.4))
        # In a full group, pages that a store is writing to host memory are in no other tier here. The tests of
        # TierLookup cover the case that another tier has them too.
        full = self.rules[group].kind == "full"
        passed = (
            {page for page, state in self.state[0][group].items() if state == "storing"}
            if full and len(self.state) > 1
            else set()
        )
        for page in range(count):
            if page in passed or rng.random() < lacks:
                continue
            odd = rng.random() < 0.03
            state = rng.choice(("coming", "storing", "expired")) if odd else "ready"
            filler = 7 if state == "coming" else 0
            entry = index.insert(group, self.keys[group][page : page + 1], 1, filler)[1]
            if state in ("ready", "expired"):
                index.finish(entry, np.ones(1, np.uint8))
            if state == "expired":
                index.set_expiry(entry, np.full(1, NOW, np.uint64))
            states[page], entries[page] = state, int(entry[0])
        self.state[-1].append(states)
        self.entries[-1].append(entries)

    # --- the answer, by exhaustive search ---

    def where(self, group: int, page: int, mask: int, coming: bool) -> tuple[int, int] | None:
        """Returns the tier and the state in which a lookup should find a page, or None if it should not find it."""
        for tier in range(self.tiers):
            if not mask >> tier & 1:
                continue
            state = self.state[tier][group].get(page)
            if tier == 0 and state == "storing":
                return None
            if state == "ready" or (tier == 0 and state == "coming" and coming):
                return tier, int(state == "coming")
        return None

    def restorable(self, start: int, end: int, mask: int, coming: bool) -> bool:
        return all(
            self.where(group, page, mask, coming) is not None
            for group, rule in enumerate(self.rules)
            for page in rule.needs(start, end)
        )

    def lengths(self, start: int, room: int, mask: int, coming: bool, most: int) -> list[int]:
        ends = range(self.alignment, self.tokens + 1, self.alignment)
        longer = [end for end in ends if end > start]
        fits = [e for e in longer if sum(rule.most(start, e) for rule in self.rules) <= max(0, room)]
        found = [end for end in reversed(fits) if self.restorable(start, end, mask, coming)]
        return found[:most]

    def shared(self, start: int, room: int, mask: int, coming: bool) -> int:
        full = [(group, rule) for group, rule in enumerate(self.rules) if rule.kind == "full"]
        end = start
        for longer in range(start // self.alignment * self.alignment, self.tokens + 1, self.alignment):
            has_room = sum(rule.most(start, longer) for rule in self.rules) <= max(0, room)
            if full and longer > start and has_room:
                pages = [(group, page) for group, rule in full for page in rule.needs(start, longer)]
                if all(self.where(*page, mask, coming) is not None for page in pages):
                    end = longer
        return end

    # --- checks ---

    def pins(self) -> list[Counter[int]]:
        counts = []
        for index, groups in zip(self.indexes, self.entries, strict=True):
            ids = [entry for entries in groups for entry in entries.values()]
            counts.append(
                Counter(dict(zip(ids, index.pins_of(np.array(ids, np.uint32)).tolist(), strict=True)))
            )
        return counts

    def ask(self) -> None:
        rng = self.rng
        block = int(np.lcm.reduce([rule.block for rule in self.rules]))
        start = block * rng.randint(0, max(0, self.tokens // block)) if rng.random() < 0.4 else 0
        room = rng.choice((ALL, ALL, rng.randint(-1, 300)))
        mask = (1 << self.tiers) - 1 if rng.random() < 0.7 else rng.randrange(1 << self.tiers)
        coming, most = rng.random() < 0.7, rng.choice((1, 1, 3, 16))
        before = self.pins()
        found = self.boundaries.look(self.keys, start, room, mask, NOW, coming, most)
        expected = self.lengths(start, room, mask, coming, most)
        assert found.lengths == expected
        assert found.shared_tokens == self.shared(start, room, mask, coming)
        self.check_leases(found, start, expected, mask, coming, before)
        if not expected or rng.random() < 0.3:
            self.boundaries.release(found)
        else:
            kept = rng.choice(expected)
            self.boundaries.keep(found, kept)
            assert found.lengths == [kept]
            self.check_leases(found, start, [kept], mask, coming, before)
            self.boundaries.release(found)
        assert self.pins() == before

    def check_leases(
        self,
        found: FoundLengths,
        start: int,
        lengths: Sequence[int],
        mask: int,
        coming: bool,
        before: Sequence[Counter[int]],
    ) -> None:
        """Checks that exactly the needed pages are leased, once each, and are found in the right tier and state."""
        leased: list[Counter[int]] = [Counter() for _ in self.indexes]
        all_ready = True
        for group, rule in enumerate(self.rules):
            needed = {page for end in lengths for page in rule.needs(start, end)}
            first, entries, slots = found.first_page(group), found.entries(group), found.slots(group)
            seen = set()
            for tier, state, at, count in found.runs(group).tolist():
                for page in range(at, at + count):
                    number = page + start // rule.block
                    seen.add(number)
                    if rule.kind == "full":
                        # In a full group, all pages of a run come from one tier, even if an earlier tier also has some
                        # of these pages.
                        lies = self.state[tier][group][number]
                        assert mask >> tier & 1
                        assert lies == ("ready", "coming")[state]
                    else:
                        assert (tier, state) == self.where(group, number, mask, coming)
                    assert entries[page - first] == self.entries[tier][group][number]
                    slot = self.indexes[tier].slots_of(entries[page - first : page - first + 1])[0]
                    assert slots[page - first] == slot
                    leased[tier][int(entries[page - first])] += 1
                    all_ready &= (tier, state) == (0, 0)
            assert seen == needed
            gaps = np.flatnonzero(entries == NO_ENTRY) + first + start // rule.block
            assert not needed & set(gaps.tolist())
        assert found.ready == (all_ready and bool(lengths))
        for now, then, more in zip(self.pins(), before, leased, strict=True):
            assert all(now[entry] == then[entry] + more[entry] for entry in now)


CASES = 250


def run(seed: str, rule: type[Rule] = Rule) -> None:
    for case in range(CASES):
        world = World(random.Random(f"{seed}/{case}"), rule)
        for _ in range(6):
            world.ask()


@pytest.mark.soak
@soak_rounds()
def test_the_longest_hits_are_those_that_trying_finds(soak_round: int) -> None:
    run(f"{soak_round}")


@pytest.mark.parametrize("rule", [WindowOneShort, StateBefore, ChunkAsWindow, FullFromTheMiddle])
def test_a_wrong_rule_is_found(rule: type[Rule]) -> None:
    with pytest.raises(AssertionError):
        run("control", rule)


# --- single cases ---


def index_of(present: list[list[int]], blocks: int, keys: list[Keys]) -> BlockIndex:
    index = BlockIndex([blocks] * len(present))
    for group, pages in enumerate(present):
        index.grow(group, blocks)
        entries = index.insert(group, keys[group][pages], blocks)[1]
        index.finish(entries, np.ones(len(entries), np.uint8))
    return index


def keys_of(groups: int, blocks: int) -> list[Keys]:
    return list(np.random.default_rng(3).integers(0, 256, (groups, blocks, 16), np.uint8))


def test_a_window_that_lacks_a_page_rules_out_every_hit_that_needs_it() -> None:
    keys = keys_of(2, 12)
    index = index_of([list(range(12)), [0, 1, 2, 3, 5, 6, 8, 9, 10]], 12, keys)
    tiers = TierLookup([index], 2)
    lookup = BoundaryLookup(tiers, [GroupRule("full", 4), GroupRule("window", 4, 3)], 4)
    found = lookup.look(keys, 0, ALL, 1, NOW, most=4)
    assert found.lengths == [44, 16, 12, 8]
    assert found.runs(1).tolist() == [[0, 0, 0, 4], [0, 0, 8, 3]]
    lookup.keep(found, 16)
    assert (found.runs(0).tolist(), found.runs(1).tolist()) == ([[0, 0, 0, 4]], [[0, 0, 1, 3]])
    with pytest.raises(ContractError, match="none of the 1 lengths"):
        lookup.keep(found, 44)
    lookup.release(found)
    assert not index.pins_of(index.find(0, keys[0])).any()


def test_the_room_bounds_what_a_hit_needs() -> None:
    keys = keys_of(2, 12)
    index = index_of([list(range(12))] * 2, 12, keys)
    tiers = TierLookup([index], 2)
    lookup = BoundaryLookup(tiers, [GroupRule("full", 4), GroupRule("state", 4)], 8)
    for room, lengths, cut in ((13, [48], False), (12, [40], True), (9, [32], True), (2, [], False)):
        found = lookup.look(keys, 0, room, 1, NOW)
        assert (found.lengths, found.cut) == (lengths, cut), room
        lookup.release(found)


def test_bad_rules_and_calls_are_refused() -> None:
    keys = keys_of(1, 4)
    index = index_of([[0, 1, 2, 3]], 4, keys)
    tiers = TierLookup([index], 1)
    for arguments in (
        ("tail", 4),
        ("full", 0),
        ("full", 4, 1),
        ("window", 4),
        ("window", 4, -1),
        ("chunk", 2**31, 1),
    ):
        with pytest.raises(ConfigError):
            GroupRule(*arguments)
    rule = GroupRule("window", 4, 2)
    with pytest.raises(ConfigError, match="2 rules; the lookup has 1 groups"):
        BoundaryLookup(tiers, [rule, rule], 4)
    with pytest.raises(ConfigError, match="aligned to 6 tokens, and blocks of 4 in group 0"):
        BoundaryLookup(tiers, [rule], 6)
    with pytest.raises(ConfigError, match="aligned to 0"):
        BoundaryLookup(tiers, [rule], 0)
    lookup, other = BoundaryLookup(tiers, [rule], 4), BoundaryLookup(TierLookup([index], 1), [rule], 4)
    with pytest.raises(ContractError, match="keys of 2 groups"):
        lookup.look([keys[0], keys[0]], 0, ALL, 1, NOW)
    with pytest.raises(ContractError, match="from token 6 on"):
        lookup.look(keys, 6, ALL, 1, NOW)
    with pytest.raises(ContractError, match="mask 2"):
        lookup.look(keys, 0, ALL, 2, NOW)
    for call in (
        lambda: lookup.look(keys, -4, ALL, 1, NOW),
        lambda: lookup.look(keys, 0, ALL, 1, NOW, most=0),
        lambda: lookup.look(keys, 0, ALL, 1, NOW, most=65),
    ):
        with pytest.raises(BlockRangeError):
            call()
    found = lookup.look(keys, 0, ALL, 1, NOW)
    with pytest.raises(ContractError, match="another lookup"):
        other.release(found)
    lookup.release(found)
    with pytest.raises(ContractError, match="released before"):
        lookup.release(found)
    assert found.entries(0).shape == (0,)
    assert not index.pins_of(index.find(0, keys[0])).any()
