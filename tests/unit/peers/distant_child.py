"""A program that forks processes, each with one unit. The unit's files claim that it runs on another machine.

For each line of input it forks one process. A line gives a folder, the machine's name, and how the unit differs from
the unit that the test itself runs: `same` (nothing), `weights`, `ranks` or `version`. The forked process stores a
prompt, and prints its process id when the prompt's pages are in its folder.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from flexkv.peers import card, distant_units
from flexkv.peers.share import PeerShare
from tests.unit.adapters.mini_engine import MiniEngine
from tests.unit.adapters.vllm_objects import make_request
from tests.unit.peers.live_engines import PROMPT, distant_settings

start_share = PeerShare.start


def serve(folder: str, machine: str, other: str) -> None:
    distant_units.machine_id = lambda: machine  # type: ignore[attr-defined]
    if other == "weights":
        PeerShare.start = lambda share, weights: start_share(share, b"\1" * 32)  # type: ignore[method-assign, assignment]
    if other == "version":
        card.PROTOCOL += 1  # type: ignore[misc]
    engine = MiniEngine(ranks=2 if other == "ranks" else 1, **distant_settings(Path(folder), machine))
    engine.run(make_request(PROMPT, "one"))
    engine.until(lambda: not engine.unit.busy)
    print(os.getpid(), flush=True)
    while True:
        signal.pause()


if __name__ == "__main__":
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        if os.fork() == 0:
            sys.stdin.close()
            serve(*line.split())
