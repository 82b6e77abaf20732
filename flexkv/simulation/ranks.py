"""Events of a simulation's ranks: ranks move pages or report them as failed, cancel ops, and report results at random
times."""

from __future__ import annotations

import numpy as np

from flexkv.cache.base import OpRole
from flexkv.simulation.base import require
from flexkv.simulation.engine import Compute, Movement, Rank
from flexkv.simulation.failure_causes import causes_of
from flexkv.simulation.model_ops import ModelOp
from flexkv.simulation.requests import Requests
from flexkv.simulation.symbolic_volumes import identities, stripe_digest
from flexkv.simulation.world import World
from flexkv.transfer.graph import NO_CAUSES, NO_DIGESTS, OpKind, OpResult, OpStatus, RunDigests, TransferOp


class Ranks:
    """Runs the ranks' streams and movements, and passes the ranks' results to the manager."""

    def __init__(self, world: World, requests: Requests) -> None:
        self.world = world
        self.requests = requests

    def move(self) -> None:
        world = self.world
        for _ in range(2 * world.config.ranks):
            self._move_rank(world.random.choice(world.engine.ranks))

    def deliver(self) -> None:
        world = self.world
        for _ in range(world.config.ranks):
            self._deliver_from(world.random.randrange(world.config.ranks))

    def cancel(self) -> None:
        """Cancels an op that a rank has not begun."""
        world = self.world
        rank = world.random.choice(world.engine.ranks)
        waiting = [movement for movement in rank.moving if not movement.started]
        if not waiting:
            return
        movement = world.random.choice(waiting)
        rank.moving.remove(movement)
        rank.outbox.append(OpResult.cancelled(movement.op.op_id, movement.op.pages, "cancelled"))

    def _move_rank(self, rank: Rank) -> None:
        """Makes one step of one rank: runs the first item of the rank's stream, or moves some pages of an op that is
        not in the stream.
        """
        world = self.world
        if rank.stream and (not rank.moving or world.random.random() < 0.5):
            task = rank.stream.popleft()
            if isinstance(task, Compute):
                world.engine.run_compute(rank, task)
            elif task.is_load:
                while self._move_page(rank, task):
                    continue
                if task.left:
                    # The stream waits until the pages of the load have arrived.
                    rank.stream.appendleft(task)
                else:
                    self._finish(rank, task)
            else:
                rank.moving.append(task)
        elif rank.moving:
            movement = world.random.choice(rank.moving)
            for _ in range(world.random.randint(1, 4)):
                self._move_page(rank, movement)
            if not movement.left:
                rank.moving.remove(movement)
                self._finish(rank, movement)

    def _move_page(self, rank: Rank, movement: Movement) -> bool:
        """Moves the first page that can be moved, or marks it as failed if its read from disk has failed. Returns False
        if no page can be moved yet.
        """
        world = self.world
        op = movement.op
        if op.kind is OpKind.GDS_READ and movement.left:
            self._bring_page(rank, movement, movement.left[0])
            return True
        if op.kind is OpKind.GDS_WRITE and movement.left:
            self._write_stripe(rank, movement, movement.left[0])
            return True
        for page in movement.left:
            read = int(op.reads[page]) if len(op.reads) else 0
            there = world.disk_lane.arrived(op.group, int(op.slots[page]), read) if read else True
            if there is None:
                continue
            if there:
                lost = world.report.steps < world.lost_until
                fails = lost or world.random.random() < world.config.failure_rate
                world.engine.move_page(rank, movement, page, fails)
            else:
                world.engine.fail_page(movement, page)
            return True
        return False

    def _bring_page(self, rank: Rank, movement: Movement, page: int) -> None:
        """Moves a page from its disk slot to its engine block. Marks the page as failed if the disk slot does not have
        it."""
        world, op = self.world, movement.op
        symbols = world.disk.read(op.group, int(op.places[page]), identities(op)[page])
        if symbols is None:
            world.engine.fail_page(movement, page)
            movement.missing.add(page)
            return
        fails = world.random.random() < world.config.failure_rate
        symbol = symbols[world.engine.ranks.index(rank)]
        world.engine.bring_page(rank, movement, page, symbol, fails)

    def _write_stripe(self, rank: Rank, movement: Movement, page: int) -> None:
        """Writes a rank's stripe of a page to disk. A random failure makes the stripe garbage."""
        world, op = self.world, movement.op
        fails = world.random.random() < world.config.failure_rate
        symbol = world.engine.read_page(rank, movement, page, fails)
        number = world.engine.ranks.index(rank)
        if not world.disk.write_stripe(op.group, int(op.places[page]), number, symbol) and not fails:
            movement.failed.append(page)

    def _digests(self, rank: Rank, movement: Movement) -> RunDigests:
        """Returns the digests that a rank reports for the stripes that it wrote. Each stripe has one run."""
        number = self.world.engine.ranks.index(rank)
        digests = [stripe_digest(number, movement.arrived[page]) for page in range(movement.op.pages)]
        return np.array(digests, np.uint64).reshape(-1, 1)

    def _finish(self, rank: Rank, movement: Movement) -> None:
        status, failed, reason, causes = OpStatus.OK, movement.failed, "", NO_CAUSES
        # A lane for loads straight from disk does not go down, because the rest of the run would then have no such
        # loads.
        may_go_down = movement.op.kind is not OpKind.GDS_READ
        if may_go_down and len(failed) == movement.op.pages and self.world.random.random() < 0.5:
            status, failed, reason = OpStatus.LANE_DOWN, [], "lane down"
        elif failed:
            status, reason = OpStatus.FAILED, "page failed"
            causes = causes_of(
                self.world.random,
                movement.op.kind,
                failed,
                movement.missing,
                self.world.config.source_error_rate,
            )
        reports = movement.op.kind is OpKind.GDS_WRITE and status is not OpStatus.LANE_DOWN
        digests = self._digests(rank, movement) if reports else NO_DIGESTS
        pages = np.array(failed, np.int32)
        rank.outbox.append(OpResult(movement.op.op_id, status, pages, reason, digests, causes))

    def _deliver_from(self, number: int) -> None:
        world = self.world
        outbox = world.engine.ranks[number].outbox
        if not outbox:
            return
        result = outbox.pop(0 if world.config.ordered_reports else world.random.randrange(len(outbox)))
        op_id = result.op_id
        world.model.report(result)
        model_op, op = world.model.ops[op_id], world.ops[op_id]
        named = world.disk.named(op) if model_op.role is OpRole.LOAD else set()
        completion = world.manager.complete(number, result)
        world.model.end_op(op_id, completion, world.recorder.take_evicted(), world.recorder.take_published())
        if completion is None:
            return
        del world.ops[op_id]
        of_ranks = world.disk_lane.rank_ops.pop(op_id, None) is not None
        self.requests.lookups.orders_planned()  # `complete` may have planned the seal of a store on disk
        if of_ranks and model_op.role is OpRole.LOAD and model_op.epoch == world.model.epoch:
            world.disk.require_forgotten(op, model_op.suspect)
            world.disk.require_kept(op, named - model_op.suspect)
        require(completion.blocks.tolist() == op.blocks.tolist(), "a completion names other blocks")
        if model_op.role is OpRole.LOAD:
            self._load_ended(model_op, op, completion.failed_blocks.tolist())
        world.engine.ended(op)

    def _load_ended(self, model_op: ModelOp, op: TransferOp, failed_blocks: list[int]) -> None:
        world = self.world
        failed = set(failed_blocks)
        for page, (key, block) in enumerate(zip(model_op.keys, op.blocks.tolist(), strict=True)):
            if block in failed:
                world.report.failed_pages += 1
                continue
            world.report.verified_pages += 1
            wanted = (world.engine.weights, key[1])
            require(
                all(symbol == wanted for symbol in world.engine.arrived(op, page)),
                "a load delivered another block's bytes",
            )
        for request_id, table in world.retired:
            bad = [n for n, block in enumerate(table[op.group]) if block in failed]
            if bad:
                self.requests.bar_from(request_id, bad[0] * world.config.groups[op.group].block_tokens)
        for request in list(world.live):
            request.unverified.discard(op.op_id)
            for group, blocks in enumerate(request.blocks):
                bad = [n for n, block in enumerate(blocks) if group == op.group and block in failed]
                if bad:
                    self.requests.recompute_from(request, bad[0] // world.config.pages_a_step[group])
            if (
                request.request_id == model_op.request_id
                and request.state == "loading"
                and not request.unverified
            ):
                request.state = "running"
                if request.computed <= request.start and world.random.random() < 0.3:
                    # No page of the load can be used, so the engine starts over and looks up again.
                    self.requests.restart(request)
