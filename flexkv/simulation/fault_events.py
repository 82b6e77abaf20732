"""Events that affect the cache as a whole: keys are forgotten, pages and leases expire, a pool grows or is lost, and
the cache is reset."""

from __future__ import annotations

import numpy as np

from flexkv.simulation.base import Key, require
from flexkv.simulation.requests import Requests
from flexkv.simulation.world import World, block_key


class FaultEvents:
    """Each public method makes one event happen. `Simulation` decides how often each is called."""

    def __init__(self, world: World, requests: Requests) -> None:
        self.world = world
        self.requests = requests

    def forget(self) -> None:
        world = self.world
        known = [*world.model.visible, *world.model.pending]
        if not known:
            return
        group = world.random.choice(known)[0]
        keys: list[Key] = [key for key in known if key[0] == group and world.random.random() < 0.2]
        keys.append((group, block_key("unknown")))
        gone = [bytes(row[0]) for row in world.disk.journal[group].values() if world.random.random() < 0.1]
        keys += [(group, key) for key in gone if (group, key) not in keys]
        array = np.frombuffer(b"".join(key for _, key in keys), np.uint8).reshape(-1, 16)
        on_disk_alone = self._on_disk(group, [key for key in keys if key not in known])
        count = world.manager.forget(group, array)
        expected, seen = world.model.forget(keys)
        expected += on_disk_alone
        require(count == expected, f"forget knew {count} keys, not {expected}")
        require(self._on_disk(group, keys) == 0, "forgotten keys are still on disk")
        require(
            sorted(world.recorder.take_evicted()) == sorted(seen),
            "the listener was told of other forgotten keys",
        )

    def _on_disk(self, group: int, keys: list[Key]) -> int:
        """Returns how many of the keys are in a tier behind host memory or being written to one."""
        world = self.world
        if not keys:
            return 0
        array = np.frombuffer(b"".join(key for _, key in keys), np.uint8).reshape(-1, 16)
        known = np.zeros(len(keys), np.bool_)
        for tier in world.manager.tiers[1:]:
            if tier.sink is not None:
                known |= tier.sink.known(group, array)
        return int(np.count_nonzero(known))

    def expire(self) -> None:
        world = self.world
        world.now_s += world.random.choice((1.0, 20.0, 31.0))
        world.expire_pages()
        before = set(world.model.leases)
        count = world.manager.expire()
        world.model.evict(world.recorder.take_evicted())
        gone = {request_id for request_id in before if world.manager.leased_pages(request_id) == 0}
        require(count == len(gone), "expire counts other leases than it ended")
        for request in world.live:
            if request.request_id in gone and request.state == "matched":
                self.requests.restart(request)
        for request_id in gone:
            world.model.release(request_id)

    def grow_some(self) -> None:
        world = self.world
        world.grow(world.random.randrange(len(world.config.groups)))

    def lose_pool(self) -> None:
        world = self.world
        world.lost_until = world.report.steps + world.random.randint(10, 60)

    def reset(self) -> None:
        world = self.world
        epoch = world.manager.reset()
        world.model.reset()
        world.line.clear()
        require(
            epoch == world.model.epoch and world.recorder.resets[-1] == epoch,
            "reset did not begin a new epoch",
        )
        world.engine.weights = epoch
        for request in list(world.live):
            if request.state == "loading":
                self.requests.end(request)
            else:
                self.requests.restart(request)
