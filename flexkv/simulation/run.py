"""A seeded simulation of the control plane: the real manager, an engine whose blocks hold (epoch, key) instead of KV,
and injected faults.

Each step takes one random action. A request looks up, loads, computes, stores or ends. A rank moves pages, reports
pages as failed, or reports late. The cache forgets keys, grows, expires pages or is reset. Disks and remote stores
move, lose or refuse pages. An independent model checks the manager's answer after every call. Engine blocks and slots
are checked to hold the content that belongs to their keys.
"""

from __future__ import annotations

from collections.abc import Callable

from flexkv.cache.manager import LocalCacheManager
from flexkv.simulation.base import ManagerFactory, SimulationConfig, SimulationReport, require
from flexkv.simulation.disk_moves import DiskMoves
from flexkv.simulation.fault_events import FaultEvents
from flexkv.simulation.ranks import Ranks
from flexkv.simulation.requests import Requests
from flexkv.simulation.store_moves import StoreMoves
from flexkv.simulation.world import World

Action = Callable[[], None]

RESET, RESET_REMOTE = 0.05, 0.01
"""Weight of a reset among the actions, without and with a remote tier. With a remote tier resets are rarer, because
after a reset that tier is out of use for the rest of the run."""


class Simulation:
    """One run of a simulation. Tests pass a faulty manager class as `manager_class` to check that the simulation finds
    the fault."""

    def __init__(self, config: SimulationConfig, manager_class: ManagerFactory = LocalCacheManager) -> None:
        self.world = World(config, manager_class)
        self.disks = DiskMoves(self.world)
        self.requests = Requests(self.world, self._orders_planned)
        self.ranks = Ranks(self.world, self.requests)
        self.fault_events = FaultEvents(self.world, self.requests)

    @property
    def report(self) -> SimulationReport:
        """The report of the steps so far. It can also be read after the run has ended with a broken rule."""
        return self.world.report

    def _orders_planned(self) -> None:
        if self.world.config.has_tiers:
            self.disks.take_orders()

    def _actions(self) -> list[tuple[Action, float]]:
        """Returns every action and its weight. The report names an action after its method, with the prefix `disk_`,
        `tier_` or `store_` if `DiskMoves`, `TierMoves` or `StoreMoves` defines the method."""
        return [
            (self.requests.arrive, 8),
            (self.requests.advance_request, 30),
            (self.ranks.move, 30),
            (self.ranks.deliver, 20),
            (self.requests.abort, 0.7),
            (self.requests.preempt, 0.7),
            (self.ranks.cancel, 0.7),
            (self.fault_events.forget, 0.15),
            (self.fault_events.expire, 0.2),
            (self.fault_events.grow_some, 0.2),
            (self.fault_events.lose_pool, 0.04),
            (self.fault_events.reset, RESET_REMOTE if self.world.config.remote else RESET),
            *self._disk_actions(),
        ]

    def _disk_actions(self) -> list[tuple[Action, float]]:
        if not self.world.config.has_tiers:
            return []
        disks = self.disks
        moves: list[tuple[Action, float]] = [
            (disks.move, 25),
            (disks.deliver, 15),
            (disks.cancel, 0.7),
            (disks.lose, 0.02),
            (self.requests.prefetch, 6),
        ]
        if disks.tier_moves is not None:
            tier = disks.tier_moves
            moves += [(tier.move, 25), (tier.deliver, 15), (tier.cancel, 0.7), (tier.lose, 0.5)]
        if isinstance(disks.tier_moves, StoreMoves):
            store = disks.tier_moves
            moves += [(store.answer, 25), (store.share, 8), (store.cut, 0.3)]
        return [*moves, (disks.measure_step, 2)] if self.world.config.measured_steps else moves

    def run(self) -> SimulationReport:
        """Takes all steps, drains everything in flight, and returns the report.

        Raises:
            RuleBroken: the manager broke a rule, or a load delivered KV that does not belong to its key.
            ContractError: the manager's own invariants do not hold.
        """
        world = self.world
        actions = self._actions()
        weights = [weight for _, weight in actions]
        for step in range(world.config.steps):
            action = world.random.choices(actions, weights)[0][0]
            action()
            name = action.__name__
            if action.__qualname__.startswith("DiskMoves."):
                name = f"disk_{name}"
            if action.__qualname__.startswith("TierMoves."):
                name = f"tier_{name}"
            if action.__qualname__.startswith("StoreMoves."):
                name = f"store_{name}"
            world.report.actions[name] = world.report.actions.get(name, 0) + 1
            world.report.steps = step + 1
            world.now_s += 0.01
            if world.config.integrity_every and step % world.config.integrity_every == 0:
                world.manager.check_integrity()
                world.check_visible()
                self.disks.check()
        self._drain()
        world.report.stats = world.manager.stats()
        world.report.stored_while_read = world.model.taken_over
        if world.config.disk_places:
            world.report.disk = world.disk_tier.counts
        if world.symbolic_tier is not None:
            world.report.symbolic = world.symbolic_tier.counts
        if world.remote_tier is not None:
            world.report.symbolic = world.remote_tier.counts
        return world.report

    def _drain(self) -> None:
        world = self.world
        for request in list(world.live):
            self.requests.end(request)
        while any(rank.stream or rank.moving or rank.outbox for rank in world.engine.ranks):
            self.ranks.move()
            self.ranks.deliver()
            if world.config.stream:
                # Loads may wait for reads from disk.
                self.disks.move()
                self.disks.deliver()
        while world.config.has_tiers and self.disks.busy:
            self.disks.move()
            self.disks.deliver()
            if self.disks.tier_moves is not None:
                self.disks.tier_moves.move()
                self.disks.tier_moves.deliver()
            if isinstance(self.disks.tier_moves, StoreMoves):
                self.disks.tier_moves.answer()
        for request_id in list(world.model.leases):
            world.manager.release(request_id)
            world.model.release(request_id)
        world.manager.check_integrity()
        world.check_visible()
        require(
            not world.model.ops and world.manager.inflight_ops() == 0,
            "ops are left after everything was reported",
        )
        require(
            not len(world.manager.promises.load_tries),
            "failed loads of requests that have ended are remembered",
        )
        for group, spec in enumerate(world.config.groups):
            visible = len(world.model.visible_slots(group))
            require(world.manager.free_slots(group) == world.model.up[group] - visible, "slots leaked")
            require(
                len(world.engine.pool.free(group)) == world.config.engine_blocks,
                f"engine blocks leaked: {spec}",
            )
