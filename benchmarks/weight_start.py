"""Measures how much the digest of all content of the weights delays an engine's start. The same vLLM with a disk tier
starts alternately in two ways: with a name for the weights in its settings, so that no digest is needed, and without a
name.

The weights are dropped from the page cache before each start, so that the engine reads them from the disk. Each start
gets a new folder, which contains no digest from an earlier start. Prints medians of three times: from the start of the
process until the engine is ready, from then until the engine's first answer, and from the start of the process until
the digest has identified the weights. `--json PATH` writes them to a file.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.arguments import at_least_one
from demo.engine_process import FLEXKV, EngineProcess, engine_arguments
from demo.model import PRESETS, prompt_tokens, write_model

GB = 1_000_000_000
BLOCK_TOKENS = 128
POOL_BLOCKS = 32
SLAB_BYTES = 64 << 20
PROMPT_TOKENS = 64
KNOWN_DEADLINE_S = 300.0
KNOWN = "flexkv_weights_known"
WAYS = ("named", "digest")


def forget(folder: Path) -> int:
    """Drops the weight files in the folder from the page cache. Returns their size in bytes."""
    size = 0
    for file in folder.glob("*.safetensors"):
        size += file.stat().st_size
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    return size


def known(engine: EngineProcess) -> bool:
    return any(value >= 1 for value in engine.metrics(KNOWN).values())


def start(model: Path, folder: Path, way: str, ids: list[int]) -> dict[str, float]:
    settings = {"disk.folders": [str(folder)], "disk.bytes_per_folder": SLAB_BYTES, "host.bytes": SLAB_BYTES}
    if way == "named":
        settings["identity.model"] = "weights of the benchmark"
    connector = FLEXKV | {"kv_connector_extra_config": settings}
    begun_s = time.perf_counter()
    arguments = engine_arguments(model, connector, BLOCK_TOKENS, POOL_BLOCKS)
    with EngineProcess(arguments, folder / "engine.log") as engine:
        there_s = time.perf_counter()
        engine.generate([{"ids": ids, "max_tokens": 1}])
        answered_s = time.perf_counter()
        ends_s = answered_s + KNOWN_DEADLINE_S
        while not known(engine):
            if time.perf_counter() > ends_s:
                raise RuntimeError(f"the weights have no name after {KNOWN_DEADLINE_S:.0f} s")
            time.sleep(0.05)
            # The engine updates its gauges only when it runs a step.
            engine.generate([{"ids": ids[:2], "max_tokens": 1}])
        known_s = time.perf_counter()
    return {
        "start, s": there_s - begun_s,
        "first answer, s": answered_s - there_s,
        "named, s": known_s - begun_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=at_least_one, default=5)
    parser.add_argument("--preset", choices=sorted(PRESETS), default="heavy")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    ids = prompt_tokens(PROMPT_TOKENS, 1, PRESETS[arguments.preset])
    with tempfile.TemporaryDirectory(prefix="flexkv-start-") as made:
        model = write_model(Path(made), arguments.preset)
        os.sync()
        (warm_up := Path(made) / "warm-up").mkdir()
        start(model, warm_up, "named", ids)  # not counted: vLLM's files are read only once
        for number in range(arguments.rounds):
            for way in WAYS:
                folder = Path(made) / f"{way}-{number}"
                folder.mkdir()
                size = forget(model)
                found[way].append(start(model, folder, way, ids))
    medians = {
        way: {name: statistics.median(row[name] for row in rows) for name in rows[0]}
        for way, rows in found.items()
    }
    print(f"{size / GB:.2f} GB of weights, {arguments.rounds} rounds, load {os.getloadavg()[0]:.1f}")
    for way, row in medians.items():
        print(f"{way:8} " + "  ".join(f"{name} {value:.2f}" for name, value in row.items()))
    # Differences are taken within a round, because a shared machine is faster in one round than in another.
    more_s = [
        digest["start, s"] - named["start, s"]
        for named, digest in zip(found["named"], found["digest"], strict=True)
    ]
    print(
        f"the start with a digest is longer by {statistics.median(more_s):+.2f} s "
        f"({min(more_s):+.2f} to {max(more_s):+.2f})"
    )
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(
            json.dumps({"bytes": size, "rounds": found, "load": os.getloadavg()[0]}, indent=1)
        )


if __name__ == "__main__":
    main()
