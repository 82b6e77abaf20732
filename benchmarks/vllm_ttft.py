"""Measures vLLM's time to the first token of a 4k-token prompt that is computed, that flexkv serves, or that one of
vLLM's own connectors serves.

Every connector has its own engine. All engines run at the same time and take turns, so that other load affects all
engines alike. A hit is measured after the engine dropped its prefix cache. If a connector's name contains "disk", host
memory is too small for two prompts, so another prompt has evicted the measured one, and the hit comes from disk. If the
name contains "streamed", flexkv promises the prompt to the engine before it has read the prompt (`disk.stream`). If the
name contains "stores by layer", flexkv copies each layer while the forward pass computes the next (`store.mode`
layerwise); otherwise it copies complete blocks after the forward pass. "stored" is the time from a computed prompt's
answer until the prompt is in the cache. "own" is the time of the same prompt when the engine's own prefix cache serves
it, and shows what any hit costs. The additional time of flexkv's hit is compared with a memcpy of the same bytes by one
thread in the same run.

    python -m benchmarks.vllm_ttft [--runs 7] [--json out/vllm_ttft.json] [--check]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.arguments import at_least_one
from demo.engine_process import FLEXKV, EngineProcess
from demo.model import PRESETS, ModelShape, prompt_tokens, write_model

MODEL = "medium"
BLOCK_TOKENS = 128
HOST_BYTES = 1 << 30

SYNC, ASYNC, EXAMPLE, OFFLOADING = "flexkv sync", "flexkv async", "ExampleConnector", "OffloadingConnector"
LAYERWISE, DISK_SYNC, DISK_LAYERWISE = "flexkv layerwise", "flexkv sync, disk", "flexkv layerwise, disk"
STORE_LAYERWISE = "flexkv async, stores by layer"
STREAM_SYNC, STREAM_LAYERWISE = "flexkv sync, disk streamed", "flexkv layerwise, disk streamed"
ON_DISK = (DISK_SYNC, DISK_LAYERWISE, STREAM_SYNC, STREAM_LAYERWISE)
NAMES = (SYNC, ASYNC, LAYERWISE, STORE_LAYERWISE, EXAMPLE, OFFLOADING, *ON_DISK)
SMALL_HOST_BYTES = 74 << 20
"""Size of the host tier for hits from disk: space for 36 pages of 2 MiB and the pool's own records. The blocks of the
filler prompt need all of this space, so that no block of the measured prompt stays in host memory.
"""
DISK_READS = "vllm:flexkv_disk_pages_total{direction=read}"
EXTERNAL_HITS = "vllm:external_prefix_cache_hits_total"
DISK = {"disk.bytes_per_folder": HOST_BYTES, "disk.compute_if_faster": False}
FILLER_TOKENS, DISK_FILLER_TOKENS = 300, 4700
COLD_OVER_SYNC_MIN = 25.0
COLD_OVER_ASYNC_MIN = 12.0
SYNC_OVER_EXAMPLE_MAX = 1.1
LAYERWISE_OVER_SYNC_DISK_MAX = 1.0
ADDED_OVER_MEMCPY_MAX = 1.3


@dataclass(slots=True)
class Times:
    """The measurements with one connector, one entry per run: seconds to the first token, and for each hit also the
    number of tokens served and the number of pages read from disk.

    Attributes:
        stored: seconds from a computed prompt's answer until the engine has no work left for it.
        own: seconds to the first token of the same prompt when it is in the engine's prefix cache.
        memcpy: seconds that a memcpy of the served bytes takes.
    """

    cold: list[float] = field(default_factory=list)
    stored: list[float] = field(default_factory=list)
    hit: list[float] = field(default_factory=list)
    own: list[float] = field(default_factory=list)
    memcpy: list[float] = field(default_factory=list)
    served: list[int] = field(default_factory=list)
    from_disk: list[int] = field(default_factory=list)
    wrong: int = 0


def connectors(folder: Path) -> dict[str, Mapping[str, Any]]:
    """Returns vLLM's kv_transfer_config of each connector, by the connector's name in this program."""

    def flexkv(mode: str, store: str = "eager") -> Mapping[str, Any]:
        extra = {"host.bytes": HOST_BYTES, "load.mode": mode, "store.mode": store}
        return FLEXKV | {"kv_connector_extra_config": extra}

    def with_disk(mode: str, stream: bool = False) -> Mapping[str, Any]:
        disk = folder / f"disk-{mode}{'-stream' if stream else ''}"
        disk.mkdir(exist_ok=True)
        extra = {"host.bytes": SMALL_HOST_BYTES, "load.mode": mode, "disk.folders": str(disk)} | DISK
        extra |= {"disk.stream": stream}
        return FLEXKV | {"kv_connector_extra_config": extra}

    return {
        SYNC: flexkv("sync"),
        ASYNC: flexkv("async"),
        LAYERWISE: flexkv("layerwise"),
        STORE_LAYERWISE: flexkv("async", "layerwise"),
        DISK_SYNC: with_disk("sync"),
        DISK_LAYERWISE: with_disk("layerwise"),
        STREAM_SYNC: with_disk("sync", stream=True),
        STREAM_LAYERWISE: with_disk("layerwise", stream=True),
        EXAMPLE: {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(folder)},
        },
        OFFLOADING: {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "cpu_bytes_to_use": HOST_BYTES,
                "spec_name": "HostCopySpec",
                "spec_module_path": "benchmarks.cpu_offload_spec",
            },
        },
    }


def engine_arguments(model: Path, connector: Mapping[str, Any] | None) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "model": str(model),
        "dtype": "float32",
        "max_model_len": 8192,
        "max_num_batched_tokens": 8192,
        "enforce_eager": True,
        "block_size": BLOCK_TOKENS,
        "disable_log_stats": False,
    }
    return arguments if connector is None else arguments | {"kv_transfer_config": dict(connector)}


def measure(engine: EngineProcess, ids: list[int], filler: list[int], times: Times) -> None:
    """Measures one prompt three times: when it is computed, when the connector serves it after the engine dropped
    its prefix cache, and when the engine's prefix cache serves it.
    """
    request = {"ids": ids, "max_tokens": 1}
    [cold] = engine.generate([request])
    answered_s = time.perf_counter()
    engine.call("drain")
    times.stored.append(time.perf_counter() - answered_s)
    # Another prompt runs in between, as in production. So the computed prompt's data is no longer in the CPU caches
    # when the hit is measured.
    engine.generate([{"ids": filler, "max_tokens": 1}])
    engine.call("drain")
    engine.call("reset")
    reads = _disk_reads(engine)
    [hit] = engine.generate([request])
    engine.call("drain")
    times.from_disk.append(_disk_reads(engine) - reads)
    loaded = _external_hits(engine)
    [own] = engine.generate([request])
    engine.call("drain")
    if _external_hits(engine) != loaded or own["cached"] != hit["cached"]:
        raise RuntimeError(
            f"the engine's own prefix cache served {own['cached']} tokens, not {hit['cached']}"
        )
    times.cold.append(cold["ttft_s"])
    times.hit.append(hit["ttft_s"])
    times.own.append(own["ttft_s"])
    times.served.append(hit["cached"] or 0)
    times.memcpy.append(memcpy_s(times.served[-1] * token_bytes(PRESETS[MODEL])))
    times.wrong += (cold["tokens"] != hit["tokens"]) + (cold["tokens"] != own["tokens"])


def token_bytes(shape: ModelShape) -> int:
    """Returns the number of bytes of a token's keys and values in all layers."""
    return shape.layers * 2 * shape.kv_heads * shape.head_size * np.dtype(np.float32).itemsize


def memcpy_s(size: int) -> float:
    """Returns how many seconds one thread takes to copy `size` bytes between buffers whose memory is already mapped."""
    source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
    started_s = time.perf_counter()
    np.copyto(target, source)
    return time.perf_counter() - started_s


def _disk_reads(engine: EngineProcess) -> int:
    return int(engine.metrics("flexkv_disk_pages").get(DISK_READS, 0))


def _external_hits(engine: EngineProcess) -> float:
    return engine.metrics("external_prefix_cache_hits").get(EXTERNAL_HITS, 0.0)


def from_elsewhere(results: Mapping[str, Times]) -> list[str]:
    """Returns the connectors with a hit whose pages came from memory although the connector's name says disk, or from
    disk although it does not. Such figures do not measure the named method.
    """

    def true(name: str, served: int, read: int) -> bool:
        return read == (served // BLOCK_TOKENS if name in ON_DISK else 0)

    return [
        name
        for name, times in results.items()
        if not all(true(name, *hit) for hit in zip(times.served, times.from_disk, strict=True))
    ]


def run(arguments: argparse.Namespace, console: Console) -> dict[str, Times]:
    """Runs all engines, and returns each connector's times."""
    shape = PRESETS[MODEL]
    model = write_model(arguments.out / "models", MODEL)
    storage = Path(tempfile.mkdtemp(prefix="ttft-storage-"))
    log = arguments.out / "vllm_ttft.log"
    log.unlink(missing_ok=True)
    results = {name: Times() for name in connectors(storage) if not arguments.only or name in arguments.only}
    try:
        with ExitStack() as stack, Progress(console=console) as progress:
            task = progress.add_task("starting engines", total=len(results) * (arguments.runs + 2))
            engines: dict[str, EngineProcess] = {}
            for name in results:
                started = EngineProcess(engine_arguments(model, connectors(storage)[name]), log)
                engines[name] = stack.enter_context(started)
                progress.advance(task)
            for number in range(arguments.runs + 1):
                ids = prompt_tokens(arguments.prompt_tokens, 100 + number, shape)
                for name, engine in engines.items():
                    progress.update(task, description=f"run {number}: {name}", advance=1)
                    tokens = DISK_FILLER_TOKENS if name in ON_DISK else FILLER_TOKENS
                    filler = prompt_tokens(tokens, 10_000 + number, shape)
                    # The first run is not counted, because it warms up allocators and files.
                    measure(engine, ids, filler, results[name] if number else Times())
    finally:
        shutil.rmtree(storage, ignore_errors=True)
    return results


def verdicts(results: dict[str, Times]) -> dict[str, dict[str, Any]]:
    """Returns each measure that has a limit: its value, the limit, and whether it is met."""
    found: dict[str, dict[str, Any]] = {}

    def least(label: str, value: float, limit: float) -> None:
        found[label] = {"value": value, "limit": f">= {limit:g}", "met": value >= limit}

    if SYNC in results:
        least("cold / hit, flexkv sync", _ratio(results[SYNC]), COLD_OVER_SYNC_MIN)
    if ASYNC in results:
        least("cold / hit, flexkv async", _ratio(results[ASYNC]), COLD_OVER_ASYNC_MIN)
    if SYNC in results and EXAMPLE in results:
        value = statistics.median(results[SYNC].hit) / statistics.median(results[EXAMPLE].hit)
        found["flexkv sync hit / ExampleConnector hit"] = {
            "value": value,
            "limit": f"<= {SYNC_OVER_EXAMPLE_MAX:g}",
            "met": value <= SYNC_OVER_EXAMPLE_MAX,
        }
    for name in (SYNC, ASYNC):
        if name in results:
            value = added_over_memcpy(results[name])
            found[f"hit above the engine's own / memcpy, {name}"] = {
                "value": value,
                "limit": f"<= {ADDED_OVER_MEMCPY_MAX:g}",
                "met": value <= ADDED_OVER_MEMCPY_MAX,
            }
    if DISK_SYNC in results and DISK_LAYERWISE in results:
        # Ratios are taken within a run, so that other load on the machine affects both times of a ratio alike.
        pairs = zip(results[DISK_LAYERWISE].hit, results[DISK_SYNC].hit, strict=True)
        value = statistics.median(layerwise / sync for layerwise, sync in pairs)
        found["disk hit, flexkv layerwise / sync"] = {
            "value": value,
            "limit": f"<= {LAYERWISE_OVER_SYNC_DISK_MAX:g}",
            "met": value <= LAYERWISE_OVER_SYNC_DISK_MAX,
        }
    return found


def added_over_memcpy(times: Times) -> float:
    """Returns the additional time of a hit in flexkv over a hit in the engine's own prefix cache. It is the median over
    all runs, in multiples of the time of a memcpy of the same bytes.
    """
    runs = zip(times.hit, times.own, times.memcpy, strict=True)
    return statistics.median((hit - own) / memcpy for hit, own, memcpy in runs)


def _ratio(times: Times) -> float:
    return statistics.median(times.cold) / statistics.median(times.hit)


def show(results: dict[str, Times], setting: str, console: Console) -> None:
    table = Table(title="time to first token, ms", caption=setting)
    table.add_column("connector")
    headers = (
        "cold median",
        "stored",
        "hit median",
        "hit min",
        "own",
        "memcpy",
        "cold / hit",
        "served",
        "wrong",
    )
    for header in headers:
        table.add_column(header, justify="right")
    for name, times in results.items():
        table.add_row(
            name,
            f"{1e3 * statistics.median(times.cold):.0f}",
            f"{1e3 * statistics.median(times.stored):.1f}",
            f"{1e3 * statistics.median(times.hit):.1f}",
            f"{1e3 * min(times.hit):.1f}",
            f"{1e3 * statistics.median(times.own):.1f}",
            f"{1e3 * statistics.median(times.memcpy):.1f}",
            f"{_ratio(times):.1f}",
            f"{min(times.served)}",
            f"{times.wrong}",
        )
    console.print(table)
    for label, verdict in verdicts(results).items():
        colour = "green" if verdict["met"] else "red"
        console.print(f"[{colour}]{label}: {verdict['value']:.2f} (reach {verdict['limit']})[/]")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=at_least_one, default=7)
    parser.add_argument("--prompt-tokens", type=int, default=4001)
    parser.add_argument("--only", nargs="*", choices=NAMES)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--json", type=Path, default=Path("out/vllm_ttft.json"))
    parser.add_argument("--check", action="store_true", help="exit with 1 when a limit is missed")
    arguments = parser.parse_args()
    console = Console()
    results = run(arguments, console)
    shape = PRESETS[MODEL]
    setting = (
        f"random Llama {MODEL} ({shape.layers} layers, hidden {shape.hidden}, float32), blocks of {BLOCK_TOKENS} "
        f"tokens, prompt of {arguments.prompt_tokens}, {arguments.runs} interleaved runs, "
        f"OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', 'unset')}, "
        f"{os.cpu_count()} CPUs, load average {os.getloadavg()[0]:.1f} at the end"
    )
    show(results, setting, console)
    limits = verdicts(results)
    content = {
        "setting": setting,
        "limits": limits,
        "seconds": {
            name: {
                "cold": times.cold,
                "stored": times.stored,
                "hit": times.hit,
                "own": times.own,
                "memcpy": times.memcpy,
                "served": times.served,
                "from_disk": times.from_disk,
                "wrong": times.wrong,
            }
            for name, times in results.items()
        },
    }
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(content, indent=1))
    wrong = sum(times.wrong for times in results.values())
    unserved = [name for name, times in results.items() if min(times.served) == 0]
    elsewhere = from_elsewhere(results)
    if wrong or unserved or elsewhere:
        console.print(
            f"[red]{wrong} wrong first tokens; never served: {unserved}; from elsewhere: {elsewhere}[/]"
        )
        return 1
    return int(arguments.check and not all(verdict["met"] for verdict in limits.values()))


if __name__ == "__main__":
    sys.exit(main())
