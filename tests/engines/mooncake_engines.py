"""A program that runs engines one after the other, all of them with the same store. It runs in a network namespace, in
which Mooncake's clients may listen on ports.

It prints one line of JSON per engine: its answers to the prompts, and the metrics in `SERIES`.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from demo.engine_process import IN_PROCESS, EngineProcess

from .conftest import PACKAGE_ROOT, UNPINNED, connector, engine_arguments
from .session import Prompt

ENGINES = 2
WRITTEN_S = 60.0
SERIES = {
    "read": "vllm:flexkv_remote_pages_total{direction=read}",
    "written": "vllm:flexkv_remote_pages_total{direction=write}",
    "hits": "vllm:flexkv_hit_blocks_total{tier=remote}",
}
LOOPBACK = {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
"""Environment of the engines: they use loopback, the only network interface of the namespace."""


def main(model: str, url: str, folder: str, pages: str, prompts: str) -> None:
    """Runs the engines.

    Args:
        url: URL of the store.
        folder: folder for the engines' logs.
        pages: total number of pages of the prompts.
        prompts: a JSON list with `Prompt.wire` of each prompt.
    """
    settings: dict[str, Any] = {
        "remote__urls": url,
        "remote__probe_s": 10.0,
        "remote__wait_s": 30.0,
        "remote__get_s": 4.0,
        "disk__compute_if_faster": False,
    }
    arguments = {**engine_arguments(Path(model)), "kv_transfer_config": connector(**settings)}
    for number in range(ENGINES):
        log = Path(folder) / f"mooncake-engine-{number}.log"
        environment = {**IN_PROCESS, **UNPINNED, **LOOPBACK}
        with EngineProcess(arguments, log, (), environment, [PACKAGE_ROOT]) as engine:
            answers = engine.generate(json.loads(prompts))
            moved, ends_s = dict.fromkeys(SERIES, 0.0), time.monotonic() + WRITTEN_S
            while moved["written"] + moved["read"] < int(pages) and time.monotonic() < ends_s:
                time.sleep(0.05)
                # The engine updates its metrics only in a step, so this sends a prompt.
                engine.generate([Prompt.of(5, 7, max_tokens=1).wire()])
                values = engine.metrics("flexkv")
                moved = {name: values.get(series, 0.0) for name, series in SERIES.items()}
        print(json.dumps({"answers": answers, **moved}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
