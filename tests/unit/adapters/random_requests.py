"""Takes random actions of clients and operators on an engine with vLLM's own scheduler."""

from __future__ import annotations

import itertools
import random

from tests.unit.adapters.scheduled_engine import ScheduledEngine


class RandomRequests:
    """Takes random actions of clients and operators on an engine, one per call of `act`."""

    MOST = 6

    def __init__(self, engine: ScheduledEngine, rng: random.Random) -> None:
        self.engine, self.random = engine, rng
        block = max(spec.block_size for spec in engine.specs)
        self.lengths = (
            1,
            2,
            3,
            *(size * block + n for size in (1, 2) for n in (-1, 0, 1)),
            31,
            32,
            33,
            64,
            97,
        )
        self.loaded = 0
        self.names = (f"r{n}" for n in itertools.count())

    def act(self) -> None:
        engine, rng = self.engine, self.random
        scheduler, chance = engine.scheduler, rng.random()
        live = list(scheduler.requests)
        if chance < 0.25 and len(live) < self.MOST:
            extra = {"flexkv.skip_save": True} if rng.random() < 0.05 else {}
            engine.add(next(self.names), self._prompt(), rng.choice((1, 2, 5, 20)), **extra)
        elif chance < 0.30 and live:
            engine.end(rng.choice(live))
        elif chance < 0.32:
            if scheduler.reset_prefix_cache() and not engine.connector.has_pending_push_work():
                engine.spoil()
        elif chance < 0.325:
            self.reset_under_requests()
        elif chance < 0.33:
            engine.connector.reset_cache()
        elif chance < 0.40 and live:
            engine.step(lambda: engine.end(live[0]))
        else:
            engine.step()
        self.loaded += sum(engine.hits.values())
        engine.hits.clear()
        engine.check()

    def reset_under_requests(self) -> bool:
        """Resets vLLM's cache, and in half of the calls also flexkv's. Does nothing if vLLM would refuse the reset.
        Returns whether it reset the cache.
        """
        engine = self.engine
        # vLLM also refuses a reset during a step, which may still write blocks of a request that the reset would
        # preempt.
        if engine.waiting_hold_blocks or engine.steps_in_flight:
            return False
        engine.scheduler.reset_prefix_cache(
            reset_running_requests=True, reset_connector=self.random.random() < 0.5
        )
        return True

    def _prompt(self) -> list[int]:
        rng = self.random
        family, length = rng.randrange(2), max(1, rng.choice(self.lengths))
        tokens = [3 + (family * 37 + n * 7) % 90 for n in range(length)]
        if rng.random() < 0.4:
            cut = rng.randrange(length)
            tokens[cut:] = [(token + 11) % 97 + 3 for token in tokens[cut:]]
        return tokens

    def settle(self) -> None:
        """Ends all requests. Checks that neither the engine nor flexkv keeps any record of them."""
        engine = self.engine
        engine.settle()
        for _ in range(3):
            engine.step()
        engine.check()
        side = engine.connector.scheduler
        manager = side.unit.manager
        assert manager.inflight_ops() == 0
        assert not side.requests.live
        assert manager.expire() == 0
        assert engine.manager.block_pool.get_num_free_blocks() == engine.pool_config.num_blocks - 1
