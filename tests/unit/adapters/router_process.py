"""Processes that serve requests over one folder, one after the other. Each has its own router, which hears only that
process.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.unit.adapters.router_world import Router, World

MOST_S = 240.0
THIS = "tests.unit.adapters.router_process"


@dataclass
class Served:
    """What one process served.

    Attributes:
        found: blocks that the router knew before the first request.
        hits: requests of which at least one block was served.
        over, under: requests of which the router predicted more than was served, or less.
        removals: events of removed blocks.
        resets: how often the weights were exchanged. Pages of new weights have no name, so a later process finds none.
    """

    found: int = 0
    hits: int = 0
    over: int = 0
    under: int = 0
    removals: int = 0
    resets: int = 0


def serve(folder: Path, seed: int, requests: int, killed: bool, **settings: Any) -> Served:
    """Serves so many requests in a process that ends in order, or by SIGKILL right after the last request."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([THIS])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(theirs, folder, seed, requests, killed, settings))
    process.start()
    theirs.close()
    try:
        assert ours.poll(MOST_S), "the process serves for ever"
        served = ours.recv()
        process.join(MOST_S)
        assert process.exitcode == (-signal.SIGKILL if killed else 0)
    finally:
        if process.is_alive():
            process.kill()
        process.join()
    assert isinstance(served, Served)
    return served


def _serve(
    told: Connection, folder: Path, seed: int, requests: int, killed: bool, settings: dict[str, Any]
) -> None:
    # Pages of another process that runs this test at the same time would be served too, and no event announces them.
    world = World(folder, Router(), seed, **{"peers.share": "off"} | settings)
    world.settle()
    served = Served(found=len(world.router.has["STORAGE"]))
    for _ in range(requests):
        predicted, got = world.serve_one()
        served.hits += got > 0
        served.over += predicted > got
        served.under += predicted < got
        served.resets += world.disturb()
    served.removals = world.router.removals
    told.send(served)
    if killed:
        # Records that are not written yet would be lost, and routers would learn their content only from later events.
        events = world.engine.side.events
        assert events is not None
        assert events._book is not None
        events._book.close(wait_s=60.0)
        os.kill(os.getpid(), signal.SIGKILL)
    world.engine.close()
