"""Runs one script on two ranks in two processes. Both ranks do each step of the script at the same time."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from typing import Any

from tests.unit.tensorrt_llm.group import LONG_S, Pair
from tests.unit.tensorrt_llm.world import World, settings

Script = Callable[[World], Any]
"""A function that both ranks run. It must be a top-level function of a module, so that it can be pickled."""


def run_pair(script: Script, environment: dict[str, str], **options: Any) -> list[Any]:
    """Runs `script` on rank 0 in this process and on rank 1 in a separate process. Returns the results by rank.

    Raises:
        AssertionError: the script failed on rank 1; the error contains the traceback from rank 1.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    result, result_there = context.Pipe(duplex=False)
    # The connectors of both processes read their settings from the environment.
    saved = dict(os.environ)
    os.environ.update(settings(**environment))
    try:
        child = context.Process(target=_follow, args=(script, there, result_there, options))
        child.start()
        there.close()
        result_there.close()
        try:
            mine = _run(script, 0, here, options)
        finally:
            here.close()
            said = result.recv() if result.poll(LONG_S) else ("error", "rank 1 said nothing")
            child.join(LONG_S)
            if child.is_alive():
                child.kill()
    finally:
        os.environ.clear()
        os.environ.update(saved)
    assert said[0] == "ok", f"rank 1:\n{said[1]}"
    return [mine, said[1]]


def _run(script: Script, rank: int, pipe: Any, options: dict[str, Any]) -> Any:
    world = World(group=Pair(rank, pipe), ranks=2, **options)
    try:
        world.warm_up()
        found = script(world)
        world.check()
        return found
    finally:
        world.close()


def _follow(script: Script, pipe: Any, result: Any, options: dict[str, Any]) -> None:
    try:
        result.send(("ok", _run(script, 1, pipe, options)))
    except BaseException:
        result.send(("error", traceback.format_exc()))
