"""Events of a simulation's requests: requests arrive, look up, load, compute, store, are preempted, and end."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from flexkv.cache.base import NO_ENTRY, OpRole
from flexkv.facts.keys import Keys
from flexkv.simulation.base import Key, Place, require
from flexkv.simulation.lookups import Lookups
from flexkv.simulation.request import SimRequest
from flexkv.simulation.world import FETCH_PAGES, World, block_key, host_slots
from flexkv.transfer.graph import OpKind


class Requests:
    """Each public method makes one event happen, usually to a randomly chosen request."""

    def __init__(self, world: World, orders_planned: Callable[[], None]) -> None:
        self.world = world
        self.lookups = Lookups(world, orders_planned)
        self._names = 0

    def arrive(self) -> None:
        world = self.world
        if len(world.live) >= world.config.requests:
            return
        groups = range(len(world.config.groups))
        length = world.random.randint(0, world.config.most_steps)
        # Paths rarely branch, so that requests share prefixes and ask for pages that were stored before.
        rare, ttl_s = 0.15, world.config.ttl_s
        path = tuple(int(world.random.random() < (rare if n or not ttl_s else 0.5)) for n in range(length))
        block_tokens = world.config.groups[0].block_tokens
        tail = tuple(world.random.randrange(2) for _ in range(world.random.randrange(block_tokens)))
        if not world.config.takes_tails:
            tail = ()
        keys = [
            [block_key(g, path[: i // pages + 1], i) for i in range(length * pages)]
            for g, pages in enumerate(world.config.pages_a_step)
        ]
        arrays = [np.frombuffer(b"".join(k), np.uint8).reshape(-1, 16) for k in keys]
        tail_keys = [
            {n: block_key(g, path, "tail", tail[:n]) for n in range(1, len(tail) + 1)} for g in groups
        ]
        self._names += 1
        request = SimRequest(f"r{self._names}", path, tail, arrays, keys, tail_keys)
        request.ttl_s = ttl_s if ttl_s and path and path[0] else None
        world.live.append(request)

    def prefetch(self) -> None:
        """Prefetches a request's pages before its first lookup. The engine may already have its first blocks."""
        world = self.world
        request = world.pick()
        if request is None or request.state != "new":
            return
        start = 0 if world.random.random() < 0.7 else world.random.randint(0, len(request.path))
        in_flight = set(world.disk_lane.ops)
        world.expire_pages()
        world.manager.prefetch(request.request_id, request.arrays, start * world.config.step_tokens)
        world.model.evict(world.recorder.take_evicted())
        self.lookups.orders_planned()
        require(not world.manager.leased_pages(request.request_id), "a prefetch promises something")
        require(not world.manager.waits(request.request_id), "a request waits that nobody has asked for")
        begun = [op for op_id, op in world.disk_lane.ops.items() if op_id not in in_flight]
        if begun:
            require(not len(world.line), "a prefetch takes room that somebody waits for")
            reads = [op for op in world.disk_lane.ops.values() if op.kind is OpKind.DISK_READ]
            require(
                sum(op.pages for op in reads) <= FETCH_PAGES // 2, "a prefetch leaves no room for other reads"
            )
            slots = sum(world.model.up)
            require(
                sum(op.pages for op in begun) <= slots // 4,
                "a prefetch takes more than a quarter of the slots",
            )

    def advance_request(self) -> None:
        world = self.world
        request = world.pick()
        if request is None:
            return
        if request.state == "new":
            self.lookups.look_up(request)
        elif request.state == "waiting":
            self._ask_again(request)
        elif request.state == "matched":
            self._after_lookup(request)
        elif request.state == "running":
            self._run_some(request)

    def _ask_again(self, request: SimRequest) -> None:
        """Repeats the lookup of a waiting request, usually when the manager reports that the request need not wait any
        more."""
        world = self.world
        waits = world.manager.still_waits(request.request_id)
        if waits and request.request_id in world.line:
            world.line.ask(request.request_id)
        if not waits or world.random.random() < 0.1:
            self.lookups.look_up(request)

    def _after_lookup(self, request: SimRequest) -> None:
        world = self.world
        choice = world.random.random()
        if choice < 0.15:
            self.lookups.look_up(request)
        elif choice < 0.25:
            world.release(request)
            request.state = "running"
        elif request.request_id not in world.model.leases:
            if world.room_for(request.total - request.start):
                world.release(request)
                request.state = "running"
        else:
            self.lookups.load(request)

    def _run_some(self, request: SimRequest) -> None:
        world = self.world
        choice = world.random.random()
        if request.computed < request.total and choice < 0.6:
            for _ in range(world.random.randint(1, 3)):
                self._compute_block(request)
        elif request.offered < request.computed and choice < 0.95:
            self._store(request)
        elif request.computed == request.total and choice > 0.7:
            self.end(request)

    def _compute_block(self, request: SimRequest) -> None:
        world = self.world
        number = request.computed
        if number >= request.total:
            return
        steps = list(enumerate(world.config.pages_a_step))
        if any(len(request.blocks[g]) <= number * pages for g, pages in steps) and not world.room_for(1):
            return
        inputs: list[tuple[Place, bytes]] = []
        outputs: list[tuple[Place, bytes]] = []
        for g, pages in steps:
            mine = range(number * pages, (number + 1) * pages)
            if len(request.blocks[g]) <= mine.start:
                for block in world.random.sample(world.engine.pool.free(g), pages):
                    world.give_block(request, g, block, False)
            inputs += [
                ((g, request.blocks[g][n]), request.keys[g][n]) for n in world.model.needed(g, 0, number)
            ]
            if number == len(request.path) and request.tail_loaded:
                inputs.append(((g, request.blocks[g][number]), request.tail_keys[g][request.tail_loaded]))
            for page in mine:
                outputs.append(((g, request.blocks[g][page]), request.key_of(g, page)))
                request.has[g][page] = True
        world.engine.compute(inputs, outputs)
        request.computed = number + 1

    def _store(self, request: SimRequest) -> None:
        world = self.world
        first = request.offered if world.random.random() < 0.8 else world.random.randint(0, request.offered)
        end = world.random.randint(first, request.computed)
        for group, pages in enumerate(world.config.pages_a_step):
            numbers = [n for n in range(first * pages, end * pages) if request.has[group][n]]
            # One store takes only consecutive blocks. In a group with a sliding window, a request's blocks can have
            # gaps.
            while numbers:
                cut = next((i for i in range(1, len(numbers)) if numbers[i] != numbers[0] + i), len(numbers))
                self._store_blocks(request, group, numbers[:cut])
                numbers = numbers[cut:]
        request.offered = max(request.offered, end)

    def _store_blocks(self, request: SimRequest, group: int, numbers: list[int]) -> None:
        world = self.world
        world.expire_pages()
        keys: list[Key] = [(group, request.key_of(group, n)) for n in numbers]
        array = np.frombuffer(b"".join(key for _, key in keys), np.uint8).reshape(-1, 16)
        blocks = np.array([request.blocks[group][n] for n in numbers], np.int32)
        on_disk, read = self._on_disk(group, array)
        loading = world.blocks_being_loaded(group)
        from_loads = {i for i, block in enumerate(blocks.tolist()) if block in loading}
        spare = int(array[0, 0]) % 5 == 0  # depends only on the key, so it draws no random number
        expiries = world.expiries_of(group, array, request.ttl_s)
        plan = world.manager.begin_store(
            request.request_id, group, array, blocks, numbers[0], spare=spare, ttl_s=request.ttl_s
        )
        world.note_stored([(keys[i], expiries[i]) for i in plan.stored.tolist()])
        ops = plan.graph.ops if plan.graph else ()
        parts = np.split(plan.stored, np.cumsum([op.pages for op in ops])[:-1]) if ops else []
        slots = {
            page: slot
            for op, part in zip(ops, parts, strict=True)
            for page, slot in zip(part.tolist(), host_slots(op), strict=True)
        }
        evicted = world.recorder.take_evicted()
        require(len(slots) == len(plan.stored), "a store without pages, pages without a store, or one twice")
        if world.config.gds_stores:
            world.model.plan_store_on_disk(
                keys, slots, on_disk, read, plan.known, plan.dropped, evicted, from_loads
            )
        else:
            world.model.plan_store(keys, slots, plan.known, plan.dropped, evicted, from_loads)
        for op, part in zip(ops, parts, strict=True):
            require(op.blocks.tolist() == blocks[part].tolist(), "a store reads other blocks than were given")
            chosen = [keys[i] for i in part]
            world.submit(op, request, OpRole.STORE, chosen, [numbers[i] for i in part], in_stream=True)

    def _on_disk(self, group: int, keys: Keys) -> tuple[set[int], set[int]]:
        """Returns two sets of positions: of keys that are on disk or being written to disk, and of those among them
        whose disk slots are being read."""
        world = self.world
        if not world.config.gds_stores:
            return set(), set()
        presence = world.disk_tier.presence
        entries = presence.find(group, keys, ready_only=False)
        on_disk = set(np.flatnonzero(entries != NO_ENTRY).tolist())
        reads = world.places_being_read(group)
        return on_disk, {n for n in on_disk if int(presence.slots_of(entries[n : n + 1])[0]) in reads}

    def abort(self) -> None:
        request = self.world.pick()
        if request is not None:
            self.end(request)

    def preempt(self) -> None:
        request = self.world.pick()
        # An engine preempts only running requests, and no request that waits for its load.
        if request is not None and request.state == "running":
            self.restart(request)

    def end(self, request: SimRequest) -> None:
        world = self.world
        world.end_request(request)
        world.free_blocks(request)
        world.live.remove(request)

    def restart(self, request: SimRequest) -> None:
        world = self.world
        world.release(request)
        world.free_blocks(request)
        request.state = "new"

    def bar_from(self, request_id: str, token: int) -> None:
        """Revokes those pages of the request's stores in flight that reach beyond position `token`, because they were
        computed from a failed load."""
        require(
            self.world.manager.discard_from(request_id, token) == self.world.model.bar(request_id, token),
            "discard_from revoked another number of pages",
        )

    def recompute_from(self, request: SimRequest, number: int) -> None:
        """Makes the engine compute step `number` and all later steps again, because the step's KV is lost.

        The engine starts at an earlier step if a group lacks pages that it needs to continue at step `number`.
        """
        if request.state == "matched":
            # The promised blocks follow blocks of the engine's own cache. Some of those blocks are lost, so the engine
            # looks up the request again.
            self.restart(request)
        if not request.blocks:
            return
        world = self.world
        groups = range(len(world.config.groups))
        while not all(request.has[g][n] for g in groups for n in world.model.needed(g, 0, number)):
            number -= 1
        self.bar_from(request.request_id, number * world.config.step_tokens)
        request.computed = min(request.computed, number)
        request.offered = min(request.offered, number)
        for has, pages in zip(request.has, world.config.pages_a_step, strict=True):
            has[number * pages :] = [False] * len(has[number * pages :])
        request.tail_loaded = 0
