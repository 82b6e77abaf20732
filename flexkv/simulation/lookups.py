"""Makes the lookups and loads of a simulation, and compares the manager's promises and planned loads with those of the
model."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from flexkv.cache.base import OpRole, Outcome, TailCandidates
from flexkv.facts.keys import Rule
from flexkv.simulation.base import NO_SLOT, Key, require
from flexkv.simulation.request import SimRequest
from flexkv.simulation.room_judge import RoomJudge
from flexkv.simulation.world import World
from flexkv.transfer.graph import OpKind


class Lookups:
    """Looks up a request's blocks, and loads those that the manager promised.

    Args:
        orders_planned: a function to call when a lookup may have planned reads from disk.
    """

    def __init__(self, world: World, orders_planned: Callable[[], None]) -> None:
        self.world = world
        self.orders_planned = orders_planned

    def look_up(self, request: SimRequest) -> None:
        world = self.world
        world.expire_pages()
        promised_before = dict(world.model.leases.get(request.request_id, ()))
        if not request.blocks:
            self._take_local_blocks(request)
        start = request.start
        world.model.release(request.request_id)
        tails = None
        model_steps = world.model.restorable(request.request_id, request.keys, start)
        # vLLM's adapter first looks up complete blocks. It looks up the tail only when the result for the complete
        # blocks is final. So most lookups of a waiting request pass no tail, and most lookups of other requests pass
        # one.
        if request.tail and world.random.random() < (0.2 if request.state == "waiting" else 0.8):
            base = (
                len(request.path)
                if world.random.random() < 0.9
                else world.random.randint(0, len(request.path))
            )
            tails = [
                TailCandidates(
                    np.frombuffer(
                        b"".join(counts[n] for n in sorted(counts, reverse=True)), np.uint8
                    ).reshape(-1, 16),
                    np.array(sorted(counts, reverse=True), np.int32),
                    base,
                )
                for counts in request.tail_keys
            ]
        step_tokens = world.config.step_tokens
        failure = world.model.failures.get(request.request_id)
        world.report.lookups_after_failures += failure is not None
        judge = RoomJudge(world, request, tails is not None)
        result = world.manager.match(request.request_id, request.arrays, start * step_tokens, tails)
        promised = result.tokens // step_tokens
        evicted = world.recorder.take_evicted()
        world.model.evict_for_lookup(evicted, request.keys, start, model_steps)
        self.orders_planned()
        judge.judge(result, evicted)
        if result.outcome is Outcome.ASK_AGAIN:
            model_steps, tails = 0, None
        streamed = (world.config.stream or world.config.gds_loads) and promised > model_steps
        require(result.tokens % step_tokens == 0, "match promised a part of a step")
        require(
            promised == model_steps or streamed,
            f"match promised {promised} steps, {model_steps} are restorable",
        )
        require(
            promised <= world.model.reach(request.request_id, request.keys, start),
            "what a load of the request did not bring is promised to it again",
        )
        pages: list[tuple[Key, int]] = []
        for group, match in enumerate(result.groups):
            needed = world.model.needed(group, start, promised)
            slots = match.slots.tolist()
            if world.config.gds_loads and streamed:
                on_disk = len(needed) - len(slots)
                slots += [NO_SLOT] * on_disk
                again = failure is not None and failure.from_disk
                require(not (on_disk and again), "a load from disk has failed, and another is promised")
            require(len(slots) == len(needed), "match names another number of slots than are needed")
            require(not needed or match.first_block == needed.start, "match starts at another block")
            pages += [((group, request.keys[group][n]), slot) for n, slot in zip(needed, slots, strict=True)]
        model_tail = 0
        if tails is not None and failure is None and tails[0].base_block == start + promised and not streamed:
            model_tail = world.model.tail(request.tail_keys, len(pages))
        require(
            result.tail_tokens == model_tail,
            f"match promised a tail of {result.tail_tokens}, not {model_tail}",
        )
        if result.tail_tokens:
            pages += [
                ((group, request.tail_keys[group][result.tail_tokens]), match.tail_slot)
                for group, match in enumerate(result.groups)
            ]
        for key, _ in pages:
            require(
                key in promised_before or not world.is_over(key),
                "a page is promised although its time is over",
            )
        world.model.lease(request.request_id, pages, streamed)
        request.promised, request.promised_tail = promised, result.tail_tokens
        request.state = "matched"
        if not result.is_final and world.random.random() < 0.8:
            # An engine allocates no blocks to a request whose lookup is not final. At the request's next lookup, the
            # engine searches its own cache again.
            request.state = "waiting"
            world.free_blocks(request)

    def _take_local_blocks(self, request: SimRequest) -> None:
        """Lets the request share leading blocks of another live request, as an engine's own prefix cache does."""
        world = self.world
        groups = range(len(world.config.groups))
        request.blocks = [[] for _ in groups]
        request.has = [[] for _ in groups]
        request.start = request.computed = request.offered = 0
        request.tail_loaded = 0
        donor = world.pick()
        if donor is None or donor is request or donor.state != "running" or world.random.random() < 0.5:
            return
        if donor.unverified and not world.config.ordered_reports:
            return
        shared = 0
        for ours, theirs in zip(request.path, donor.path[: donor.computed], strict=False):
            if ours != theirs:
                break
            shared += 1
        if not all(donor.has[g][n] for g in groups for n in world.model.needed(g, 0, shared)):
            return
        for g, pages in enumerate(world.config.pages_a_step):
            for number in range(shared * pages):
                world.give_block(request, g, donor.blocks[g][number], donor.has[g][number])
        request.start = request.computed = request.offered = shared

    def load(self, request: SimRequest) -> None:
        world = self.world
        prefix_only = all(spec.rule is Rule.FULL for spec in world.config.groups)
        taken = request.promised
        if prefix_only and world.random.random() < 0.2:
            taken = world.random.randint(0, request.promised)
        tail = bool(request.promised_tail) and taken == request.promised and world.random.random() < 0.9
        if not world.room_for(taken + tail):
            return
        lease = dict(world.model.leases[request.request_id])
        targets: list[list[int]] = []
        planned: list[tuple[list[Key], list[int]]] = []
        for g, pages in enumerate(world.config.pages_a_step):
            needed = world.model.needed(g, request.start, taken)
            free = iter(world.random.sample(world.engine.pool.free(g), taken * pages + tail))
            for number in range(request.start * pages, (request.start + taken) * pages):
                world.give_block(request, g, next(free), number in needed)
            numbers = list(needed)
            keys: list[Key] = [(g, request.keys[g][n]) for n in numbers]
            if tail:
                world.give_block(request, g, next(free), True)
                keys.append((g, request.tail_keys[g][request.promised_tail]))
                numbers.append(request.start + taken)
            targets.append([request.blocks[g][n] for n in numbers])
            planned.append((keys, numbers))
        graph = world.manager.begin_load(request.request_id, [np.array(t, np.int32) for t in targets], tail)
        world.model.release(request.request_id)
        request.computed = request.start + taken
        # The engine can use a tail only if it follows the last block of the path.
        at_the_end = request.computed == len(request.path)
        request.tail_loaded = request.promised_tail if tail and at_the_end else 0
        sync = world.random.random() < 0.4
        request.state = "running" if sync or graph is None else "loading"
        ops = graph.ops if graph is not None else ()
        for op in ops:
            from_disk = op.kind is OpKind.GDS_READ
            mine = [at for at, key in enumerate(planned[op.group][0]) if (lease[key] == NO_SLOT) == from_disk]
            keys = [planned[op.group][0][at] for at in mine]
            numbers = [planned[op.group][1][at] for at in mine]
            slots = [NO_SLOT] * op.pages if from_disk else op.slots.tolist()
            require(slots == [lease[key] for key in keys], "a load reads other slots than were promised")
            blocks = [targets[op.group][at] for at in mine]
            require(op.blocks.tolist() == blocks, "a load writes other blocks than were given")
            world.report.streamed_pages += int(np.count_nonzero(op.reads))
            world.report.gds_pages += op.pages if from_disk else 0
            world.submit(op, request, OpRole.LOAD, keys, numbers, in_stream=sync, load=ops[0].op_id)
            request.unverified.add(op.op_id)
