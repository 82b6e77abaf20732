"""A second implementation of the rules of a cache manager, with sets and dictionaries instead of native code and
arrays.

The simulation passes every call of the manager, and the manager's answer, to the model. The model raises `RuleBroken`
if the answer breaks a rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flexkv.cache.base import Completion, GroupSpec, ManagerLimits, OpRole, sharing
from flexkv.facts.keys import Rule
from flexkv.simulation.base import NO_SLOT, Key, require
from flexkv.simulation.failure_causes import causes_by_page
from flexkv.simulation.model_ops import ModelFailure, ModelOp
from flexkv.transfer.graph import FailureCause, OpResult, OpStatus


class Model:
    """The state that a manager must have according to the rules."""

    def __init__(self, specs: Sequence[GroupSpec], step_tokens: int, limits: ManagerLimits) -> None:
        self.specs = specs
        self.step_tokens = step_tokens
        self.limits = limits
        self.visible: dict[Key, int] = {}
        self.pending: dict[Key, int] = {}
        self.leases: dict[str, list[tuple[Key, int]]] = {}
        self.ops: dict[int, ModelOp] = {}
        self.disk_ops: dict[int, ModelOp] = {}
        self.failures: dict[str, ModelFailure] = {}
        self.expiry: dict[Key, int] = {}
        self.taken_over = 0
        self.waiting_slots: Callable[[int], set[int]] = lambda group: set()
        self.up = [0] * len(specs)
        self._owner = sharing(specs)
        self.epoch = 0

    # --- slots that must not be evicted -------------------------------------------------------------------------------

    def shares(self, group: int) -> list[int]:
        """Returns the groups that use the same slots as this group, including the group itself."""
        return [other for other, owner in enumerate(self._owner) if owner == self._owner[group]]

    def held_slots(self, group: int) -> set[int]:
        """Returns the slots that ops in flight or leases use, and the slots whose pages were fetched for waiting
        requests."""
        sharing = self.shares(group)
        held = {slot for lease in self.leases.values() for key, slot in lease if key[0] in sharing}
        for op in [*self.ops.values(), *self.disk_ops.values()]:
            held.update(slot for key, slot in zip(op.keys, op.slots, strict=True) if key[0] in sharing)
        return held.union(*map(self.waiting_slots, sharing)) - {NO_SLOT}

    def visible_slots(self, group: int) -> set[int]:
        """Returns the slots with visible pages of this group, or of a group that shares its slots."""
        sharing = self.shares(group)
        return {slot for key, slot in self.visible.items() if key[0] in sharing}

    def load_pages(self) -> int:
        leased = sum(map(len, self.leases.values()))
        return leased + sum(len(op.keys) for op in self.ops.values() if op.role is OpRole.LOAD)

    def store_pages(self) -> int:
        return sum(len(op.keys) for op in self.ops.values() if op.role is OpRole.STORE)

    # --- lookups ------------------------------------------------------------------------------------------------------

    def needed(self, group: int, start: int, steps: int) -> range:
        """Returns which of the group's pages a hit needs, by index in the request. The hit has `steps` steps, after the
        first `start` steps of the request."""
        spec = self.specs[group]
        had, end = (step * self.step_tokens // spec.block_tokens for step in (start, start + steps))
        if spec.rule is Rule.FULL:
            return range(had, end)
        if spec.rule is Rule.STATE:
            return range(max(had, end - 1), end)
        if spec.rule is Rule.WINDOW:
            return range(max(had, end - spec.reach), end)
        tokens_in_chunk = end * spec.block_tokens % spec.reach
        first_token = end * spec.block_tokens - tokens_in_chunk
        return range(max(had, first_token // spec.block_tokens), end)

    def reach(self, request_id: str, keys: Sequence[Sequence[bytes]], start: int) -> int:
        """Returns the maximum number of steps after `start` that may be promised to a request, given its failed
        loads."""
        tokens = min(len(k) * spec.block_tokens for k, spec in zip(keys, self.specs, strict=True))
        failure = self.failures.get(request_id)
        if failure is not None and len(failure.loads) > 1:
            return 0
        if failure is not None and failure.first_token is not None:
            tokens = min(tokens, failure.first_token)
        return max(0, tokens // self.step_tokens - start)

    def end_request(self, request_id: str) -> None:
        self.release(request_id)
        self.failures.pop(request_id, None)
        for op in self.ops.values():
            op.abandoned |= op.role is OpRole.LOAD and op.request_id == request_id

    def restorable(self, request_id: str, keys: Sequence[Sequence[bytes]], start: int) -> int:
        """Returns the maximum number of steps after `start` that may be promised from host memory now."""
        room = self.limits.inflight_load_pages - self.load_pages()
        for steps in range(self.reach(request_id, keys, start), 0, -1):
            pages = [(g, keys[g][i]) for g in range(len(keys)) for i in self.needed(g, start, steps)]
            if self.most_pages(start, steps) <= room and all(page in self.visible for page in pages):
                return steps
        return 0

    def most_pages(self, start: int, steps: int) -> int:
        """Returns how many pages a lookup counts towards the limit of load pages. In a CHUNK group, a lookup counts the
        pages of a complete chunk, no matter where in the chunk the hit ends."""
        pages = 0
        for group, spec in enumerate(self.specs):
            if spec.rule is Rule.CHUNK:
                whole = -(-spec.reach // spec.block_tokens)
                pages += min(whole, steps * self.step_tokens // spec.block_tokens)
            else:
                pages += len(self.needed(group, start, steps))
        return pages

    def tail(self, tails: Sequence[dict[int, bytes]], pages: int) -> int:
        """Returns the number of tokens of the longest partial tail that may be promised after `pages` pages; 0 for
        none.

        Args:
            tails: for each group, the keys of its tails by number of tokens.
        """
        room = self.limits.inflight_load_pages - self.load_pages() - pages
        if room < len(tails) or not tails:
            return 0
        common = set.intersection(*(set(counts) for counts in tails))
        stored = [n for n in common if all((g, counts[n]) in self.visible for g, counts in enumerate(tails))]
        return max(stored, default=0)

    def lease(self, request_id: str, pages: list[tuple[Key, int]], streamed: bool = False) -> None:
        """Checks the pages that `match` promised, and records their lease.

        Args:
            streamed: whether pages on disk may be promised too. The slot of such a page is NO_SLOT, or the slot into
                which a read copies the page.
        """
        for key, slot in pages:
            require(
                self.visible.get(key) == slot
                or (streamed and (slot == NO_SLOT or self._coming_to(key) == slot)),
                f"match of {request_id} names slot {slot}, not the key's own",
            )
        room = self.limits.inflight_load_pages - self.load_pages()
        require(len(pages) <= room, "more load pages are promised than allowed")
        if pages:
            self.leases[request_id] = pages

    def _coming_to(self, key: Key) -> int:
        """Returns the slot into which a read in flight copies the page from disk; -1 if there is no such read."""
        read = self.disk_ops.get(self.pending.get(key, -1))
        return read.slots[read.keys.index(key)] if read is not None and read.role is OpRole.LOAD else -1

    def evict_for_lookup(
        self, evicted: list[Key], keys: Sequence[Sequence[bytes]], start: int, steps: int
    ) -> None:
        """Applies evictions that freed slots for a lookup's reads. Checks that the lookup promises no evicted page."""
        groups = range(len(keys))
        promised = {(g, keys[g][n]) for g in groups for n in self.needed(g, start, steps)}
        require(not promised & set(evicted), "a lookup evicted what it promises")
        self.evict(evicted)

    def release(self, request_id: str) -> None:
        self.leases.pop(request_id, None)

    # --- stores -------------------------------------------------------------------------------------------------------

    def plan_store(
        self,
        keys: list[Key],
        stored: dict[int, int],
        known: int,
        dropped: int,
        evicted: list[Key],
        from_loads: set[int],
    ) -> None:
        """Checks the result of `begin_store`, and applies its evictions. `add_op` then records the op.

        Args:
            stored: the slot of each stored key, by position of the key.
            known: number of keys that the manager reported as known.
            dropped: number of keys that the manager dropped.
            evicted: keys that left host memory.
            from_loads: positions of keys whose engine block is the target of a load in flight.
        """
        group = keys[0][0]
        held = self.held_slots(group)
        self._evict_for_store(keys, evicted)
        # A page that is being read from disk is stored too, because the read may fail, and the engine offers each page
        # only once.
        unverified = self._coming(keys) - from_loads
        there = {i for i, key in enumerate(keys) if key in self.visible or key in self.pending}
        self._check_store(keys, stored, there - unverified, known, dropped)
        self._take_over(keys, unverified & set(stored))
        used = held | self.visible_slots(group)
        slots = set(stored.values())
        if dropped and self.store_pages() + len(stored) < self.limits.inflight_store_pages:
            require(len(used | slots) == self.up[group], "a store was dropped with slots free")
            evictable = [
                k
                for k, s in self.visible.items()
                if k[0] in self.shares(group) and s not in held and k not in keys
            ]
            require(not evictable, "a store was dropped with blocks to evict")

    def plan_store_on_disk(
        self,
        keys: list[Key],
        stored: dict[int, int],
        on_disk: set[int],
        read: set[int],
        known: int,
        dropped: int,
        evicted: list[Key],
        from_loads: set[int],
    ) -> None:
        """Checks the result of `begin_store` if stores go to disk. Pages whose disk slots are being read must be stored
        in host memory.

        Args:
            stored: by position of each stored key, its host slot, or NO_SLOT if it is stored on disk.
            on_disk: positions of keys that were on disk, or were being written to disk.
            read: positions of keys in `on_disk` whose disk slots are being read.
            known, dropped, evicted, from_loads: as for `plan_store`.
        """
        self._evict_for_store(keys, evicted)
        visible = {i for i, key in enumerate(keys) if key in self.visible}
        coming = self._coming(keys)
        stores = {i for i, key in enumerate(keys) if key in self.pending} - coming
        awaited = (coming | read) & from_loads
        self._check_store(keys, stored, visible | stores | awaited | (on_disk - read), known, dropped)
        in_host = {i for i, slot in stored.items() if slot != NO_SLOT}
        require(in_host == read & set(stored), "a store went the wrong way")
        require(bool(in_host) or not evicted, "a store to disk evicted something from host memory")
        self._take_over(keys, in_host)

    def _coming(self, keys: list[Key]) -> set[int]:
        """Returns the positions of keys whose pages a read in flight copies to host memory."""
        return {i for i, key in enumerate(keys) if self.pending.get(key) in self.disk_ops}

    def _evict_for_store(self, keys: list[Key], evicted: list[Key]) -> None:
        require(not set(keys) & set(evicted), "a block was evicted to store its own neighbours")
        self.evict(evicted)

    def _check_store(
        self, keys: list[Key], stored: dict[int, int], expected_known: set[int], known: int, dropped: int
    ) -> None:
        group = keys[0][0]
        require(known == len(expected_known), f"{known} blocks were called known, {len(expected_known)} are")
        require(not expected_known & set(stored), "a known block was stored again")
        require(len(stored) + known + dropped == len(keys), "blocks were neither stored, known nor dropped")
        used = self.held_slots(group) | self.visible_slots(group)
        slots = [slot for slot in stored.values() if slot != NO_SLOT]
        require(len(set(slots)) == len(slots) and not used & set(slots), "a slot in use was given away")
        require(all(0 <= slot < self.up[group] for slot in slots), "a slot that is not up was given away")
        require(
            self.store_pages() + len(stored) <= self.limits.inflight_store_pages, "the store queue overflowed"
        )

    def _take_over(self, keys: list[Key], stored: set[int]) -> None:
        """Lets a store to host memory take over keys whose pages a read in flight copies to host memory. The read then
        no longer publishes these pages.
        """
        for i in stored & self._coming(keys):
            read = self.disk_ops[self.pending[keys[i]]]
            read.gone.add(read.keys.index(keys[i]))
        self.taken_over += len(stored)

    def evict(self, evicted: list[Key]) -> None:
        """Checks and applies evictions."""
        for key in evicted:
            require(key in self.visible, "an unknown block was evicted")
            slot = self.visible.pop(key, -1)
            require(slot not in self.held_slots(key[0]), f"the leased slot {slot} was evicted")

    def add_op(self, op_id: int, op: ModelOp) -> None:
        require(op_id not in self.ops, f"op number {op_id} was used twice")
        self.ops[op_id] = op
        if op.role is OpRole.STORE:
            self.pending.update((key, op_id) for key in op.keys)

    def bar(self, request_id: str, first_token: int) -> int:
        """Applies `discard_from`: revokes those pages of the request's stores in flight that reach beyond
        `first_token`. Returns how many pages it revokes."""
        count = 0
        for op_id, op in self.ops.items():
            if op.request_id == request_id and op.role is OpRole.STORE:
                size = self.specs[op.keys[0][0]].block_tokens
                pages = {i for i, n in enumerate(op.numbers) if (n + 1) * size > first_token} - op.revoked
                op.revoked |= pages
                count += len(pages)
                for i in pages:
                    self._drop_pending(op.keys[i], op_id)
        return count

    def _drop_pending(self, key: Key, op_id: int) -> None:
        if self.pending.get(key) == op_id:
            del self.pending[key]

    # --- completions --------------------------------------------------------------------------------------------------

    def report(self, result: OpResult) -> None:
        """Applies one rank's result. Must be called before the manager's `complete`."""
        op = self.ops[result.op_id]
        op.reports += 1
        if result.status is not OpStatus.OK:
            pages = set(range(len(op.keys)))
            if result.status is OpStatus.FAILED:
                pages = {int(i) for i in result.failed}
            op.failed |= pages
            at_fault = {
                page for page, cause in causes_by_page(result).items() if cause <= FailureCause.CONTENT
            }
            op.damaged |= at_fault
            for page in pages if result.status is not OpStatus.CANCELLED else ():
                # A page in host memory can be loaded only from there. If it were not forgotten, it might fail again,
                # whatever the cause.
                if op.slots[page] != NO_SLOT or page in at_fault:
                    op.suspect.add(page)
        if op.role is OpRole.LOAD and op.failed:
            self.bar(op.request_id, self._first_failed_token(op))
            if op.epoch == self.epoch and not op.abandoned:
                self._remember_failure(op)

    def _remember_failure(self, op: ModelOp) -> None:
        failure = self.failures.setdefault(op.request_id, ModelFailure())
        failure.loads.add(op.load)
        if op.slots[0] == NO_SLOT:
            failure.from_disk = True
        else:
            first = self._first_failed_token(op)
            failure.first_token = first if failure.first_token is None else min(first, failure.first_token)

    def _first_failed_token(self, op: ModelOp) -> int:
        return min(op.numbers[i] for i in op.failed) * self.specs[op.keys[0][0]].block_tokens

    def end_op(
        self, op_id: int, completion: Completion | None, evicted: list[Key], published: list[Key]
    ) -> None:
        """Checks the result of `complete`, and applies it."""
        op = self.ops[op_id]
        if op.reports < self.limits.ranks:
            require(completion is None and not published, "an op ended before every rank reported")
            return
        require(completion is not None, "every rank reported and the op did not end")
        assert completion is not None
        del self.ops[op_id]
        if op.role is OpRole.LOAD:
            bad = [op.keys[i] for i in sorted(op.suspect) if self.visible.get(op.keys[i]) == op.slots[i]]
            require(sorted(bad) == sorted(evicted), "a failed load forgot other pages than its failed ones")
            for key in bad:
                del self.visible[key]
            for i in op.suspect & op.damaged:
                # A page that was damaged in host memory is forgotten on disk too, even while it is being stored on
                # disk.
                if op.slots[i] != NO_SLOT:
                    self._forget_store_on_disk(op.keys[i])
            lost = set(range(len(op.keys))) if op.epoch != self.epoch else op.failed
            require(len(completion.failed_blocks) == len(lost), "a load's failed blocks are not named")
            return
        good = set(range(len(op.keys))) - op.failed - op.revoked - op.gone
        if op.epoch != self.epoch or op.waits_for & set(self.ops):
            good = set()
        require(
            sorted(completion.published.tolist()) == sorted(good),
            "a store published other pages than its good ones",
        )
        in_host = {i for i in good if op.slots[i] != NO_SLOT}
        require(
            sorted(published) == sorted(op.keys[i] for i in in_host), "the listener was told of other pages"
        )
        for i, key in enumerate(op.keys):
            self._drop_pending(key, op_id)
            if i in in_host:
                self.visible[key] = op.slots[i]

    def _forget_store_on_disk(self, key: Key) -> None:
        store = self.ops.get(self.pending.get(key, -1))
        if store is not None and store.slots[store.keys.index(key)] == NO_SLOT:
            store.gone.add(store.keys.index(key))
            del self.pending[key]

    # --- disks --------------------------------------------------------------------------------------------------------

    def add_disk_op(self, op_id: int, op: ModelOp) -> None:
        """Checks a read or write that the manager planned, and applies it to the model."""
        for key, slot in zip(op.keys, op.slots, strict=True):
            if op.role is OpRole.STORE:
                require(
                    slot == NO_SLOT or self.visible.get(key) == slot,
                    "a write to disk reads a slot that is not its key's own",
                )
                continue
            require(key not in self.visible and key not in self.pending, "a known block is read from disk")
            used = self.held_slots(key[0]) | self.visible_slots(key[0])
            require(slot not in used, "a slot in use was given to a read from disk")
            require(0 <= slot < self.up[key[0]], "a slot that is not up was given to a read from disk")
            self.pending[key] = op_id
        require(op_id not in self.ops and op_id not in self.disk_ops, f"op number {op_id} was used twice")
        self.disk_ops[op_id] = op

    def end_disk_op(self, result: OpResult, evicted: list[Key], published: list[Key]) -> None:
        """Checks the end of a read or write, and applies it to the model."""
        op = self.disk_ops.pop(result.op_id)
        self.evict(evicted)
        if op.role is OpRole.STORE:
            require(not published, "a write to disk published something in host memory")
            return
        require(not evicted, "a read that ended evicted something")
        bad = set(range(len(op.keys))) if result.status is not OpStatus.OK else set()
        if result.status is OpStatus.FAILED:
            bad = {int(page) for page in result.failed}
        good = set(range(len(op.keys))) - bad - op.gone if op.epoch == self.epoch else set()
        require(
            sorted(published) == sorted(op.keys[i] for i in good),
            "a read from disk published other pages than its good ones",
        )
        for i, key in enumerate(op.keys):
            self._drop_pending(key, result.op_id)
            if i in good:
                self.visible[key] = op.slots[i]

    def lose(self, op_id: int, pages: list[int]) -> None:
        """Records that the pages at the positions `pages` of a rank's op were on a lost disk. Their keys may be stored
        again elsewhere."""
        op = self.ops[op_id]
        op.gone.update(pages)
        for page in pages:
            self._drop_pending(op.keys[page], op_id)

    # --- expiry ---

    def note_times(self, expiries: dict[Key, int]) -> None:
        """Records the expiry of pages that a planned op copies to host memory, in Unix seconds; 0 for never."""
        self.expiry.update(expiries)

    def expire(self, now_s: int) -> set[Key]:
        """Forgets expired pages that are in host memory or being copied to it. Returns the keys of those that were
        visible."""
        past = [key for key in (*self.visible, *self.pending) if 0 < self.expiry.get(key, 0) <= now_s]
        return set(self.forget(past)[1])

    # --- forgetting ---------------------------------------------------------------------------------------------------

    def forget(self, keys: list[Key]) -> tuple[int, list[Key]]:
        """Applies `forget`. Returns how many pages were known, and which of them were visible."""
        seen = [key for key in dict.fromkeys(keys) if key in self.visible]
        for key in seen:
            del self.visible[key]
        pending = [key for key in dict.fromkeys(keys) if key in self.pending]
        known = len({*seen, *pending})
        for key in pending:
            op_id = self.pending.pop(key)
            op = self.ops[op_id] if op_id in self.ops else self.disk_ops[op_id]
            op.gone.add(op.keys.index(key))
        return known, seen

    def reset(self) -> None:
        self.visible.clear()
        self.pending.clear()
        self.leases.clear()
        self.epoch += 1
