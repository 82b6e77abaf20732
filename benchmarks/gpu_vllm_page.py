"""Makes the section of docs/gpu-results.md about the real vLLM from the results of `benchmarks.vllm_beside_gpu`."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.gpu_files import UnreadableError, reading

RESULT = "vllm-beside.json"
"""Name of the result file of `benchmarks.vllm_beside_gpu` in a folder of results."""
PARTS = ("p50", "p90", "p99", "max", "connector_p50")
STEPS = ("decoding steps", "quiet steps", "decoding steps beside stores", "decoding steps beside loads")


def vllm_section(folder: Path) -> list[str]:
    """Returns the section's lines of Markdown. If the result file is absent or cannot be read, the section says so."""
    heading = ["## vLLM's steps beside loads and stores", ""]
    path = folder / RESULT
    if not path.exists():
        return [*heading, "Not measured.", ""]
    try:
        with reading(path):
            return [*heading, *_lines(path)]
    except UnreadableError as error:
        return [*heading, f"No result, because {error}.", ""]


def _lines(path: Path) -> list[str]:
    content = json.loads(path.read_text())
    lines = [f"Void: {reason}." for reason in content["void"]]
    lines += [
        "",
        "| engine | beside | steps | p50 ms | p90 ms | p99 ms | max ms | in the connector, p50 ms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, engine in content["engines"].items():
        taken = {"alone": engine["alone"]}
        for window in ("computed", "again"):
            taken |= {f"prompts {window}: {steps}": engine[window][steps] for steps in STEPS}
        for label, numbers in taken.items():
            if numbers["steps"]:
                times = " | ".join(f"{numbers[f'{part}_ms']:.3f}" for part in PARTS)
                lines.append(f"| {name} | {label} | {numbers['steps']} | {times} |")
    lines += ["", "| | at most | measured | |", "|---|---|---|---|"]
    for verdict in content["verdicts"]:
        value = "-" if verdict["value"] is None else f"{verdict['value']:.3f}"
        met = {True: "reached", False: "**missed**", None: "not measured"}[verdict["met"]]
        lines.append(f"| {verdict['what']} | {verdict['limit']:g} | {value} | {met} |")
    for name, engine in content["engines"].items():
        lines += ["", f"{name}: longest decoding steps while prompts come again, ms:", ""]
        lines += [
            f"- {step['ms']:.3f}: {step['cause']}" for step in engine["again"]["longest decoding steps"]
        ]
    return [*lines, ""]
