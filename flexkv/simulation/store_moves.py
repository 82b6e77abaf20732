"""Events of a remote tier in a simulation. Values in the store disappear, are written by other machines, or are damaged
or swapped. The store's answers are false or missing. The helper process dies while its ops are in flight."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from flexkv.cache.tiers.remote.tier import RemoteTier
from flexkv.facts.keys import Keys
from flexkv.remote.base import Presence
from flexkv.simulation.base import Key, Symbol, require
from flexkv.simulation.symbolic_store import Question, SymbolicStore, Value, keys_of
from flexkv.simulation.tier_moves import SimulatedMove, TierMoves
from flexkv.simulation.world import World
from flexkv.transfer.graph import OpKind, OpResult, TransferOp

LIE = 0.05
"""Share of pages for which the store's answer is false. A real store gives a false answer if the machine that holds a
value has died, or if a writer has not finished."""

UNANSWERED = 0.1
"""Share of questions that the store does not answer in time."""

NAMED_WEIGHTS = 0
"""Epoch of the weights for which the names in the store were made."""


class StoreMoves(TierMoves):
    """Carries out the ops of the remote tier, which is the last tier of its world.

    Args:
        orders_planned: a function to call when an answer may have planned fetches.
    """

    tier: RemoteTier  # type: ignore[assignment]

    def __init__(
        self, world: World, tier: RemoteTier, store: SymbolicStore, orders_planned: Callable[[], None]
    ) -> None:
        self.world = world
        self.tier = tier
        self.store = store
        self._orders_planned = orders_planned
        self._moving: dict[int, SimulatedMove] = {}

    def submit(self, op: TransferOp) -> None:
        if self.store.down_reason:
            # As in the real `RemotePlane`, an op that is submitted while the store is unreachable ends at once.
            self._enter(op, keys_of(op))
            each = self._moving[op.op_id]
            each.result = OpResult.cancelled(op.op_id, op.pages, self.store.down_reason)
            return
        self._enter(op, keys_of(op))

    @property
    def _epoch(self) -> int:
        return 0

    def _move_page(self, each: SimulatedMove, fails: bool) -> None:
        world, page, group = self.world, each.done, each.op.group
        slot, key = int(each.op.slots[page]), each.keys[page]
        each.done += 1
        if each.op.kind is OpKind.DISK_WRITE:
            if not fails and (group, key) not in self.store.values:
                self.store.values[group, key] = Value(key, world.engine.slot_content(group, slot))
        else:
            brought = None if fails else self.fetched(group, key)
            if brought is None and not fails:
                each.missing.add(page)
            fails = brought is None
            world.engine.fill_slot(group, slot, brought)
        if fails:
            each.failed.append(page)

    def fetched(self, group: int, key: bytes) -> list[Symbol] | None:
        """Returns the symbols of the page that the helper process gets for a key; None if the store has no intact value
        for the key. Removes a value whose trailer is damaged or has a different key."""
        value = self.store.values.get((group, key))
        if value is not None and value.sealed != key:
            del self.store.values[group, key]
            return None
        return None if value is None else value.symbols

    # --- events ---

    def answer(self) -> None:
        """Answers one of the open questions, sometimes falsely, or ends the question without an answer."""
        world, store = self.world, self.store
        if store.questions:
            question = world.random.choice(store.questions)
            store.answer(question, () if world.random.random() < UNANSWERED else self._presences(question))
        for op_id in self.tier.answers():
            world.manager.work.answered(op_id)
        world.model.evict(world.recorder.take_evicted())
        self._orders_planned()

    def _presences(self, question: Question) -> list[np.ndarray]:
        return [
            self._presence(group, keys, question.whole[group]) for group, keys in enumerate(question.keys)
        ]

    def _presence(self, group: int, keys: Keys, whole: bool) -> np.ndarray:
        found = []
        for row in keys:
            there = (group, row.tobytes()) in self.store.values
            lies = self.world.random.random() < LIE
            found.append(Presence.YES if there != lies else Presence.NO)
            if whole and found[-1] is Presence.NO:
                break
        return np.array(found, np.uint8)

    def spoil(self) -> None:
        """Deletes a value, damages its trailer, or replaces it with the value of another name."""
        random, values = self.world.random, self.store.values
        if not values:
            return
        name = random.choice(list(values))
        what = random.random()
        if what < 0.4:
            del values[name]
        elif what < 0.7:
            values[name] = Value(None, values[name].symbols)
        else:
            values[name] = values[random.choice(list(values))]

    def share(self) -> None:
        """Lets another machine write values for some keys of a live request."""
        world = self.world
        if not world.live:
            return
        request = world.random.choice(world.live)
        for group, keys in enumerate(request.keys):
            for key in keys:
                name: Key = (group, key)
                if name not in self.store.values and world.random.random() < 0.5:
                    symbol: Symbol = (NAMED_WEIGHTS, key)
                    self.store.values[name] = Value(key, [symbol] * len(world.engine.ranks))

    def cut(self) -> None:
        """Makes the store unreachable and kills its helper process, or restores both. Ops in flight end when the helper
        dies; their remaining pages do not move."""
        world, store = self.world, self.store
        if store.down_reason:
            store.down_reason = ""
            self.tier.poll(world.now_s)
            return
        store.lose()
        for each in self._moving.values():
            if each.result is None:
                self._write_some(each)
                each.result = self.ended_by_death(each)
        self.tier.poll(world.now_s)
        self.answer()

    def _write_some(self, each: SimulatedMove) -> None:
        """Simulates a page that was only partly received when the helper died: leaves garbage in the slot of the next
        page of a get in flight."""
        if each.op.kind is OpKind.DISK_READ and each.done < each.op.pages:
            self.world.engine.fill_slot(each.op.group, int(each.op.slots[each.done]), None)

    def ended_by_death(self, each: SimulatedMove) -> OpResult:
        return OpResult.cancelled(each.op.op_id, each.op.pages, "the helper has died")

    def lose(self) -> None:
        self.spoil()

    # --- end of a run ---

    @property
    def busy(self) -> bool:
        return bool(self._moving or self.store.questions)

    def check(self) -> None:
        """Checks that every value has the KV of its name's key and weights, unless its trailer is damaged or has a
        different key."""
        for (_, key), value in self.store.values.items():
            require(
                value.sealed != key or all(symbol == (NAMED_WEIGHTS, key) for symbol in value.symbols),
                "a value of the store holds another block's bytes, or other weights",
            )
