"""docs/gpu-results.md from what the stages have written, whole or cut."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.gpu_goals import Row, goals
from benchmarks.gpu_plan import STAGES
from benchmarks.gpu_stages import read_stage

HEADING = """\
# Results on a GPU

Written by `python -m benchmarks.gpu_results render`; every figure was measured, and what did not run is named."""
MOST_FAILURES = 20
"""Failed tests that are named."""


def bench_of(folder: Path) -> dict[str, Any]:
    """The rows of every part of the bench stage that has any, as one."""
    merged: dict[str, Any] = {"rows": [], "comparisons": [], "limit_gbps": {}, "thresholds": {}, "parts": []}
    for step in read_stage(folder, "bench")["steps"]:
        path = folder / step["result"]
        if not step["result"] or not path.exists():
            continue
        part = json.loads(path.read_text())
        for name in ("rows", "comparisons", "parts"):
            merged[name] += part[name]
        merged["limit_gbps"] = merged["limit_gbps"] or part["limit_gbps"]
        merged["thresholds"] |= part["thresholds"]
    return merged


def render(folder: Path) -> str:
    """The page.

    Args:
        folder: of results, where the stages have written.
    """
    stages = [stage for stage in (read_stage(folder, name) for name in STAGES) if stage["steps"]]
    bench = bench_of(folder)
    lines = [HEADING, ""]
    for machine, of in _machines(stages).items():
        lines += [f"Stages {', '.join(of)}:", "", *_table(("", ""), machine)]
    lines += ["## What ran", ""]
    lines += _table(("stage", "step", "outcome", "s", ""), (_step_cells(folder, stage, step) for stage in stages
                    for step in stage["steps"]))  # fmt: skip
    never = [name for name in STAGES if name not in {stage["stage"] for stage in stages}]
    lines += ["## What did not run", ""]
    lines += _table(
        ("", "why"), [*_not_run(folder, stages), *((f"stage {name}", "never called") for name in never)]
    )
    lines += _tests(folder, stages)
    lines += ["## Goals", ""]
    lines += _table(("", "to reach", "measured", ""), (
        (goal.what, f"{'<=' if goal.at_most else '>='} {goal.reach:g}", _number(goal.found), goal.verdict)
        for goal in goals(bench)
    ))  # fmt: skip
    limits = ", ".join(f"{name} {rate:.1f}" for name, rate in bench["limit_gbps"].items())
    lines += ["## Lanes", "", f"GB/s, median. One contiguous copy: {limits or 'not measured'}.", ""]
    lines += _rows(bench["rows"])
    lines += ["## Beside them", ""]
    lines += _rows(bench["comparisons"])
    return "\n".join(lines).rstrip() + "\n"


def _machines(stages: Sequence[Mapping[str, Any]]) -> dict[tuple[tuple[str, str], ...], list[str]]:
    """Each machine, and the stages that ran on it. The day is no part of a machine, but the first one is shown."""
    found: dict[str, tuple[tuple[tuple[str, str], ...], list[str]]] = {}
    for stage in stages:
        facts = stage["machine"]
        key = json.dumps({name: value for name, value in facts.items() if name != "date"}, sort_keys=True)
        found.setdefault(key, (tuple(facts.items()), []))[1].append(stage["stage"])
    return dict(found.values())


def _step_cells(folder: Path, stage: Mapping[str, Any], step: Mapping[str, Any]) -> tuple[str, ...]:
    state = "all skipped" if all_skipped(folder, step) else step["state"]
    shown = state if state in ("passed", "not run") else f"**{state}**"
    seconds = step.get("seconds")
    return (
        stage["stage"],
        step["name"],
        shown,
        "-" if seconds is None else f"{seconds:.0f}",
        step.get("why", ""),
    )


def _not_run(folder: Path, stages: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """What the machine lacks, and steps without a result, or without a test that was run."""
    found = {name: why for stage in stages for name, why in stage.get("not_here", {}).items()}
    for stage in stages:
        for step in stage["steps"]:
            if step["state"] not in ("passed", "failed"):
                found[f"{stage['stage']}: {step['name']}"] = step.get("why", "")
            elif reason := all_skipped(folder, step):
                found[f"{stage['stage']}: {step['name']}"] = reason
    return list(found.items())


def _tests(folder: Path, stages: Sequence[Mapping[str, Any]]) -> list[str]:
    """The outcomes of every step that wrote pytest's report, and the tests that failed."""
    rows, failures = [], []
    for stage in stages:
        for step in stage["steps"]:
            report = folder / step["result"]
            if step["result"].endswith(".xml") and report.exists():
                counts = outcomes(report)
                rows.append((f"{stage['stage']}: {step['name']}", *map(str, counts.values())))
                failures += failed_tests(report)
    lines = ["## Tests", "", *_table(("step", "passed", "failed", "skipped"), rows)]
    if failures:
        lines += _table(("failed", "with"), failures[:MOST_FAILURES])
        if len(failures) > MOST_FAILURES:
            lines += [f"{len(failures) - MOST_FAILURES} more failed.", ""]
    return lines


def all_skipped(folder: Path, step: Mapping[str, Any]) -> str:
    """Why a step that ended well ran no test: what its first one was skipped for. Empty where one was run."""
    report = folder / step["result"]
    if step["state"] != "passed" or not step["result"].endswith(".xml") or not report.exists():
        return ""
    counts = outcomes(report)
    if counts["passed"] or counts["failed"]:
        return ""
    reasons = [node.attrib.get("message", "") for node in ElementTree.parse(report).getroot().iter("skipped")]
    return f"all {counts['skipped']} tests were skipped: {reasons[0] if reasons else 'no reason given'}"


def outcomes(junit: Path) -> dict[str, int]:
    """Passed, failed and skipped, of a report that pytest wrote."""
    (suite,) = ElementTree.parse(junit).getroot().iter("testsuite")
    failed = int(suite.attrib["failures"]) + int(suite.attrib["errors"])
    skipped = int(suite.attrib["skipped"])
    return {"passed": int(suite.attrib["tests"]) - failed - skipped, "failed": failed, "skipped": skipped}


def failed_tests(junit: Path) -> list[tuple[str, str]]:
    """Their names, and the first line of what they failed with."""
    found = []
    for case in ElementTree.parse(junit).getroot().iter("testcase"):
        for kind in ("failure", "error"):
            if (node := case.find(kind)) is not None:
                said = (node.attrib.get("message") or "").splitlines() or [""]
                found.append((case.attrib["name"], said[0][:160]))
    return found


def _rows(rows: Sequence[Row]) -> list[str]:
    headings = list(rows[0]) if rows else []
    if not headings:
        return ["Not measured.", ""]
    return _table(headings, ([_number(row[name]) for name in headings] for row in rows))


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    lines += [
        "| " + " | ".join(" ".join(cell.replace("|", "/").split()) for cell in row) + " |" for row in rows
    ]
    return [*lines, ""]


def _number(value: object) -> str:
    if isinstance(value, dict):  # path -> bytes
        return ", ".join(f"{name} {count / (1 << 20):.0f} MiB" for name, count in value.items()) or "-"
    return "-" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)
