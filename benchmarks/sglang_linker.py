"""SGLang with flexkv as its linker: time to the first token of a 4k-token hit, and CPU time a request without hits.

Two engines, one without flexkv, are up at the same time and take turns, so that other load on the machine meets both
alike. A hit is measured after the engine dropped its own cache and its first pages went to another prompt. CPU time is
user and system time of all processes of an engine; idle schedulers sleep in both.

    python -m benchmarks.sglang_linker [--runs 7] [--json out/sglang_linker.json] [--check]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from demo.model import PRESETS, prompt_tokens, write_model
from demo.sglang_process import SglangProcess, linker

MODEL = "medium"
HOST_BYTES = 1 << 30
COLD_OVER_HIT_MIN = 10.0
EXTRA_CPU_MAX = 0.03
SETTLE_S = 1.0
"""Stores outlive their request by milliseconds, and an idle scheduler looks once a second."""


@dataclass(slots=True)
class Runs:
    """One entry a run.

    Attributes:
        cold_s, hit_s: to the first token.
        served: tokens of the hit that came from flexkv.
        cpu_s: by engine, a request without hits.
    """

    cold_s: list[float] = field(default_factory=list)
    hit_s: list[float] = field(default_factory=list)
    served: list[int] = field(default_factory=list)
    wrong: int = 0
    cpu_s: dict[str, list[float]] = field(default_factory=lambda: {"alone": [], "with flexkv": []})


def measure_hit(engine: SglangProcess, ids: list[int], filler: list[int], runs: Runs) -> None:
    """One prompt computed, forgotten, served."""
    request = {"ids": ids, "tokens": 1}
    [cold] = engine.call("generate", requests=[request])
    time.sleep(SETTLE_S)
    assert engine.call("flush"), "the engine did not drop its cache"
    engine.call("generate", requests=[{"ids": filler, "tokens": 1}])
    [hit] = engine.call("generate", requests=[request])
    runs.cold_s.append(cold["ttft_s"])
    runs.hit_s.append(hit["ttft_s"])
    runs.served.append(hit["host"])
    runs.wrong += cold["tokens"] != hit["tokens"]


def processor_seconds(engine: SglangProcess, requests: list[dict[str, Any]]) -> float:
    """CPU seconds a request, with what it leaves behind."""
    before = engine.call("processor_seconds")
    for request in requests:
        engine.call("generate", requests=[request])
    time.sleep(SETTLE_S)
    return float(engine.call("processor_seconds") - before) / len(requests)


def run(arguments: argparse.Namespace) -> Runs:
    shape = PRESETS[MODEL]
    model = write_model(arguments.out / "models", MODEL)
    size = {"max_total_tokens": 12_288, "context_length": 6144, "page_size": 64, "log_level": "error"}
    runs = Runs()
    with (
        SglangProcess(model, arguments.out / "sglang_alone.log", size) as alone,
        SglangProcess(
            model, arguments.out / "sglang_flexkv.log", size | linker(host__bytes=HOST_BYTES)
        ) as flexkv,
    ):
        engines = {"alone": alone, "with flexkv": flexkv}
        # The first run warms up allocators, files and compilers, and is thrown away.
        for number in range(arguments.runs + 1):
            into = runs if number else Runs()
            ids = prompt_tokens(arguments.prompt_tokens, 100 + number, shape)
            measure_hit(flexkv, ids, prompt_tokens(300, 10_000 + number, shape), into)
            fresh = [
                {"ids": prompt_tokens(1000, 1000 * number + request, shape), "tokens": 16}
                for request in range(arguments.requests)
            ]
            for name in engines if number % 2 else reversed(engines):
                into.cpu_s[name].append(processor_seconds(engines[name], fresh))
    return runs


def verdicts(runs: Runs) -> dict[str, dict[str, Any]]:
    """The measures that have a limit: value, limit, met."""
    ratio = statistics.median(runs.cold_s) / statistics.median(runs.hit_s)
    pairs = zip(runs.cpu_s["with flexkv"], runs.cpu_s["alone"], strict=True)
    extra = statistics.median(ours / theirs for ours, theirs in pairs) - 1
    return {
        "cold / hit": {
            "value": ratio,
            "limit": f">= {COLD_OVER_HIT_MIN:g}",
            "met": ratio >= COLD_OVER_HIT_MIN,
        },
        "more CPU time a request without hits": {
            "value": extra,
            "limit": f"<= {EXTRA_CPU_MAX:g}",
            "met": extra <= EXTRA_CPU_MAX,
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--prompt-tokens", type=int, default=4001)
    parser.add_argument("--requests", type=int, default=4, help="without hits, in each run")
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--json", type=Path, default=Path("out/sglang_linker.json"))
    parser.add_argument("--check", action="store_true", help="exit with 1 when a limit is missed")
    arguments = parser.parse_args()
    console = Console()
    arguments.out.mkdir(parents=True, exist_ok=True)
    runs = run(arguments)
    limits = verdicts(runs)
    setting = (
        f"random Llama {MODEL}, float32, pages of 64 tokens, prompt of {arguments.prompt_tokens}, "
        f"{arguments.runs} interleaved runs, {os.cpu_count()} CPUs, load average {os.getloadavg()[0]:.1f} at the end"
    )
    table = Table(title="SGLang with flexkv as its linker", caption=setting)
    for header in ("measure", "median", "least"):
        table.add_column(header, justify="right")
    for name, values in (("cold, ms", runs.cold_s), ("hit, ms", runs.hit_s)):
        table.add_row(name, f"{1e3 * statistics.median(values):.1f}", f"{1e3 * min(values):.1f}")
    for name, values in runs.cpu_s.items():
        table.add_row(
            f"CPU ms a request, {name}", f"{1e3 * statistics.median(values):.1f}", f"{1e3 * min(values):.1f}"
        )
    console.print(table)
    for label, verdict in limits.items():
        colour = "green" if verdict["met"] else "red"
        console.print(f"[{colour}]{label}: {verdict['value']:.3f} (reach {verdict['limit']})[/]")
    content = {
        "setting": setting,
        "limits": limits,
        "seconds": {"cold": runs.cold_s, "hit": runs.hit_s, "cpu": runs.cpu_s},
        "served": runs.served,
        "wrong": runs.wrong,
    }
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(content, indent=1))
    if runs.wrong or min(runs.served) == 0:
        console.print(f"[red]{runs.wrong} wrong first tokens; tokens served: {runs.served}[/]")
        return 1
    return int(arguments.check and not all(verdict["met"] for verdict in limits.values()))


if __name__ == "__main__":
    sys.exit(main())
