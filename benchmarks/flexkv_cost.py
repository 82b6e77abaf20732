"""Measures flexkv's own CPU time in a vLLM engine: the CPU time of its hooks in scheduler and worker, and of its
threads.

`vllm_overhead` compares two engines, but the noise of vLLM's own threads is larger than flexkv's cost. This program
runs one engine with a clock on every hook of the connector, so flexkv's own time is exact to microseconds. The program
compares flexkv's time with the CPU time that the rest of the engine takes for the same requests. The prompts are new,
so no request finds cached blocks; the time to store blocks is included.

    python -m benchmarks.flexkv_cost [--runs 9] [--json out/flexkv_cost.json] [--check]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.arguments import at_least_one
from benchmarks.hook_clock import FOLDER_VARIABLE, Costs
from benchmarks.vllm_overhead import (
    ENVIRONMENT,
    EXTRA_CPU_MAX,
    IDLE_AFTER_S,
    IDLE_CPU_SHARE_MAX,
    IDLE_FOR_S,
    batch_seconds,
    fresh_requests,
    setting_of,
)
from benchmarks.vllm_ttft import HOST_BYTES, MODEL, engine_arguments
from demo.engine_process import FLEXKV, EngineProcess
from demo.model import PRESETS, prompt_tokens, write_model

COSTED = FLEXKV | {
    "kv_connector": "CostedConnector",
    "kv_connector_module_path": "benchmarks.costed_connector",
    "kv_connector_extra_config": {"host.bytes": HOST_BYTES},
}


def run(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Returns CPU seconds per request of the hooks, of flexkv's threads and of the complete engine, one entry per run;
    CPU shares while no request runs; sums per hook; and the number of bytes stored.
    """
    shape = PRESETS[MODEL]
    model = write_model(arguments.out / "models", MODEL)
    log = arguments.out / "flexkv_cost.log"
    log.unlink(missing_ok=True)
    rows: list[dict[str, float]] = []
    with (
        tempfile.TemporaryDirectory(prefix="flexkv-cost-") as folder,
        EngineProcess(
            engine_arguments(model, COSTED),
            log,
            environment=ENVIRONMENT | {FOLDER_VARIABLE: folder},
            paths=[Path.cwd()],
        ) as engine,
        Progress(console=console) as progress,
    ):
        task = progress.add_task("", total=arguments.runs + 2)
        for number in range(arguments.runs + 1):
            progress.update(task, description=f"run {number}", advance=1)
            requests = fresh_requests(arguments, number)
            before = Costs.read(Path(folder))
            whole = batch_seconds(engine, requests)
            after = Costs.read(Path(folder))
            if number:
                rows.append(after.since(before, len(requests)) | {"engine": whole})
        progress.update(task, description="idle", advance=1)
        engine.generate([{"ids": prompt_tokens(200, 7, shape), "max_tokens": 2}])
        engine.call("idle", seconds=IDLE_AFTER_S)
        before = Costs.read(Path(folder))
        waited = engine.call("idle", seconds=IDLE_FOR_S)
        after = Costs.read(Path(folder))
        idle = {
            "engine_cpu_share": waited["cpu_share"],
            "flexkv_cpu_share": (after.seconds - before.seconds) / waited["seconds"],
            "hook_calls": after.since(before)["calls"],
        }
        hooks = {
            name: {"seconds": after.hooks[name], "calls": after.calls[name]}
            for name in sorted(after.hooks, key=after.hooks.__getitem__, reverse=True)
        }
        series = "vllm:flexkv_moved_bytes_total{direction=store}"
        stored = engine.metrics(series.partition("{")[0]).get(series, 0.0)
    return {"seconds_per_request": rows, "idle": idle, "hooks": hooks, "stored_bytes": stored}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=at_least_one, default=9)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=1000)
    parser.add_argument("--answer-tokens", type=int, default=32)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--json", type=Path, default=Path("out/flexkv_cost.json"))
    parser.add_argument("--check", action="store_true", help="exit with 1 when a limit is missed")
    arguments = parser.parse_args()
    console = Console()
    facts = run(arguments, console)
    rows, idle = facts["seconds_per_request"], facts["idle"]
    shares = [
        (row["hooks"] + row["threads"]) / (row["engine"] - row["hooks"] - row["threads"]) for row in rows
    ]
    limits = {
        "own CPU time over the rest of the engine's, a request": {
            "value": statistics.median(shares),
            "limit": EXTRA_CPU_MAX,
        },
        f"own CPU {IDLE_AFTER_S:g} s after the last request": {
            "value": idle["flexkv_cpu_share"],
            "limit": IDLE_CPU_SHARE_MAX,
        },
        "hooks called while nothing runs": {"value": idle["hook_calls"], "limit": 0},
    }
    setting = setting_of(arguments)
    table = Table(title="flexkv's own CPU time, a request", caption=setting)
    for header in ("", "median", "max"):
        table.add_column(header, justify="right" if header else "left")
    for kind, label in (("hooks", "hooks, ms"), ("threads", "threads, ms"), ("engine", "whole engine, ms")):
        values = [1e3 * row[kind] for row in rows]
        table.add_row(label, f"{statistics.median(values):.2f}", f"{max(values):.2f}")
    calls = [row["calls"] for row in rows]
    table.add_row("hook calls", f"{statistics.median(calls):.0f}", f"{max(calls):.0f}")
    console.print(table)
    for label, verdict in limits.items():
        verdict["met"] = verdict["value"] <= verdict["limit"]
        percent = label.startswith("own")
        value = f"{verdict['value']:.2%}" if percent else f"{verdict['value']:g}"
        limit = f"{verdict['limit']:.0%}" if percent else f"{verdict['limit']:g}"
        console.print(f"[{'green' if verdict['met'] else 'red'}]{label}: {value} (reach <= {limit})[/]")
    console.print(
        f"stored {facts['stored_bytes'] / 2**20:.0f} MiB; the whole engine {idle['engine_cpu_share']:.2%} when idle"
    )
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps({"setting": setting, "limits": limits, **facts}, indent=1))
    if facts["stored_bytes"] <= 0:
        console.print("[red]flexkv stored nothing: the measurement is void[/]")
        return 1
    return int(arguments.check and not all(verdict["met"] for verdict in limits.values()))


if __name__ == "__main__":
    sys.exit(main())
