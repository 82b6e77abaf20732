"""Measures SGLang with flexkv as its linker: the time to the first token of a 4k-token prompt that hits, and the CPU
time of a request without a hit.

Two engines, one of them without flexkv, run at the same time and take turns, so that other load on the machine affects
both engines alike. A hit is measured after the engine dropped its own cache and reused its first pages for another
prompt. Each hit is compared with a hit in the engine's own cache, which is as fast as a hit can be. CPU time is user
and system time of all processes of an engine; in both engines an idle scheduler sleeps. flexkv's own part is also
measured by clocks on its hooks, and from the CPU time of its threads. These measurements are exact, whereas the
difference between two engines is smaller than their noise.

    python -m benchmarks.sglang_linker [--model wide] [--runs 7] [--json out/sglang_linker.json] [--check]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.arguments import at_least_one
from benchmarks.hook_clock import FOLDER_VARIABLE, Costs
from demo.model import PRESETS, ModelShape, prompt_tokens, write_model
from demo.sglang_process import SglangProcess, linker

HOST_BYTES = 1 << 30
COLD_OVER_HIT_MIN = 10.0
EXTRA_CPU_MAX = 0.03
SETTLE_S = 1.0
"""Seconds to wait until the store operations of a request have ended. They outlive the request by milliseconds, and an
idle scheduler polls once per second.
"""


@dataclass(slots=True)
class Runs:
    """The measurements. Lists have one entry per run.

    Attributes:
        cold_s, own_s, hit_s: seconds to the first token of a prompt that is computed, that comes from the engine's own
            cache, and that comes from flexkv, in this order.
        served: number of the hit's tokens that came from flexkv.
        cpu_s: for each engine, the CPU seconds per request without hits.
        share: CPU time of flexkv's hooks and threads, as a share of the CPU time of the rest of the same engine, for
            requests without hits.
    """

    cold_s: list[float] = field(default_factory=list)
    own_s: list[float] = field(default_factory=list)
    hit_s: list[float] = field(default_factory=list)
    served: list[int] = field(default_factory=list)
    wrong: int = 0
    cpu_s: dict[str, list[float]] = field(default_factory=lambda: {"alone": [], "with flexkv": []})
    share: list[float] = field(default_factory=list)


def measure_hit(engine: SglangProcess, ids: list[int], filler: list[int], runs: Runs) -> None:
    """Measures one prompt three times: when it is computed, when the engine's own cache has it, and when only
    flexkv has it.
    """
    request = {"ids": ids, "tokens": 1}
    [cold] = engine.call("generate", requests=[request])
    time.sleep(SETTLE_S)
    [own] = engine.call("generate", requests=[request])
    time.sleep(SETTLE_S)
    assert engine.call("flush"), "the engine did not drop its cache"
    engine.call("generate", requests=[{"ids": filler, "tokens": 1}])
    [hit] = engine.call("generate", requests=[request])
    assert not own["host"], f"the engine's own cache did not serve it: {own}"
    runs.cold_s.append(cold["ttft_s"])
    runs.own_s.append(own["ttft_s"])
    runs.hit_s.append(hit["ttft_s"])
    runs.served.append(hit["host"])
    runs.wrong += (cold["tokens"] != hit["tokens"]) + (cold["tokens"] != own["tokens"])


def processor_seconds(engine: SglangProcess, requests: list[dict[str, Any]]) -> float:
    """Returns the engine's CPU seconds per request, including the stores that outlive the requests."""
    before = engine.call("processor_seconds")
    for request in requests:
        engine.call("generate", requests=[request])
    time.sleep(SETTLE_S)
    return float(engine.call("processor_seconds") - before) / len(requests)


def run(arguments: argparse.Namespace, shape: ModelShape) -> Runs:
    model = write_model(arguments.out / "models", arguments.model)
    size = {"max_total_tokens": 12_288, "context_length": 6144, "page_size": 64, "log_level": "error"}
    ours = size | linker("benchmarks.costed_linker", "CostedLinker", host__bytes=HOST_BYTES)
    runs = Runs()
    with (
        tempfile.TemporaryDirectory(prefix="flexkv-cost-") as clocks,
        SglangProcess(model, arguments.out / "sglang_alone.log", size) as alone,
        SglangProcess(
            model, arguments.out / "sglang_flexkv.log", ours, **{FOLDER_VARIABLE: clocks}
        ) as flexkv,
    ):
        engines = {"alone": alone, "with flexkv": flexkv}
        # The first run is not counted, because it warms up allocators, files and compilers.
        for number in range(arguments.runs + 1):
            into = runs if number else Runs()
            ids = prompt_tokens(arguments.prompt_tokens, 100 + number, shape)
            measure_hit(flexkv, ids, prompt_tokens(300, 10_000 + number, shape), into)
            fresh = [
                {"ids": prompt_tokens(1000, 1000 * number + request, shape), "tokens": 16}
                for request in range(arguments.requests)
            ]
            for name in engines if number % 2 else reversed(engines):
                before = Costs.read(Path(clocks))
                whole = processor_seconds(engines[name], fresh)
                into.cpu_s[name].append(whole)
                if engines[name] is flexkv:
                    spent = Costs.read(Path(clocks)).since(before, len(fresh))
                    own = spent["hooks"] + spent["threads"]
                    into.share.append(own / (whole - own))
    return runs


def verdicts(runs: Runs) -> dict[str, dict[str, Any]]:
    """Returns each measure that has a limit: its value, the limit, and whether it is met."""
    ratio = statistics.median(runs.cold_s) / statistics.median(runs.hit_s)
    pairs = zip(runs.cpu_s["with flexkv"], runs.cpu_s["alone"], strict=True)
    extra = statistics.median(ours / theirs for ours, theirs in pairs) - 1
    share = statistics.median(runs.share)
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
        "flexkv's own CPU time over the rest of its engine's, a request without hits": {
            "value": share,
            "limit": f"<= {EXTRA_CPU_MAX:g}",
            "met": share <= EXTRA_CPU_MAX,
        },
    }


def show(console: Console, runs: Runs, limits: dict[str, dict[str, Any]], setting: str) -> None:
    table = Table(title="SGLang with flexkv as its linker", caption=setting)
    for header in ("measure", "median", "least"):
        table.add_column(header, justify="right")
    rows = {"cold": runs.cold_s, "hit in the engine's own cache": runs.own_s, "hit in flexkv": runs.hit_s}
    rows |= {f"CPU time a request, {name}": values for name, values in runs.cpu_s.items()}
    for name, values in rows.items():
        table.add_row(f"{name}, ms", f"{1e3 * statistics.median(values):.1f}", f"{1e3 * min(values):.1f}")
    console.print(table)
    pairs = [ours / own for ours, own in zip(runs.hit_s, runs.own_s, strict=True)]
    console.print(
        f"hit in flexkv over hit in the engine's own cache: {statistics.median(pairs):.3f}; "
        f"cold over the latter: {statistics.median(runs.cold_s) / statistics.median(runs.own_s):.2f}"
    )
    for label, verdict in limits.items():
        colour = "green" if verdict["met"] else "red"
        console.print(f"[{colour}]{label}: {verdict['value']:.4f} (reach {verdict['limit']})[/]")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=sorted(PRESETS), default="wide", help="shape of the random model")
    parser.add_argument("--runs", type=at_least_one, default=7)
    parser.add_argument("--prompt-tokens", type=int, default=4001)
    parser.add_argument("--requests", type=int, default=4, help="without hits, in each run")
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--json", type=Path, default=Path("out/sglang_linker.json"))
    parser.add_argument("--check", action="store_true", help="exit with 1 when a limit is missed")
    arguments = parser.parse_args()
    console = Console()
    arguments.out.mkdir(parents=True, exist_ok=True)
    shape = PRESETS[arguments.model]
    runs = run(arguments, shape)
    limits = verdicts(runs)
    setting = (
        f"random Llama {arguments.model} ({shape.layers} layers, hidden {shape.hidden}, {shape.heads} heads of "
        f"{shape.head_size}, MLP of {shape.intermediate}, float32), pages of 64 tokens, prompt of "
        f"{arguments.prompt_tokens}, {arguments.runs} runs in turns, {os.cpu_count()} CPUs, load average "
        f"{os.getloadavg()[0]:.1f} at the end"
    )
    show(console, runs, limits, setting)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps({"setting": setting, "limits": limits, **asdict(runs)}, indent=1))
    if runs.wrong or min(runs.served) == 0:
        console.print(f"[red]{runs.wrong} wrong first tokens; tokens served: {runs.served}[/]")
        return 1
    return int(arguments.check and not all(verdict["met"] for verdict in limits.values()))


if __name__ == "__main__":
    sys.exit(main())
