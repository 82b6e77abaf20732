"""An engine that calls a connector in a random order, as real engines may. It looks requests up without allocating
blocks for them, ends them at any moment, preempts them, reuses their names, computes prompts in chunks, and resets its
cache. A test can check every value in its blocks.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from flexkv.adapters.vllm.worker import WorkerSide
from tests.unit.adapters.mini_engine import MiniEngine
from tests.unit.adapters.mini_pools import Live
from tests.unit.adapters.vllm_objects import BLOCK_TOKENS, make_request

GARBAGE = -2.0
NAMES = 6
"""The largest number of concurrent requests. Later requests reuse the names of earlier ones."""

LENGTHS = (1, 2, BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 1, 2 * BLOCK_TOKENS, 23, 24, 25, 40)


class RandomEngine(MiniEngine):
    """An engine that takes one random action per call of `act`.

    Attributes:
        waiting: requests without blocks: new requests, and requests that were preempted.
        acts: how often each action was taken, by name.
    """

    def __init__(self, seed: int, **options: Any) -> None:
        super().__init__(**options)
        self.random = random.Random(seed)
        self.waiting: dict[str, Request] = {}
        self.acts: Counter[str] = Counter()
        self._resumed: set[str] = set()
        self._fresh: list[int] = []
        self._late: dict[str, Live] = {}
        """Requests that ended while their load was in flight, by name."""
        for worker in self.workers:
            self._spoil_after(worker)

    def _spoil_after(self, worker: WorkerSide) -> None:
        """Fills new blocks with garbage as soon as the worker allows the engine to write to them."""
        before_forward = worker.before_forward

        def then_spoil(orders: Any) -> None:
            before_forward(orders)
            for cache in self.pools.caches[worker.rank].values():
                cache[self._fresh] = GARBAGE

        worker.before_forward = then_spoil  # type: ignore[method-assign]

    # --- actions ---

    def act(self) -> None:
        """Takes one random action, then checks the engine's invariants."""
        (act,) = self.random.choices(list(self._weights), list(self._weights.values()))
        act()
        self.acts[act.__name__.removeprefix("_")] += 1
        self.verify()

    @property
    def _weights(self) -> dict[Callable[[], None], int]:
        """Returns the relative frequency of each action."""
        return {
            self._new: 10,
            self._only_ask: 5,
            self._admit: 15,
            self._compute: 20,
            self._idle: 5,
            self._end_one: 10,
            self._take_blocks: 5,
            self._new_weights: 1,
        }

    def verify(self) -> None:
        """Checks that the blocks of every running request hold the right KV for all tokens that count as computed."""
        self.unit.manager.check_integrity()
        for name, live in self.live.items():
            if not live.waiting_for_load:
                assert self.wrong(name) == [], f"{name}: {live.request.num_computed_tokens} tokens"

    def settle(self) -> None:
        """Ends all requests. Checks that neither the engine nor flexkv keeps any record of them."""
        for name in [*self.waiting, *self.live]:
            self._end(name)
        self.drain()
        for _ in range(3):
            self.step({})
        manager = self.unit.manager
        manager.check_integrity()
        assert manager.inflight_ops() == 0
        assert len(self.side.requests.live) == 0
        assert not self.live
        assert self.pool.get_num_free_blocks() == self.kv_config.num_blocks - 1
        assert manager.expire() == 0, "a lease was left behind"

    # --- requests ---

    def _new(self) -> None:
        free = [f"r{n}" for n in range(NAMES) if not self._known(f"r{n}")]
        if not free:
            return
        family = self.random.randrange(3)
        tokens = [1000 * family + n for n in range(self.random.choice(LENGTHS))]
        if self.random.random() < 0.3:
            tokens[self.random.randrange(len(tokens))] += 500
        name = self.random.choice(free)
        self.waiting[name] = make_request(tokens, name)

    def _known(self, name: str) -> bool:
        return name in self.waiting or name in self.live or name in self._pending or name in self._late

    def _only_ask(self) -> None:
        """Looks a request up but allocates nothing for it, like an engine that has no memory for the request."""
        if self.waiting:
            self.side.match(self._pick(self.waiting), 0)

    def _admit(self) -> None:
        if not self.waiting:
            return
        request = self._pick(self.waiting)
        count = -(-request.num_tokens // BLOCK_TOKENS)
        tokens, is_async = self.side.match(request, 0)
        if tokens is None or count > self.pool.get_num_free_blocks():
            return
        assert tokens < request.num_tokens, "a token is left to compute"
        if self.random.random() < 0.05:
            tokens, is_async = 0, False  # another connector supplied the first tokens
        name = str(request.request_id)
        del self.waiting[name]
        live = self.live[name] = Live(request)
        live.blocks = self.pool.get_new_blocks(count)
        ids = [block.block_id for block in live.blocks]
        self._fresh += ids
        self.side.allocated(request, SimpleNamespace(get_block_ids=lambda: (ids,)), tokens)
        request.num_computed_tokens = tokens
        live.waiting_for_load = is_async
        if is_async:
            self.step({})
            return
        self._cache_blocks(live, request.num_tokens)
        # A load within a step ends in the step in which it was ordered, so the request must compute in this step.
        self._compute_one(name)

    def _compute(self) -> None:
        able = [name for name, live in self.live.items() if not live.waiting_for_load]
        chosen = [name for name in able if self.random.random() < 0.7]
        self.step({name: chunk for name in chosen if (chunk := self._chunk(name))})

    def _compute_one(self, name: str) -> None:
        self.step({name: self._chunk(name)})

    def _chunk(self, name: str) -> int:
        """Returns how many tokens the request computes next: some or all of the rest of its prompt, or one generated
        token. Returns 0 if it has no block for another token.
        """
        live = self.live[name]
        left = live.request.num_tokens - live.request.num_computed_tokens
        if left:
            return self.random.randint(1, left) if self.random.random() < 0.5 else left
        if -(-(live.request.num_tokens + 1) // BLOCK_TOKENS) > len(live.blocks):
            return 0
        live.request.append_output_token_ids([self.random.randrange(3)])
        return 1

    def _idle(self) -> None:
        self.step({})

    def _end_one(self) -> None:
        names = [*self.waiting, *self.live]
        if names:
            self._end(self.random.choice(names))

    def _end(self, name: str) -> None:
        if (request := self.waiting.pop(name, None)) is not None:
            self.side.finished(request)
            return
        live = self.live[name]
        if live.waiting_for_load:
            # The engine keeps the blocks until the ranks have reported the end of the load.
            self._late[name] = live
        self.finish(name)

    def _take_blocks(self) -> None:
        able = [name for name, live in self.live.items() if not live.waiting_for_load]
        if not able:
            return
        name = self.random.choice(able)
        self.waiting[name] = self.live[name].request
        self._resumed.add(name)
        self.preempt(name)

    def _new_weights(self) -> None:
        """Replaces the weights: resets the connector's cache, and the engine's own cache if no request holds blocks."""
        if not (self.live or self._late):
            assert self.pool.reset_prefix_cache()
        self.side.reset()

    def _pick(self, requests: dict[str, Request]) -> Request:
        return requests[self.random.choice(list(requests))]

    # --- overridden methods of the engine ---

    def step(self, scheduled: dict[str, int] | None = None, before_forward: Any = None) -> None:
        super().step(scheduled, before_forward)
        self._fresh = []

    def _take(self, reports: list[Any]) -> None:
        super()._take(reports)
        for name in [
            name for name in self._late if name not in self._pending and name in self.finished_loads
        ]:
            self.finished_loads.remove(name)
            self.pool.free_blocks(reversed(self._late.pop(name).blocks))
        self.finished_loads = [name for name in self.finished_loads if name in self._late]

    def _output(self, scheduled: dict[str, int]) -> SchedulerOutput:
        output = super()._output(scheduled)
        # vLLM schedules a preempted request as a cached request, not as a new one.
        for new in [new for new in output.scheduled_new_reqs if new.req_id in self._resumed]:
            output.scheduled_new_reqs.remove(new)
            self._resumed.discard(new.req_id)
            output.scheduled_cached_reqs.req_ids.append(new.req_id)
            output.scheduled_cached_reqs.new_block_ids.append(new.block_ids)
            output.scheduled_cached_reqs.resumed_req_ids.add(new.req_id)
        return output
