"""Measures vLLM's time to the first token of a prompt that another engine on this machine has computed. The prompt's
pages are read from that engine's host memory or from its folder on disk. The time is compared with the time
to compute the prompt, and with the time of a hit in the engine's own host memory.

Two engines run at the same time. In each run the second engine answers four requests of equal length. Their prompts
are:

- a prompt that no engine has;
- the same prompt again, after the engine dropped its prefix cache;
- a prompt that the first engine has just computed, and that may be read from the first engine's memory;
- another prompt that the first engine has just computed, and that may be read only from the first engine's folder.

The request setting `flexkv.tiers` selects the memory or the folder. Each answer is compared with the answer of the
engine that computed the prompt.

    python -m benchmarks.peer_ttft [--runs 7]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.arguments import at_least_one
from benchmarks.vllm_ttft import BLOCK_TOKENS, HOST_BYTES, MODEL, engine_arguments, token_bytes
from demo.engine_process import FLEXKV, EngineProcess
from demo.model import PRESETS, prompt_tokens, write_model

COMPUTED, OWN, PEER_HOST, PEER_FOLDER = "computed", "own host memory", "peer's host memory", "peer's folder"
FOUND_S = 0.5
"""Seconds that the second engine gets to notice the first engine's new pages. It notices them some 20 ms after they are
stored.
"""
TIERS = {OWN: ["host"], PEER_HOST: ["host", "peer-host"], PEER_FOLDER: ["host", "peers"]}
HITS = "vllm:flexkv_hit_blocks_total{{tier={}}}"


def settings(folder: Path, name: str) -> dict[str, Any]:
    extra = {
        "host.bytes": HOST_BYTES,
        "load.mode": "sync",
        "peers.share": "host+disk",
        "peers.folder": str(folder / "run"),
        "disk.folders": str(folder / name),
        "disk.bytes_per_folder": 4 * HOST_BYTES,
        "disk.compute_if_faster": False,
    }
    return FLEXKV | {"kv_connector_extra_config": extra}


def ask(engine: EngineProcess, ids: list[int], tiers: list[str] | None = None) -> dict[str, Any]:
    request: dict[str, Any] = {"ids": ids, "max_tokens": 4}
    if tiers is not None:
        request["extra"] = {"flexkv.tiers": tiers}
    [answer] = engine.generate([request])
    engine.call("drain")
    return dict(answer)


def measure(one: EngineProcess, other: EngineProcess, number: int, tokens: int) -> dict[str, float]:
    """Runs one round. Returns the second engine's seconds to the first token, by the place from which the prompt's
    pages came.

    Raises:
        RuntimeError: a prompt came from a different place than expected, or its answer differs from that of the engine
            that computed it.
    """
    shape = PRESETS[MODEL]
    took: dict[str, float] = {}
    for kind, place in enumerate((COMPUTED, PEER_HOST, PEER_FOLDER)):
        ids = prompt_tokens(tokens, 1000 * kind + number, shape)
        if place == COMPUTED:
            right = ask(other, ids)
            took[place] = right["ttft_s"]
            other.call("reset")
            place = OWN
        else:
            right = ask(one, ids)
            time.sleep(FOUND_S)
        before = hits(other)
        answer = ask(other, ids, TIERS[place])
        took[place] = answer["ttft_s"]
        served = {tier: after - before[tier] for tier, after in hits(other).items() if after > before[tier]}
        tier = {OWN: "host", PEER_HOST: "peer-host", PEER_FOLDER: "peers"}[place]
        if served != {tier: tokens // BLOCK_TOKENS} or answer["tokens"] != right["tokens"]:
            raise RuntimeError(f"{place}: pages by tier {served}, answer {answer}, expected {right}")
    return took


def hits(engine: EngineProcess) -> dict[str, float]:
    found = engine.metrics("flexkv_hit_blocks")
    return {tier: found.get(HITS.format(tier), 0.0) for tier in ("host", "peer-host", "disk", "peers")}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=at_least_one, default=7)
    parser.add_argument("--prompt-tokens", type=int, default=4001)
    parser.add_argument("--out", type=Path, default=Path("out"))
    arguments = parser.parse_args()
    model = write_model(arguments.out / "models", MODEL)
    took: dict[str, list[float]] = defaultdict(list)
    with ExitStack() as stack:
        folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="peer-ttft-", dir=arguments.out))
        )
        one, other = (
            stack.enter_context(
                EngineProcess(engine_arguments(model, settings(folder.resolve(), name)), folder / "log")
            )
            for name in ("a", "b")
        )
        for number in range(arguments.runs + 1):
            found = measure(one, other, number, arguments.prompt_tokens)
            if number:  # the first run does not count, because it warms up allocators and files
                for place, seconds in found.items():
                    took[place].append(seconds)
    size = arguments.prompt_tokens // BLOCK_TOKENS * BLOCK_TOKENS * token_bytes(PRESETS[MODEL])
    print(
        f"time to first token, {arguments.prompt_tokens} tokens ({size >> 20} MiB of pages), median of "
        f"{arguments.runs} runs, {os.cpu_count()} CPUs, load average {os.getloadavg()[0]:.1f}"
    )
    for place, times in took.items():
        print(f"{place:20} {1e3 * statistics.median(times):8.1f} ms, least {1e3 * min(times):8.1f} ms")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
