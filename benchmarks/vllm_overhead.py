"""Measures flexkv's cost in vLLM if no request hits: CPU time per request, including stores, and CPU time when idle.

Two engines run as in a deployment, with the scheduler in its own process, and get the same new prompts in turns. CPU
time is user and system time of all processes and threads of an engine. Both engines compute on the same single CPU. By
default, vLLM leaves one more CPU without compute threads if a KV connector is configured, unless no CPU would remain.
With this default, the engines would differ not only in flexkv but also in their threads. `flexkv_cost` measures
flexkv's own part alone.

    python -m benchmarks.vllm_overhead [--runs 9] [--json out/vllm_overhead.json] [--check]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.arguments import at_least_one
from benchmarks.vllm_ttft import BLOCK_TOKENS, HOST_BYTES, MODEL, engine_arguments
from demo.engine_process import FLEXKV, SEPARATE_CORE, EngineProcess
from demo.model import PRESETS, prompt_tokens, write_model

ALONE, WITH = "vLLM alone", "with flexkv"
ENVIRONMENT = SEPARATE_CORE | {"VLLM_CPU_OMP_THREADS_BIND": "0"}
"""The engines' environment. It gives each engine one compute thread, on CPU 0."""
EXTRA_CPU_MAX = 0.03
IDLE_CPU_SHARE_MAX = 0.01
IDLE_AFTER_S = 5.0
"""Seconds after the last request before the idle CPU share is measured."""
IDLE_FOR_S = 5.0
SETTLE_S = 0.3
"""Seconds to wait until the store operations of a request have ended. They end some milliseconds after the request, and
are part of its cost.
"""


def batch_seconds(engine: EngineProcess, requests: list[dict[str, Any]]) -> float:
    """Returns the CPU seconds per request of all the engine's processes, including the stores that outlive the
    requests.
    """
    before = engine.call("processor_seconds")["seconds"]
    engine.generate(requests)
    engine.call("idle", seconds=SETTLE_S)
    return float(engine.call("processor_seconds")["seconds"] - before) / len(requests)


def fresh_requests(arguments: argparse.Namespace, number: int) -> list[dict[str, Any]]:
    """Returns the requests of run `number`. Nothing of their prompts is cached."""
    return [
        {
            "ids": prompt_tokens(arguments.prompt_tokens, 1000 * number + request, PRESETS[MODEL]),
            "max_tokens": arguments.answer_tokens,
        }
        for request in range(arguments.batch)
    ]


def setting_of(arguments: argparse.Namespace) -> str:
    """Describes the model, the requests and the machine in words."""
    shape = PRESETS[MODEL]
    return (
        f"random Llama {MODEL} ({shape.layers} layers, hidden {shape.hidden}, float32), blocks of {BLOCK_TOKENS} "
        f"tokens, {arguments.batch} fresh prompts of {arguments.prompt_tokens} at once, {arguments.answer_tokens} "
        f"tokens each, {arguments.runs} runs, VLLM_CPU_OMP_THREADS_BIND={ENVIRONMENT['VLLM_CPU_OMP_THREADS_BIND']}, "
        f"{os.cpu_count()} CPUs, load average {os.getloadavg()[0]:.1f} at the end"
    )


def run(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Runs both engines. Returns CPU seconds per request by engine, CPU shares when idle, and the number of bytes
    stored.
    """
    shape = PRESETS[MODEL]
    model = write_model(arguments.out / "models", MODEL)
    flexkv = FLEXKV | {"kv_connector_extra_config": {"host.bytes": HOST_BYTES}}
    log = arguments.out / "vllm_overhead.log"
    log.unlink(missing_ok=True)
    seconds: dict[str, list[float]] = {ALONE: [], WITH: []}
    with ExitStack() as stack, Progress(console=console) as progress:
        task = progress.add_task("starting engines", total=2 * (arguments.runs + 3))
        engines = {}
        for name, connector in ((ALONE, None), (WITH, None if arguments.control else flexkv)):
            engine = EngineProcess(engine_arguments(model, connector), log, environment=ENVIRONMENT)
            engines[name] = stack.enter_context(engine)
            progress.advance(task)
        for number in range(arguments.runs + 1):
            requests = fresh_requests(arguments, number)
            # The engines take turns at going first, because CPU clock rates and cache contents change over time.
            for name in sorted(engines, reverse=bool(number % 2)):
                progress.update(task, description=f"run {number}: {name}", advance=1)
                used = batch_seconds(engines[name], requests)
                if number:
                    seconds[name].append(used)
        idle = {}
        for name, engine in engines.items():
            progress.update(task, description=f"idle: {name}", advance=1)
            engine.generate([{"ids": prompt_tokens(200, 7, shape), "max_tokens": 2}])
            engine.call("idle", seconds=IDLE_AFTER_S)
            idle[name] = engine.call("idle", seconds=IDLE_FOR_S)["cpu_share"]
        series = "vllm:flexkv_moved_bytes_total{direction=store}"
        stored = engines[WITH].metrics(series.partition("{")[0]).get(series, 0.0)
    return {"cpu_seconds_per_request": seconds, "idle_cpu_share": idle, "stored_bytes": stored}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=at_least_one, default=9)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=1000)
    parser.add_argument("--answer-tokens", type=int, default=32)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--json", type=Path, default=Path("out/vllm_overhead.json"))
    parser.add_argument(
        "--control",
        action="store_true",
        help="no flexkv in either engine: what the measurement itself makes up",
    )
    parser.add_argument("--check", action="store_true", help="exit with 1 when a limit is missed")
    arguments = parser.parse_args()
    console = Console()
    facts = run(arguments, console)
    setting = setting_of(arguments)
    seconds = facts["cpu_seconds_per_request"]
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    # Ratios are taken within a run, so that a slow phase of the machine affects both engines.
    pairs = [mine / alone for mine, alone in zip(seconds[WITH], seconds[ALONE], strict=True)]
    extra = statistics.median(pairs) - 1
    table = Table(title="what flexkv costs when nothing hits", caption=setting)
    table.add_column("")
    table.add_column("CPU s a request, median", justify="right")
    table.add_column("min", justify="right")
    table.add_column(f"CPU {IDLE_AFTER_S:g} s after the last", justify="right")
    for name in (ALONE, WITH):
        idle = facts["idle_cpu_share"][name]
        table.add_row(name, f"{medians[name]:.3f}", f"{min(seconds[name]):.3f}", f"{idle:.2%}")
    if arguments.control:
        console.print(
            "[yellow]CONTROL: neither engine has flexkv; any difference below is the measurement's own[/]"
        )
    console.print(table)
    low, _, high = (quartile - 1 for quartile in statistics.quantiles(pairs, n=4))
    # If the limit is between the quartiles, the result is not resolved. flexkv cannot save CPU time without hits, so a
    # large saving is noise, and the result is not resolved either.
    resolved = low > EXTRA_CPU_MAX or (high <= EXTRA_CPU_MAX and low >= -EXTRA_CPU_MAX)
    idle_alone = facts["idle_cpu_share"][ALONE]
    idle_extra = facts["idle_cpu_share"][WITH] - idle_alone
    limits = {
        "extra CPU time a request": {
            "value": extra,
            "quartiles": [low, high],
            "limit": EXTRA_CPU_MAX,
            "resolved": resolved,
            "met": resolved and extra <= EXTRA_CPU_MAX,
        },
        f"idle CPU beyond that of vLLM alone ({idle_alone:.2%})": {
            "value": idle_extra,
            "limit": IDLE_CPU_SHARE_MAX,
            "resolved": True,
            "met": idle_extra <= IDLE_CPU_SHARE_MAX,
        },
    }
    for label, verdict in limits.items():
        colour = "green" if verdict["met"] else "red" if verdict["resolved"] else "yellow"
        note = "" if verdict["resolved"] else f"; NOT RESOLVED, quartiles {low:+.1%} to {high:+.1%}"
        console.print(
            f"[{colour}]{label}: {verdict['value']:+.2%} (reach <= {verdict['limit']:.0%}){note}[/]"
        )
    console.print(f"stored {facts['stored_bytes'] / 2**20:.0f} MiB")
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps({"setting": setting, "limits": limits, **facts}, indent=1))
    if facts["stored_bytes"] <= 0 and not arguments.control:
        console.print("[red]flexkv stored nothing: the comparison is void[/]")
        return 1
    return int(arguments.check and not all(verdict["met"] for verdict in limits.values()))


if __name__ == "__main__":
    sys.exit(main())
