"""A program that tests the connector with the package of one generation. It runs in a separate process, because
flexkv's classes get their base classes from the package when they are imported.

python -m tests.unit.tensorrt_llm.generation_child GENERATION FOLDER
"""

from __future__ import annotations

import inspect
import json
import sys
from typing import Any


def check(generation: str) -> dict[str, Any]:
    """Runs prompts through an executor that makes the calls of this generation. Returns the results."""
    from flexkv.adapters.tensorrt_llm import FlexKVScheduler, FlexKVWorker, api
    from tests.unit.tensorrt_llm.executor import Version
    from tests.unit.tensorrt_llm.world import PROMPT, World

    package = api.find_api()
    version = Version(
        waits=generation != "g1",
        quiet=generation != "g1",
        by_group=generation == "g3",
        request_data=package.RequestData,
        scheduler_output=package.SchedulerOutput,
    )
    world = World(version=version)
    try:
        world.warm_up()
        salts: tuple[dict[str, Any], ...] = (
            {"cache_salt_id": 5},
            {"cache_salt": "a tenant"} if generation == "g3" else {"cache_salt_id": 6},
        )
        hits = []
        for who in ({}, *salts):
            hits += [world.hit(world.serve(PROMPT, **who)) for _ in range(2)]
        if generation == "g3":
            world.executor.kept = lambda tokens: tokens // 2
            hits.append(world.hit(world.serve(PROMPT)))
            world.scheduler.request_reset(world.executor.requests[-1])
        world.check()
        return {
            "module": package.__name__,
            "rank": api.mpi_rank(),
            "bases": [
                issubclass(FlexKVWorker, package.KvCacheConnectorWorker),
                issubclass(FlexKVScheduler, package.KvCacheConnectorScheduler),
            ],
            "other signatures": other_signatures(package),
            "hits": hits,
        }
    finally:
        world.close()


def other_signatures(package: Any) -> list[str]:
    """Returns the methods of the package's classes whose parameters flexkv's methods do not accept."""
    from flexkv.adapters.tensorrt_llm import FlexKVScheduler, FlexKVWorker

    odd = []
    pairs = (
        (FlexKVWorker, package.KvCacheConnectorWorker),
        (FlexKVScheduler, package.KvCacheConnectorScheduler),
    )
    for mine, theirs in pairs:
        for name, method in inspect.getmembers(theirs, inspect.isfunction):
            if name.startswith("_"):
                continue
            given = [object()] * len(inspect.signature(method).parameters)
            try:
                inspect.signature(getattr(mine, name)).bind(*given)
            except TypeError as error:
                odd.append(f"{name}: {error}")
    return odd


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[2])
    print(json.dumps(check(sys.argv[1])), flush=True)
