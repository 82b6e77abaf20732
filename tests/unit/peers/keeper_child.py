"""A process that forks keepers: processes with a unit that keeps the prompt, and serves until it is killed.

Each line of input, a folder and a value of `peers.store`, makes one, and its number is written once it has the prompt.
So what a unit imports, which takes longer than all tests with it, is imported once.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from tests.unit.adapters.mini_engine import MiniEngine
from tests.unit.adapters.vllm_objects import make_request
from tests.unit.peers.live_engines import PROMPT, settings_of


def keep(folder: str, store: str) -> None:
    engine = MiniEngine(**settings_of(Path(folder)) | {"peers.store": store})
    engine.run(make_request(PROMPT, "one"))
    print(os.getpid(), flush=True)
    while True:
        signal.pause()


if __name__ == "__main__":
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        if os.fork() == 0:
            sys.stdin.close()
            keep(*line.split())
