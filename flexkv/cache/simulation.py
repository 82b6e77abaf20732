"""A seeded simulation of the control plane: the real manager, an engine of symbols, and everything that goes wrong.

Each step takes one random action: a request looks up, loads, computes, stores, ends; a rank moves a page, fails, or
reports late; the cache forgets, grows, expires, is reset. After every call the answer is compared with an independent
model, and what arrives in engine blocks and slots is compared with what their keys promise.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from flexkv.cache.base import GroupPolicy, GroupSpec, ManagerLimits, OpRole, TailCandidates
from flexkv.cache.manager import LocalCacheManager
from flexkv.cache.simulated_engine import Compute, Movement, Place, Rank, SimEngine, SimRequest
from flexkv.cache.simulated_model import Key, Model, ModelOp, Recorder, RuleBroken, require
from flexkv.cache.stats import ManagerStats
from flexkv.transfer.graph import OpResult, OpStatus, TransferOp

ManagerFactory = Callable[..., LocalCacheManager]


@dataclass(frozen=True)
class SimulationConfig:
    """What is simulated.

    Attributes:
        seed: names the run; the same seed takes the same steps.
        steps: random actions to take, before everything in flight is drained.
        groups: KV groups of the unit.
        ranks: workers that report each op.
        engine_blocks: engine blocks of each group.
        requests: live requests at once.
        failure_rate: share of moved pages that fail.
        ordered_reports: each rank reports in the order its ops ended, as an engine's workers do. Only then requests
            share engine blocks whose load has not been verified yet.
        integrity_every: steps between calls of `check_integrity`; 0 for none but the last.
    """

    seed: int
    steps: int = 2_000
    groups: tuple[GroupSpec, ...] = (GroupSpec(block_tokens=4, slots=40),)
    ranks: int = 2
    engine_blocks: int = 64
    requests: int = 8
    failure_rate: float = 0.03
    ordered_reports: bool = True
    integrity_every: int = 10
    store_queue_pages: int = 24
    load_queue_pages: int = 32


@dataclass
class SimulationReport:
    """What a run did; a run that ends has broken no rule."""

    steps: int = 0
    verified_pages: int = 0
    failed_pages: int = 0
    actions: dict[str, int] = field(default_factory=dict)
    stats: ManagerStats = field(default_factory=ManagerStats)


def _key(*parts: object) -> bytes:
    return hashlib.sha256(repr(parts).encode()).digest()[:16]


class Simulation:
    """One run. `manager_class` lets tests put a broken manager in the place of the real one."""

    def __init__(self, config: SimulationConfig, manager_class: ManagerFactory = LocalCacheManager) -> None:
        self.config = config
        self.random = random.Random(config.seed)
        self.now_s = 0.0
        self.recorder = Recorder()
        limits = ManagerLimits(
            ranks=config.ranks,
            inflight_store_pages=config.store_queue_pages,
            inflight_load_pages=config.load_queue_pages,
            lease_s=30.0,
        )
        self.manager = manager_class(config.groups, limits, clock=lambda: self.now_s, listener=self.recorder)
        self.model = Model(config.groups, limits)
        slots = [spec.slots for spec in config.groups]
        self.engine = SimEngine(config.ranks, len(config.groups), config.engine_blocks, slots)
        self.live: list[SimRequest] = []
        self.ops: dict[int, TransferOp] = {}
        self.report = SimulationReport()
        self._lost_until = 0
        self._names = 0
        for group in range(len(config.groups)):
            self._grow(group)

    # --- driving ------------------------------------------------------------------------------------------------------

    def run(self) -> SimulationReport:
        """
        Raises:
            RuleBroken: the manager did what it must not, or a load delivered what its key does not promise.
            ContractError: the manager's own invariants do not hold.
        """
        actions: list[tuple[Callable[[], None], float]] = [
            (self._arrive, 8),
            (self._advance_request, 30),
            (self._move, 30),
            (self._deliver, 20),
            (self._abort, 0.7),
            (self._preempt, 0.7),
            (self._cancel, 0.7),
            (self._forget, 0.15),
            (self._expire, 0.2),
            (self._grow_some, 0.2),
            (self._lose_pool, 0.04),
            (self._reset, 0.05),
        ]
        weights = [weight for _, weight in actions]
        for step in range(self.config.steps):
            action = self.random.choices(actions, weights)[0][0]
            action()
            name = action.__name__.strip("_")
            self.report.actions[name] = self.report.actions.get(name, 0) + 1
            self.report.steps = step + 1
            self.now_s += 0.01
            if self.config.integrity_every and step % self.config.integrity_every == 0:
                self.manager.check_integrity()
                self._check_visible()
        self._drain()
        self.report.stats = self.manager.stats()
        return self.report

    def _drain(self) -> None:
        for request in list(self.live):
            self._end(request)
        while any(rank.stream or rank.moving or rank.outbox for rank in self.engine.ranks):
            self._move()
            self._deliver()
        for request_id in list(self.model.leases):
            self.manager.release(request_id)
            self.model.release(request_id)
        self.manager.check_integrity()
        self._check_visible()
        require(
            not self.model.ops and self.manager.inflight_ops() == 0,
            "ops are left after everything was reported",
        )
        for group, spec in enumerate(self.config.groups):
            visible = sum(key[0] == group for key in self.model.visible)
            require(self.manager.free_slots(group) == self.model.up[group] - visible, "slots leaked")
            require(
                len(self.engine.pool.free(group)) == self.config.engine_blocks,
                f"engine blocks leaked: {spec}",
            )

    def _check_visible(self) -> None:
        """Every visible slot holds what its key promises, on every rank."""
        for (group, key), slot in self.model.visible.items():
            for rank in self.engine.ranks:
                require(
                    rank.slot[group][slot] == (self.engine.weights, key),
                    "a visible slot holds another block's bytes",
                )

    # --- requests -----------------------------------------------------------------------------------------------------

    def _arrive(self) -> None:
        if len(self.live) >= self.config.requests:
            return
        groups = range(len(self.config.groups))
        length = self.random.randint(0, 8)
        # Few branches, so that requests share prefixes and want again what was stored before.
        path = tuple(int(self.random.random() < 0.15) for _ in range(length))
        block_tokens = self.config.groups[0].block_tokens
        tail = tuple(self.random.randrange(2) for _ in range(self.random.randrange(block_tokens)))
        if any(spec.policy is not GroupPolicy.PREFIX for spec in self.config.groups):
            tail = ()
        keys = [[_key(g, path[: i + 1]) for i in range(length)] for g in groups]
        arrays = [np.frombuffer(b"".join(k), np.uint8).reshape(-1, 16) for k in keys]
        tail_keys = [{n: _key(g, path, "tail", tail[:n]) for n in range(1, len(tail) + 1)} for g in groups]
        self._names += 1
        self.live.append(SimRequest(f"r{self._names}", path, tail, arrays, keys, tail_keys))

    def _pick(self) -> SimRequest | None:
        return self.random.choice(self.live) if self.live else None

    def _advance_request(self) -> None:
        request = self._pick()
        if request is None:
            return
        if request.state == "new":
            self._look_up(request)
        elif request.state == "matched":
            self._after_lookup(request)
        elif request.state == "running":
            self._run_some(request)

    def _look_up(self, request: SimRequest) -> None:
        if not request.blocks:
            self._take_local_blocks(request)
        start = request.start
        self.model.release(request.request_id)
        tails = None
        model_blocks = self.model.restorable(request.keys, start)
        if request.tail and self.random.random() < 0.8:
            base = (
                len(request.path) if self.random.random() < 0.9 else self.random.randint(0, len(request.path))
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
        result = self.manager.match(request.request_id, request.arrays, start, tails)
        require(
            result.blocks == model_blocks,
            f"match promised {result.blocks} blocks, {model_blocks} are restorable",
        )
        pages: list[tuple[Key, int]] = []
        for group, match in enumerate(result.groups):
            needed = self.model.needed(group, start, result.blocks)
            require(len(match.slots) == len(needed), "match names another number of slots than are needed")
            require(not needed or match.first_block == needed.start, "match starts at another block")
            pages += [
                ((group, request.keys[group][n]), int(s)) for n, s in zip(needed, match.slots, strict=True)
            ]
        model_tail = 0
        if tails is not None and tails[0].base_block == start + result.blocks:
            model_tail = self.model.tail(request.tail_keys, len(pages))
        require(
            result.tail_tokens == model_tail,
            f"match promised a tail of {result.tail_tokens}, not {model_tail}",
        )
        if result.tail_tokens:
            pages += [
                ((group, request.tail_keys[group][result.tail_tokens]), match.tail_slot)
                for group, match in enumerate(result.groups)
            ]
        self.model.lease(request.request_id, pages)
        request.promised, request.promised_tail = result.blocks, result.tail_tokens
        request.state = "matched"

    def _take_local_blocks(self, request: SimRequest) -> None:
        """Shares the leading blocks that another live request has, as an engine's own prefix cache does."""
        groups = range(len(self.config.groups))
        request.blocks = [[] for _ in groups]
        request.has = [[] for _ in groups]
        request.start = request.computed = request.offered = 0
        request.tail_loaded = 0
        donor = self._pick()
        if donor is None or donor is request or donor.state != "running" or self.random.random() < 0.5:
            return
        if donor.unverified and not self.config.ordered_reports:
            return
        shared = 0
        for ours, theirs in zip(request.path, donor.path[: donor.computed], strict=False):
            if ours != theirs:
                break
            shared += 1
        if not all(donor.has[g][n] for g in groups for n in self.model.needed(g, 0, shared)):
            return
        for g in groups:
            for number in range(shared):
                self._give_block(request, g, donor.blocks[g][number], donor.has[g][number])
        request.start = request.computed = request.offered = shared

    def _give_block(self, request: SimRequest, group: int, block: int, has: bool) -> None:
        self.engine.pool.hold((group, block))
        request.blocks[group].append(block)
        request.has[group].append(has)

    def _after_lookup(self, request: SimRequest) -> None:
        choice = self.random.random()
        if choice < 0.15:
            self._look_up(request)
        elif choice < 0.25:
            self._release(request)
            self._start_running(request)
        elif request.request_id not in self.model.leases:
            if self._room_for(request.total - request.start):
                self._release(request)
                self._start_running(request)
        else:
            self._load(request)

    def _release(self, request: SimRequest) -> None:
        self.manager.release(request.request_id)
        self.model.release(request.request_id)
        if self.random.random() < 0.2:
            self.manager.release(request.request_id)

    def _room_for(self, blocks: int) -> bool:
        return all(len(self.engine.pool.free(g)) >= blocks for g in range(len(self.config.groups)))

    def _start_running(self, request: SimRequest) -> None:
        request.state = "running"

    def _load(self, request: SimRequest) -> None:
        groups = range(len(self.config.groups))
        prefix_only = all(spec.policy is GroupPolicy.PREFIX for spec in self.config.groups)
        taken = request.promised
        if prefix_only and self.random.random() < 0.2:
            taken = self.random.randint(0, request.promised)
        tail = bool(request.promised_tail) and taken == request.promised and self.random.random() < 0.9
        if not self._room_for(taken + tail):
            return
        lease = dict(self.model.leases[request.request_id])
        targets: list[list[int]] = []
        planned: list[tuple[list[Key], list[int]]] = []
        for g in groups:
            needed = self.model.needed(g, request.start, taken)
            free = iter(self.random.sample(self.engine.pool.free(g), taken + tail))
            for number in range(request.start, request.start + taken):
                self._give_block(request, g, next(free), number in needed)
            numbers = list(needed)
            keys: list[Key] = [(g, request.keys[g][n]) for n in numbers]
            if tail:
                self._give_block(request, g, next(free), True)
                keys.append((g, request.tail_keys[g][request.promised_tail]))
                numbers.append(request.start + taken)
            targets.append([request.blocks[g][n] for n in numbers])
            planned.append((keys, numbers))
        graph = self.manager.begin_load(request.request_id, [np.array(t, np.int32) for t in targets], tail)
        self.model.release(request.request_id)
        request.computed = request.start + taken
        request.tail_loaded = request.promised_tail if tail else 0
        sync = self.random.random() < 0.4
        request.state = "running" if sync or graph is None else "loading"
        for op in graph.ops if graph is not None else ():
            keys, numbers = planned[op.group]
            slots = op.slots.tolist()
            require(slots == [lease[key] for key in keys], "a load reads other slots than were promised")
            require(op.blocks.tolist() == targets[op.group], "a load writes other blocks than were given")
            self._submit(op, request, OpRole.LOAD, keys, numbers, in_stream=sync)
            request.unverified.add(op.op_id)

    def _submit(
        self,
        op: TransferOp,
        request: SimRequest,
        role: OpRole,
        keys: list[Key],
        numbers: list[int],
        in_stream: bool,
    ) -> None:
        waits = {
            number
            for number, other in self.model.ops.items()
            if role is OpRole.STORE and other.role is OpRole.LOAD and other.request_id == request.request_id
        }
        self.model.add_op(
            op.op_id,
            ModelOp(request.request_id, role, keys, op.slots.tolist(), numbers, self.model.epoch, waits),
        )
        self.ops[op.op_id] = op
        self.engine.enqueue(op, role is OpRole.LOAD, in_stream)

    def _run_some(self, request: SimRequest) -> None:
        choice = self.random.random()
        if request.computed < request.total and choice < 0.6:
            for _ in range(self.random.randint(1, 3)):
                self._compute_block(request)
        elif request.offered < request.computed and choice < 0.95:
            self._store(request)
        elif request.computed == request.total and choice > 0.7:
            self._end(request)

    def _compute_block(self, request: SimRequest) -> None:
        number = request.computed
        if number >= request.total:
            return
        groups = range(len(self.config.groups))
        if any(len(request.blocks[g]) <= number for g in groups) and not self._room_for(1):
            return
        inputs: list[tuple[Place, bytes]] = []
        outputs: list[tuple[Place, bytes]] = []
        for g in groups:
            if len(request.blocks[g]) <= number:
                self._give_block(request, g, self.random.choice(self.engine.pool.free(g)), False)
            inputs += [
                ((g, request.blocks[g][n]), request.keys[g][n]) for n in self.model.needed(g, 0, number)
            ]
            if number == len(request.path) and request.tail_loaded:
                inputs.append(((g, request.blocks[g][number]), request.tail_keys[g][request.tail_loaded]))
            outputs.append(((g, request.blocks[g][number]), request.key_of(g, number)))
            request.has[g][number] = True
        self.engine.compute(inputs, outputs)
        request.computed = number + 1

    def _store(self, request: SimRequest) -> None:
        first = request.offered if self.random.random() < 0.8 else self.random.randint(0, request.offered)
        end = self.random.randint(first, request.computed)
        for group in range(len(self.config.groups)):
            numbers = [n for n in range(first, end) if request.has[group][n]]
            # An op names consecutive blocks; groups with a window have holes.
            while numbers:
                cut = next((i for i in range(1, len(numbers)) if numbers[i] != numbers[0] + i), len(numbers))
                self._store_blocks(request, group, numbers[:cut])
                numbers = numbers[cut:]
        request.offered = max(request.offered, end)

    def _store_blocks(self, request: SimRequest, group: int, numbers: list[int]) -> None:
        keys: list[Key] = [(group, request.key_of(group, n)) for n in numbers]
        array = np.frombuffer(b"".join(key for _, key in keys), np.uint8).reshape(-1, 16)
        blocks = np.array([request.blocks[group][n] for n in numbers], np.int32)
        plan = self.manager.begin_store(request.request_id, group, array, blocks, numbers[0])
        stored = plan.stored.tolist()
        op = plan.graph.ops[0] if plan.graph else None
        self.model.plan_store(
            keys,
            stored,
            op.slots.tolist() if op else [],
            plan.known,
            plan.dropped,
            self.recorder.take_evicted(),
        )
        require((op is not None) == bool(stored), "a store without pages, or pages without a store")
        if op is not None:
            require(
                op.blocks.tolist() == blocks[stored].tolist(), "a store reads other blocks than were given"
            )
            chosen = [keys[i] for i in stored]
            self._submit(op, request, OpRole.STORE, chosen, [numbers[i] for i in stored], in_stream=True)

    def _free_blocks(self, request: SimRequest) -> None:
        for group, blocks in enumerate(request.blocks):
            for block in blocks:
                self.engine.pool.drop((group, block))
        request.blocks, request.has = [], []
        request.unverified = set()

    def _end(self, request: SimRequest) -> None:
        self._release(request)
        self._free_blocks(request)
        self.live.remove(request)

    def _abort(self) -> None:
        request = self._pick()
        if request is not None:
            self._end(request)

    def _preempt(self) -> None:
        request = self._pick()
        # An engine does not preempt a request that waits for its load.
        if request is not None and request.state == "running":
            self._restart(request)

    def _restart(self, request: SimRequest) -> None:
        self._release(request)
        self._free_blocks(request)
        request.state = "new"

    # --- ranks --------------------------------------------------------------------------------------------------------

    def _move(self) -> None:
        for _ in range(2 * self.config.ranks):
            self._move_rank(self.random.choice(self.engine.ranks))

    def _move_rank(self, rank: Rank) -> None:
        """One rank does one thing: the head of its stream, or some pages of any of its movements."""
        if rank.stream and (not rank.moving or self.random.random() < 0.5):
            task = rank.stream.popleft()
            if isinstance(task, Compute):
                self.engine.run_compute(rank, task)
            elif task.is_load:
                while task.left:
                    self._move_page(rank, task)
                self._finish(rank, task)
            else:
                rank.moving.append(task)
        elif rank.moving:
            movement = self.random.choice(rank.moving)
            for _ in range(min(len(movement.left), self.random.randint(1, 4))):
                self._move_page(rank, movement)
            if not movement.left:
                rank.moving.remove(movement)
                self._finish(rank, movement)

    def _move_page(self, rank: Rank, movement: Movement) -> None:
        lost = self.report.steps < self._lost_until
        self.engine.move_page(rank, movement, lost or self.random.random() < self.config.failure_rate)

    def _finish(self, rank: Rank, movement: Movement) -> None:
        status, failed, reason = OpStatus.OK, movement.failed, ""
        if len(failed) == movement.op.pages and self.random.random() < 0.5:
            status, failed, reason = OpStatus.LANE_DOWN, [], "lane down"
        elif failed:
            status, reason = OpStatus.FAILED, "page failed"
        rank.outbox.append(OpResult(movement.op.op_id, status, np.array(failed, np.int32), reason))

    def _cancel(self) -> None:
        """Drops an op that a rank has not begun."""
        rank = self.random.choice(self.engine.ranks)
        waiting = [movement for movement in rank.moving if not movement.started]
        if not waiting:
            return
        movement = self.random.choice(waiting)
        rank.moving.remove(movement)
        pages = np.arange(movement.op.pages, dtype=np.int32)
        rank.outbox.append(OpResult(movement.op.op_id, OpStatus.CANCELLED, pages, "cancelled"))

    def _deliver(self) -> None:
        for _ in range(self.config.ranks):
            self._deliver_from(self.random.randrange(self.config.ranks))

    def _deliver_from(self, number: int) -> None:
        outbox = self.engine.ranks[number].outbox
        if not outbox:
            return
        result = outbox.pop(0 if self.config.ordered_reports else self.random.randrange(len(outbox)))
        op_id = result.op_id
        self.model.report(result)
        model_op = self.model.ops[op_id]
        completion = self.manager.complete(number, result)
        self.model.end_op(op_id, completion, self.recorder.take_evicted(), self.recorder.take_published())
        if completion is None:
            return
        op = self.ops.pop(op_id)
        require(completion.blocks.tolist() == op.blocks.tolist(), "a completion names other blocks")
        if model_op.role is OpRole.LOAD:
            self._load_ended(model_op, op, completion.failed_blocks.tolist())
        self.engine.ended(op)

    def _load_ended(self, model_op: ModelOp, op: TransferOp, failed_blocks: list[int]) -> None:
        failed = set(failed_blocks)
        for page, (key, block) in enumerate(zip(model_op.keys, op.blocks.tolist(), strict=True)):
            if block in failed:
                self.report.failed_pages += 1
                continue
            self.report.verified_pages += 1
            wanted = (self.engine.weights, key[1])
            require(
                all(symbol == wanted for symbol in self.engine.arrived(op, page)),
                "a load delivered another block's bytes",
            )
        for request in list(self.live):
            request.unverified.discard(op.op_id)
            for group, blocks in enumerate(request.blocks):
                bad = [n for n, block in enumerate(blocks) if group == op.group and block in failed]
                if bad:
                    self._recompute_from(request, bad[0])
            if (
                request.request_id == model_op.request_id
                and request.state == "loading"
                and not request.unverified
            ):
                self._start_running(request)

    def _recompute_from(self, request: SimRequest, number: int) -> None:
        """The engine learns that block `number` holds no KV: nothing computed from it counts.

        It goes back to the last boundary before which it has what every group needs to go on.
        """
        groups = range(len(self.config.groups))
        while not all(request.has[g][n] for g in groups for n in self.model.needed(g, 0, number)):
            number -= 1
        barred = self.manager.discard_from(request.request_id, number)
        require(
            barred == self.model.bar(request.request_id, number),
            "discard_from barred another number of pages",
        )
        request.computed = min(request.computed, number)
        request.offered = min(request.offered, number)
        for has in request.has:
            has[number:] = [False] * len(has[number:])
        request.tail_loaded = 0

    # --- the cache as a whole -----------------------------------------------------------------------------------------

    def _forget(self) -> None:
        known = [*self.model.visible, *self.model.pending]
        if not known:
            return
        group = self.random.choice(known)[0]
        keys: list[Key] = [key for key in known if key[0] == group and self.random.random() < 0.2]
        keys.append((group, _key("unknown")))
        array = np.frombuffer(b"".join(key for _, key in keys), np.uint8).reshape(-1, 16)
        count = self.manager.forget(group, array)
        expected, seen = self.model.forget(keys)
        require(count == expected, f"forget knew {count} keys, not {expected}")
        require(
            sorted(self.recorder.take_evicted()) == sorted(seen),
            "the listener was told of other forgotten keys",
        )

    def _expire(self) -> None:
        self.now_s += self.random.choice((1.0, 20.0, 31.0))
        before = set(self.model.leases)
        count = self.manager.expire()
        gone = {request_id for request_id in before if self.manager.leased_pages(request_id) == 0}
        require(count == len(gone), "expire counts other leases than it ended")
        for request in self.live:
            if request.request_id in gone and request.state == "matched":
                self._restart(request)
        for request_id in gone:
            self.model.release(request_id)

    def _grow_some(self) -> None:
        self._grow(self.random.randrange(len(self.config.groups)))

    def _grow(self, group: int) -> None:
        slots = self.config.groups[group].slots
        self.model.up[group] = min(slots, self.model.up[group] + max(1, slots // 3))
        self.manager.grow(group, self.model.up[group])

    def _lose_pool(self) -> None:
        self._lost_until = self.report.steps + self.random.randint(10, 60)

    def _reset(self) -> None:
        epoch = self.manager.reset()
        self.model.reset()
        require(
            epoch == self.model.epoch and self.recorder.resets[-1] == epoch, "reset did not begin a new epoch"
        )
        self.engine.weights = epoch
        for request in list(self.live):
            if request.state == "loading":
                self._end(request)
            else:
                self._restart(request)


__all__ = ["RuleBroken", "Simulation", "SimulationConfig", "SimulationReport"]
