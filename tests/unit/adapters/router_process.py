"""Runs processes one after another. Each process serves requests with the same disk folder and has its own router,
which gets the events of that process only.
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
    """The results of one process.

    Attributes:
        found: number of blocks that the router knew before the first request.
        hits: number of requests of which at least one block was served from the cache.
        over: number of requests for which the router predicted more tokens than were served.
        under: number of requests for which the router predicted fewer tokens than were served.
        removals: number of events that reported removed blocks.
        resets: how often the weights were replaced. After the process ends, pages computed with the new weights cannot
            be identified, so a later process finds none of them.
    """

    found: int = 0
    hits: int = 0
    over: int = 0
    under: int = 0
    removals: int = 0
    resets: int = 0


def serve(folder: Path, seed: int, requests: int, killed: bool, **settings: Any) -> Served:
    """Serves this many requests in a separate process. The process then exits normally or, if `killed`, is killed by
    SIGKILL right after the last request.
    """
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
    # Sharing is off. Otherwise another process that runs the same test could supply pages without an event.
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
        # The process waits for its records: SIGKILL would lose records that are not written yet, and the next process
        # cannot announce pages without records.
        events = world.engine.side.events
        assert events is not None
        assert events._book is not None
        events._book.close(wait_s=60.0)
        os.kill(os.getpid(), signal.SIGKILL)
    world.engine.close()
