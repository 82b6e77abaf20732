"""The tier of pages in a store that machines share. The unit has no index of the store's pages. It asks the store which
pages it has, and the answers expire."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from flexkv.c_ext import BlockIndex
from flexkv.cache.base import NO_ENTRY, EntryIds, sharing
from flexkv.cache.tiers.contract import (
    NAMELESS,
    Plane,
    Prober,
    Series,
    Sink,
    Source,
    Tier,
    TierCounts,
    TierFacts,
    WriteMode,
)
from flexkv.cache.tiers.remote.key_memory import KeyMemory
from flexkv.cache.tiers.remote.series import remote_series
from flexkv.cache.tiers.tables import TierContext
from flexkv.cache.tiers.unexpired import unexpired_leading, unexpired_present
from flexkv.facts.keys import Keys, Rule
from flexkv.remote.base import Presence
from flexkv.remote.messages import MOST_ASKED
from flexkv.remote.plane import Presences, RemoteTotals
from flexkv.storage.tags import make_tags
from flexkv.transfer.graph import NO_BLOCKS, OpId, OpKind, Priority, SlotIds, TransferOp

KNOWN_PAGES = 131_072
"""Maximum number of pages, over all groups, that are remembered as being in the store. Remembering them takes about
10 MB. If there are more, the eviction policy removes pages from the record, and the store is asked about them again."""

HINT_S = 5
"""Seconds after which the store's answer that it has a page expires. The store itself keeps the page for longer than
that after such an answer (Mooncake: 10 s)."""

ABSENT_S = 2.0
"""Seconds for which the store is not asked again about a page that it did not have."""

LIAR_S = 10.0
"""Seconds for which a page counts as absent after the store claimed to have it and did not deliver it."""

REMEMBERED = 65_536
"""Maximum number of remembered keys of absent pages, and of remembered keys of pages that were not delivered."""


class RemoteLane(Plane, Protocol):
    """The plane that moves the tier's pages and asks the store about them; implemented by
    `flexkv.remote.plane.RemotePlane`."""

    totals: RemoteTotals

    @property
    def down_reason(self) -> str: ...
    def watch(self) -> None: ...
    def ask(self, op_id: OpId, keys: Sequence[Keys], whole: Sequence[bool]) -> bool: ...
    def answers(self) -> list[tuple[OpId, Presences]]: ...
    def remove(self, group: int, keys: Keys) -> None: ...
    def hold(self) -> None: ...
    def open_for(self, weights: bytes) -> None: ...


class RemoteTier(Tier, Source, Sink, Prober):
    """The remote tier. Its `presence` contains pages that the store recently said it has, and pages that this unit has
    written to the store.

    For lookups, an entry counts until the store's answer expires. For `known`, which decides which pages are written,
    an entry counts until the store says that it does not have the page.

    Args:
        facts: limits and modes; see `TierFacts`.
        probe_s: seconds for which a request waits for an answer.
        plane: moves the pages and asks the store.
    """

    def __init__(self, context: TierContext, facts: TierFacts, probe_s: float, plane: RemoteLane) -> None:
        self.facts, self.counts = facts, TierCounts()
        self.probe_s = probe_s
        self.plane = plane
        self.source = self.sink = self.prober = self
        self._lane = plane
        self._context = context
        self._whole = [spec.rule is Rule.FULL for spec in context.tables.specs]
        self._sizes = [spec.block_tokens for spec in context.tables.specs]
        owners = sharing(context.tables.specs)
        # All groups share one table of answers, even if they share no host slots.
        self.presence = BlockIndex([KNOWN_PAGES] * len(owners), context.policy, [0] * len(owners))
        self.presence.grow(0, KNOWN_PAGES)
        self._tokens = np.zeros(KNOWN_PAGES, np.int32)
        """Number of valid tokens of the page in each slot of the index."""
        self._absent = KeyMemory(ABSENT_S, REMEMBERED, context.tables.clock)
        self._liars = KeyMemory(LIAR_S, REMEMBERED, context.tables.clock)
        self._asked: dict[OpId, tuple[list[Keys], NDArray[np.int32] | None]] = {}
        self._off = ""
        """Why the tier is out of use until the process ends; empty if it is not."""
        self.down = plane.down_reason

    # --- questions ---

    def ask(self, op_id: OpId, asked: Sequence[Keys], tokens: NDArray[np.int32] | None = None) -> bool:
        if not self.in_use or not self._is_worth_asking(asked):
            return False
        only_one = len(asked) == 1 and self._whole[0]
        keys = [asked[0][:MOST_ASKED]] if only_one else self._shared_out(asked)
        # The candidates of a tail are independent: the store must look for all of them, not stop at the first absent
        # one.
        whole = self._whole if tokens is None else [False] * len(keys)
        if not self._lane.ask(op_id, keys, whole):
            return False
        self._asked[op_id] = (keys, tokens)
        return True

    def _shared_out(self, asked: Sequence[Keys]) -> list[Keys]:
        """Cuts the keys to the number that one question may contain. The keys of FULL groups are taken first. The other
        groups' keys fill the remaining number, the last key first, because the longest hit needs the last pages of
        these groups.
        """
        keys, room = list(asked), MOST_ASKED
        for group in sorted(range(len(asked)), key=lambda group: not self._whole[group]):
            of_group = asked[group] if self._whole[group] else asked[group][::-1]
            keys[group] = np.ascontiguousarray(of_group[:room])
            room -= len(keys[group])
        return keys

    def _is_worth_asking(self, asked: Sequence[Keys]) -> bool:
        """Whether there are keys to ask about, and no FULL group's first page is known to be absent."""
        wanted = False
        for group, keys in enumerate(asked):
            wanted |= len(keys) > 0
            if self._whole[group] and len(keys):
                first = keys[0].tobytes()
                if self._absent.holds(group, first) or self._liars.holds(group, first):
                    return False
        return wanted

    def answers(self) -> list[OpId]:
        ended = []
        for op_id, presences in self._lane.answers():
            asked = self._asked.pop(op_id, None)
            ended.append(op_id)
            if asked is None or self._off:
                continue
            keys, tokens = asked
            for group, found in enumerate(presences):
                self._take_answer(group, keys[group][: len(found)], tokens, found)
        return ended

    def _take_answer(
        self, group: int, keys: Keys, tokens: NDArray[np.int32] | None, found: NDArray[np.uint8]
    ) -> None:
        absent = found == Presence.NO
        if absent.any():
            if self._whole[group]:
                # Only the first absent page is recorded, because pages after it are useless without it.
                self._absent.add(group, keys[absent][:1])
            self._drop(group, keys[absent])
        there = (found == Presence.YES) & ~self._liars.has(group, keys)
        if not there.any():
            return
        if tokens is None:
            valid = np.full(np.count_nonzero(there), self._sizes[group], np.int32)
        else:
            valid = tokens[: len(found)][there]
        self._remember(group, keys[there], valid)

    def _remember(self, group: int, keys: Keys, tokens: NDArray[np.int32]) -> None:
        """Adds to the index pages that the store has, or renews their expiry."""
        known = self.presence.find(group, keys)
        positions, new, places, *_ = self.presence.insert(group, keys, len(keys))
        self._tokens[places] = tokens[positions]
        self.presence.finish(new, np.ones(len(new), np.uint8))
        entries = np.concatenate((known[known != NO_ENTRY], new))
        self.presence.set_expiry(entries, np.full(len(entries), self._now() + HINT_S, np.uint64))

    def _now(self) -> int:
        return max(0, int(self._context.tables.unix_s()))

    # --- lookups ---

    def leading(self, group: int, keys: Keys) -> EntryIds:
        return unexpired_leading(self.presence, group, keys, self._old)

    def present(self, group: int, keys: Keys) -> NDArray[np.bool_]:
        return unexpired_present(self.presence, group, keys, self._old)

    def _old(self, entries: EntryIds) -> NDArray[np.bool_]:
        """Returns for which entries the store's answer has expired, bool [entries]. Such entries stay in the index, so
        that their pages are not written again."""
        old: NDArray[np.bool_] = self.presence.expiries(entries) <= np.uint64(self._now())
        return old

    # --- fetches ---

    def plan_fetch(
        self,
        op_id: OpId,
        group: int,
        keys: Keys,
        entries: EntryIds,
        places: SlotIds,
        slots: SlotIds,
        layerwise: bool,
    ) -> TransferOp:
        return self._plan(op_id, OpKind.DISK_READ, Priority.LOAD, group, keys, places, slots)

    def _plan(
        self,
        op_id: OpId,
        kind: OpKind,
        priority: Priority,
        group: int,
        keys: Keys,
        places: SlotIds,
        slots: SlotIds,
    ) -> TransferOp:
        tags = make_tags(keys, 0, np.zeros(len(keys), np.uint64), self._tokens[places])
        return TransferOp(op_id, kind, group, priority, NO_BLOCKS, slots, places=places, tags=tags)

    def end_fetch(self, plan: TransferOp, entries: EntryIds, suspect: NDArray[np.bool_]) -> None:
        if suspect.any():
            self._liars.add(plan.group, self.presence.keys_of(entries[suspect]))
            self.presence.remove(entries[suspect])
        self.presence.unpin(entries, hit=True)

    def tokens_of(self, plan: TransferOp) -> NDArray[np.integer]:
        return self._tokens[plan.places]

    # --- writes ---

    def known(self, group: int, keys: Keys) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = self.presence.find(group, keys, ready_only=False) != NO_ENTRY
        return found

    def plan_write(
        self, op_id: OpId, group: int, keys: Keys, slots: SlotIds, tokens: NDArray[np.int32]
    ) -> tuple[NDArray[np.integer], EntryIds, TransferOp | None]:
        positions, entries, places, *_ = self.presence.insert(group, keys, len(keys))
        if not len(positions):
            return positions, entries, None
        self._tokens[places] = tokens[positions]
        op = self._plan(
            op_id, OpKind.DISK_WRITE, Priority.STORE, group, keys[positions], places, slots[positions]
        )
        return positions, entries, op

    def end_write(self, group: int, entries: EntryIds, good: NDArray[np.bool_]) -> NDArray[np.bool_]:
        written = self.presence.finish(entries, good.view(np.uint8)).view(np.bool_)
        there = entries[written]
        self.presence.set_expiry(there, np.full(len(there), self._now() + HINT_S, np.uint64))
        return written

    def used(self, group: int, keys: Keys) -> None:
        if self.facts.write is WriteMode.REUSE and not self.down:
            self._context.tables.reactions.reused(self._context.tier, group, keys)

    def room(self, group: int) -> int:
        return KNOWN_PAGES

    # --- removal ---

    def _drop(self, group: int, keys: Keys) -> int:
        entries = self.presence.find(group, keys)
        entries = entries[entries != NO_ENTRY]
        entries = entries[self.presence.pins_of(entries) == 0]
        return int(np.count_nonzero(self.presence.remove(entries)))

    def forget(self, group: int, keys: Keys) -> int:
        """Makes pages misses in this unit for LIAR_S seconds, and asks the store to remove them. Copies that other
        machines have already read from the store stay."""
        entries = self.presence.find(group, keys, ready_only=False)
        entries = entries[entries != NO_ENTRY]
        if len(keys) and not self._off:
            # Keys without an entry are included: this unit may have forgotten that it wrote them, or another machine
            # may have written them.
            self._liars.add(group, keys)
            self._lane.remove(group, keys)
        return int(np.count_nonzero(self.presence.remove(entries)))

    def hold(self, reason: str) -> None:
        super().hold(reason)
        self._lane.hold()

    def open_for(self, weights: bytes) -> None:
        self._lane.open_for(weights)
        super().open_for(weights)

    def begin_reset(self) -> None:
        # Nothing identifies the new weights, so no page may be exchanged with the store: its pages under this unit's
        # fingerprint were computed with the weights that the process loaded at its start.
        self.go_down(NAMELESS)
        self.presence.clear()
        self._absent.clear()
        self._liars.clear()

    def finish_reset(self, ends_s: float) -> None:
        """Does nothing. No page is served any more. Pages that are still being written were computed with the old
        weights, and their names in the store belong to those weights.
        """

    def go_down(self, reason: str) -> None:
        if not self._off:
            self.down = ""
            super().go_down(reason)
            self._off = reason

    def poll(self, now_s: float) -> None:
        self._lane.watch()
        if not self._off:
            self.down = self._lane.down_reason

    def gauges(self) -> Mapping[str, float]:
        page_s = self._context.tables.cost.fetch(self._context.tier).line()[1]
        return {"flexkv_remote_up": float(not self.down), "flexkv_remote_page_seconds": page_s}

    def totals(self) -> Mapping[Series, int]:
        return remote_series(self.counts, self._lane.totals)
