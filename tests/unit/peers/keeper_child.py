"""A program that forks keepers: processes with a unit that keeps the prompt's pages and serves them until it is killed.

For each line of input it forks one keeper. A line gives a folder, a value of `peers.store`, and, for a unit with
several KV groups, their kind. When the keeper has the prompt's pages, it prints its process id on a line; other lines
of output are logs. All keepers are forked from one process, because importing a unit's modules takes longer than a
test.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from tests.unit.adapters.mini_engine import MiniEngine
from tests.unit.adapters.scheduled_engine import ScheduledEngine
from tests.unit.adapters.vllm_objects import make_request
from tests.unit.peers import group_engines
from tests.unit.peers.live_engines import PROMPT, settings_of


def compute(folder: Path, store: str, kind: str) -> object:
    """Starts an engine that computes the prompt, and returns it."""
    told = {"peers.store": store}
    if not kind:
        engine = MiniEngine(**settings_of(folder) | told)
        engine.run(make_request(PROMPT, "one"))
        return engine
    specs = group_engines.KINDS[kind]
    grouped = ScheduledEngine(folder.parent, specs, blocks=128, **group_engines.sharing(folder) | told)
    grouped.run("one", group_engines.PROMPT)
    return grouped


def keep(folder: str, store: str, kind: str = "") -> None:
    kept = compute(Path(folder), store, kind)
    assert kept
    print(os.getpid(), flush=True)
    while True:
        signal.pause()


if __name__ == "__main__":
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        if os.fork() == 0:
            sys.stdin.close()
            keep(*line.split())
