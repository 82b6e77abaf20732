"""A stand-in executor with the connector's two classes, as in one rank of an engine."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from flexkv.adapters.tensorrt_llm import FlexKVScheduler, FlexKVWorker
from flexkv.adapters.tensorrt_llm.worker import WorkerSide
from flexkv.cache.manager import LocalCacheManager
from flexkv.transfer.graph import OpKind
from tests.unit.tensorrt_llm.executor import Executor
from tests.unit.tensorrt_llm.faults import Faults
from tests.unit.tensorrt_llm.group import LONG_S, Alone, Group
from tests.unit.tensorrt_llm.pool import Shape
from tests.unit.tensorrt_llm.request import Request
from tests.unit.transfer.transfer_world import STALL

SHAPE = Shape()
PROMPT = [(7 * n) % 1000 for n in range(30)]
WHOLE = 28
"""Number of PROMPT's 30 tokens that are in full blocks of 4."""

Make = Callable[..., "World"]
"""Type of the fixture `make_world`, a function that takes environment variables and the arguments of `World`."""


def settings(**more: str) -> dict[str, str]:
    """Returns environment variables for a small host tier."""
    return {
        "FLEXKV_HOST_BYTES": "2MiB",
        "FLEXKV_HOST_EXTENT_BYTES": "2MiB",
        "FLEXKV_HOST_HUGE_PAGES": "off",
        "FLEXKV_IDENTITY_MODEL": "stand-in",
    } | more


def arguments(ranks: int = 1, tokens: int = SHAPE.tokens, **more: Any) -> SimpleNamespace:
    """Returns the fields of `TorchLlmArgs` that the connector reads."""
    cache = {"tokens_per_block": tokens, "dtype": "auto", "host_cache_size": None} | more.pop("cache", {})
    given = {
        "model": "stand-in",
        "revision": None,
        "dtype": "float16",
        "tensor_parallel_size": ranks,
        "pipeline_parallel_size": 1,
        "context_parallel_size": 1,
        "enable_attention_dp": False,
        "max_beam_width": 1,
        "quant_config": None,
        "speculative_config": None,
        "sparse_attention_config": None,
    }
    return SimpleNamespace(kv_cache_config=SimpleNamespace(**cache), **(given | more))


class World:
    """One rank: an executor and the connector's classes.

    Args:
        movers: makes the mover of this rank's lanes. None means the product's mover.
    """

    def __init__(
        self,
        group: Group | None = None,
        ranks: int = 1,
        shape: Shape = SHAPE,
        movers: Any = None,
        llm_args: Any = None,
        **options: Any,
    ) -> None:
        group = group or Alone()
        given = llm_args or arguments(ranks, shape.tokens)

        class Side(WorkerSide):
            def make_mover(self) -> Any:
                return movers() if movers is not None else None

        class Worker(FlexKVWorker):
            side_class = Side

        self.worker = Worker(given)
        self.worker.side.rank = group.rank
        self.scheduler = FlexKVScheduler(given) if group.rank == 0 else None
        self.executor = Executor(group, self.scheduler, self.worker, shape, **options)
        self._ids = itertools.count(100)

    def request(self, tokens: list[int], **more: Any) -> Request:
        """Adds a request. The executor runs it from the next iteration on."""
        return self.executor.add(Request(next(self._ids), list(tokens), **more))

    def serve(self, tokens: list[int], **more: Any) -> Request:
        """Adds a request, and iterates until all requests are done."""
        request = self.request(tokens, **more)
        self.executor.run()
        return request

    def serve_beside(self, tokens: list[int]) -> Request:
        """Runs one request until it is done, whatever the state of the other requests."""
        request = self.request(tokens)
        self.executor.run(until=lambda: request.state == "done")
        return request

    def warm_up(self) -> None:
        """Iterates until every rank has joined, because flexkv promises nothing before that."""
        ends_s = time.monotonic() + LONG_S
        for number in itertools.count():
            assert time.monotonic() < ends_s, "the unit does not become usable"
            self.serve([60_000 + number, 1, 2], new_tokens=1)
            usable = self.scheduler is not None and self.scheduler.side.ranks.usable
            if self.executor.group.broadcast(usable):
                return
            time.sleep(0.001)

    def hit(self, request: Request) -> int:
        """Returns how many of the request's tokens were loaded and not computed."""
        return self.executor.loaded[request.request_id]

    def check(self) -> None:
        """Checks that no forward pass has read a wrong number, that no block is lost, and that the manager's state is
        consistent.
        """
        assert self.executor.wrong == []
        assert self.executor.idle
        assert sorted(self.executor.free) == list(range(self.executor.shape.blocks))
        assert (self.worker.side._loads, self.worker.side._saves) == ({}, {})
        if self.scheduler is not None:
            self.scheduler.side.ranks.poll()
            self.scheduler.side.ranks.unit.manager.check_integrity()

    def close(self) -> None:
        self.worker.shutdown()
        if self.scheduler is not None:
            self.scheduler.shutdown()


def stored(make_world: Make, environment: dict[str, str] | None = None, **options: Any) -> World:
    """Makes a world that has computed and stored PROMPT."""
    world: World = make_world(environment, **options)
    world.warm_up()
    world.serve(PROMPT)
    return world


def promised(world: World) -> tuple[Request, list[int]]:
    """Makes a request with id 900 that was promised PROMPT, and takes eight blocks for it. The blocks hold garbage."""
    request = Request(900, list(PROMPT))
    assert world.scheduler is not None
    is_async = not world.scheduler.side.sync
    assert world.scheduler.get_num_new_matched_tokens(request, 0) == (WHOLE, is_async)
    request.blocks = [world.executor.free.pop() for _ in range(8)]
    return request, request.blocks


def stalled_load(make_world: Make) -> tuple[World, Request, Faults]:
    """Makes a world that has stored PROMPT, and a request for PROMPT whose load stalls until the test releases it."""
    faults = Faults(STALL, OpKind.H2D, times=1)
    world = stored(make_world, movers=faults)
    request = world.request(PROMPT)
    world.executor.step()
    assert faults.mover.wait_stalled(1, LONG_S)
    return world, request, faults


def steps(world: World, count: int = 20) -> None:
    for _ in range(count):
        world.executor.step()


def lookup(world: World) -> int:
    """Returns how many of PROMPT's tokens a lookup promises to a request, and ends the request."""
    request = Request(99, list(PROMPT))
    assert world.scheduler is not None
    tokens, _ = world.scheduler.get_num_new_matched_tokens(request, 0)
    end(world, request)
    return int(tokens)


def end(world: World, request: Request) -> None:
    """Ends a request that the executor does not know. No request of the executor may be waiting at that time."""
    assert world.scheduler is not None
    if not world.scheduler.request_finished(request, request.blocks):
        return
    ends_s = time.monotonic() + LONG_S
    saved: list[int] = world.worker.get_finished([request.request_id], [])[0]
    while not saved:
        assert time.monotonic() < ends_s, "its blocks do not come back"
        time.sleep(0.001)
        saved = world.worker.get_finished([], [])[0]
    assert saved == [request.request_id]


def wait_for_the_disk(world: World) -> None:
    """Waits until all of PROMPT has been fetched from disk."""
    ends_s = time.monotonic() + LONG_S
    while lookup(world) < WHOLE:
        assert time.monotonic() < ends_s, "what lies on disk never came up"
        time.sleep(0.005)


def rest_over(world: World) -> None:
    """Ends the time in which nothing is promised after a failed load."""
    assert world.scheduler is not None
    manager = world.scheduler.side.ranks.unit.manager
    assert isinstance(manager, LocalCacheManager)
    failed = manager.promises.load_tries
    assert failed.rests
    failed._rests_until_s = 0.0


def write_model(folder: Path, head_dim: int, layers: int) -> str:
    """Writes the model's configuration file, which flexkv compares with the pool."""
    shape = {
        "num_hidden_layers": layers,
        "num_attention_heads": SHAPE.heads,
        "num_key_value_heads": SHAPE.heads,
        "head_dim": head_dim,
        "hidden_size": SHAPE.heads * head_dim,
    }
    (folder / "config.json").write_text(json.dumps(shape))
    return str(folder)
