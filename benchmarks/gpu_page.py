"""Makes a page of the results of all stages, even if some stages are incomplete."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.gpu_files import UnreadableError, reading
from benchmarks.gpu_goal import Row
from benchmarks.gpu_goals import goals
from benchmarks.gpu_plan import STAGES
from benchmarks.gpu_stages import BEGUN, ENDED, read_stage
from benchmarks.gpu_vllm_page import vllm_section

HEADING = """\
# Results on a GPU

Written by `python -m benchmarks.gpu_results render`; every figure was measured, and what did not run is named."""
MOST_FAILURES = 20
"""Maximum number of failed tests that the page lists."""
ROW_KINDS = ("rows", "comparisons", "beside", "latency", "processor")
"""Keys in the JSON of `flexkv bench transfer` whose values are lists of rows."""
PARTIAL = "partial"
"""A key that this module adds to each row. If the step that measured the row did not pass, the value is the step's name
and state, because other rows of that step may be missing. Otherwise the value is empty.
"""


def bench_of(folder: Path) -> dict[str, Any]:
    """Merges the rows of all steps of the bench stage that have a result.

    Each row also gets the key `PARTIAL`. The result's key `unread` maps the name of each step with unreadable results
    to the reason.
    """
    merged: dict[str, Any] = {kind: [] for kind in ROW_KINDS}
    merged |= {"limit_gbps": {}, "thresholds": {}, "parts": [], "copies": {}, "unread": {}}
    try:
        steps = read_stage(folder, "bench")["steps"]
    except UnreadableError:  # `_read` reports it
        return merged
    for step in steps:
        if not _has_result(folder, step):
            continue
        try:
            part = _bench_part(folder / step["result"], step)
        except UnreadableError as error:
            merged["unread"][f"bench: {step['name']}"] = f"no result, because {error}"
            continue
        for name in (*ROW_KINDS, "parts"):
            merged[name] += part[name]
        merged["limit_gbps"] = part["limit_gbps"] | merged["limit_gbps"]
        merged["thresholds"] |= part["thresholds"]
        merged["copies"] = merged["copies"] or part["copies"]
    return merged


def _bench_part(path: Path, step: Mapping[str, Any]) -> dict[str, Any]:
    """Reads one step's measurements, and checks that they have everything that the page needs.

    Raises:
        UnreadableError: the file is incomplete, or from a different version.
    """
    with reading(path):
        part: dict[str, Any] = json.loads(path.read_text())
        of = "" if step["state"] == "passed" else f"{step['name']}: {step['state']}"
        for name in ROW_KINDS:
            part[name] = [{**row, PARTIAL: of} for row in part[name]]
            _rows(part[name])
        goals(part)
        _limits(part)
        _copies(part)
        return {**part, "parts": list(part["parts"])}


def _has_result(folder: Path, step: Mapping[str, Any]) -> bool:
    """Returns whether a step has a result. A step that was not begun has no result, even if its result file exists,
    because that file is from an earlier call.
    """
    return bool(step["result"]) and step["state"] in BEGUN and (folder / step["result"]).exists()


def render(folder: Path) -> str:
    """Returns the text of the page.

    Args:
        folder: the folder of results, to which the stages have written.
    """
    stages, unread = _read(folder)
    bench = bench_of(folder)
    unread |= bench["unread"]
    tests = _tests(folder, stages, unread)
    lines = [HEADING, ""]
    for machine, of in _machines(stages).items():
        lines += [f"Stages {', '.join(of)}:", "", *_table(("", ""), machine)]
    lines += ["## What ran", ""]
    lines += _table(("stage", "step", "outcome", "s", ""), (_step_cells(folder, stage, step) for stage in stages
                    for step in stage["steps"]))  # fmt: skip
    known = {f"stage {stage['stage']}" for stage in stages} | unread.keys()
    never = [name for name in (f"stage {name}" for name in STAGES) if name not in known]
    lines += ["## What did not run", ""]
    lines += _table(
        ("", "why"),
        [*_not_run(folder, stages), *unread.items(), *((name, "never called") for name in never)],
    )
    lines += tests
    lines += ["## Goals", ""]
    lines += _table(("", "to reach", "measured", ""), (
        (goal.what, f"{'<=' if goal.at_most else '>='} {goal.reach:g}", _number(goal.found), goal.verdict)
        for goal in goals(bench)
    ))  # fmt: skip
    if partial := sorted({row[PARTIAL] for kind in ROW_KINDS for row in bench[kind]} - {""}):
        lines += [f"Not all rows that they are judged by are there ({', '.join(partial)}).", ""]
    lines += ["## Lanes", "", f"GB/s, median. One contiguous copy: {_limits(bench) or 'not measured'}.", ""]
    lines += [*_copies(bench), ""]
    lines += _rows(bench["rows"])
    lines += ["## The engine's work beside them", ""]
    lines += _rows(bench["beside"])
    lines += ["## Single loads and stores", ""]
    lines += _rows(bench["latency"])
    lines += ["## CPU time of the process", ""]
    lines += _rows(bench["processor"])
    lines += vllm_section(folder)
    lines += ["## Comparisons", ""]
    lines += _rows(bench["comparisons"])
    return "\n".join(lines).rstrip() + "\n"


def _read(folder: Path) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Returns the stages that have steps. Also returns, for each stage whose file cannot be read, its name and the
    reason."""
    stages, unread = [], {}
    for name in STAGES:
        try:
            stage = read_stage(folder, name)
        except UnreadableError as error:
            unread[f"stage {name}"] = f"no result, because {error}"
            continue
        if stage["steps"]:
            stages.append(stage)
    return stages, unread


def _machines(stages: Sequence[Mapping[str, Any]]) -> dict[tuple[tuple[str, str], ...], list[str]]:
    """Returns each machine's facts, with the stages that ran on it. Stages whose facts differ only in the date count as
    run on one machine. It is shown with the first date.
    """
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
    """Returns what was not measured, with the reason: what the machine lacks, steps without a result, and steps that
    ran no test.
    """
    found = {name: why for stage in stages for name, why in stage.get("not_here", {}).items()}
    for stage in stages:
        for step in stage["steps"]:
            if step["state"] not in ("passed", "failed"):
                found[f"{stage['stage']}: {step['name']}"] = step.get("why", "")
            elif reason := all_skipped(folder, step):
                found[f"{stage['stage']}: {step['name']}"] = reason
    return list(found.items())


def _tests(folder: Path, stages: Sequence[Mapping[str, Any]], unread: dict[str, str]) -> list[str]:
    """Returns the page's section on tests: the outcomes of every step with a report by pytest, and the failed tests. If
    a report cannot be read, adds the reason to `unread`.
    """
    rows, failures = [], []
    for stage in stages:
        for step in stage["steps"]:
            report = folder / step["result"]
            if not report.name.endswith(".xml") or not _has_result(folder, step):
                continue
            name = f"{stage['stage']}: {step['name']}"
            try:
                counts, failed = outcomes(report), failed_tests(report)
            except UnreadableError as error:
                unread[name] = f"no result, because {error}"
                continue
            # If a step ended by itself, its report is complete, even if tests failed.
            shown = name if step["state"] in ENDED else f"{name} ({PARTIAL}: {step['state']})"
            rows.append((shown, *map(str, counts.values())))
            failures += failed
    lines = ["## Tests", "", *_table(("step", "passed", "failed", "skipped"), rows)]
    if failures:
        lines += _table(("failed", "with"), failures[:MOST_FAILURES])
        if len(failures) > MOST_FAILURES:
            lines += [f"{len(failures) - MOST_FAILURES} more failed.", ""]
    return lines


def all_skipped(folder: Path, step: Mapping[str, Any]) -> str:
    """If a step passed because all its tests were skipped, returns a text with the number of tests and the reason why
    the first was skipped. Empty if a test ran, or if the report cannot be read.
    """
    report = folder / step["result"]
    if step["state"] != "passed" or not report.name.endswith(".xml") or not report.exists():
        return ""
    try:
        counts, reasons = outcomes(report), _reasons(report)
    except UnreadableError:
        return ""
    if counts["passed"] or counts["failed"]:
        return ""
    return f"all {counts['skipped']} tests were skipped: {reasons[0] if reasons else 'no reason given'}"


def _reasons(junit: Path) -> list[str]:
    """Returns the reason of each skipped test."""
    with reading(junit):
        return [node.attrib.get("message", "") for node in ElementTree.parse(junit).getroot().iter("skipped")]


def outcomes(junit: Path) -> dict[str, int]:
    """Returns the numbers of passed, failed and skipped tests in a report that pytest wrote.

    Raises:
        UnreadableError: the file is not a report, or is incomplete.
    """
    with reading(junit):
        (suite,) = ElementTree.parse(junit).getroot().iter("testsuite")
        failed = int(suite.attrib["failures"]) + int(suite.attrib["errors"])
        skipped = int(suite.attrib["skipped"])
        return {"passed": int(suite.attrib["tests"]) - failed - skipped, "failed": failed, "skipped": skipped}


def failed_tests(junit: Path) -> list[tuple[str, str]]:
    """Returns the names of failed tests, each with the first line of its error.

    Raises:
        UnreadableError: the file is not a report, or is incomplete.
    """
    found = []
    with reading(junit):
        for case in ElementTree.parse(junit).getroot().iter("testcase"):
            for kind in ("failure", "error"):
                if (node := case.find(kind)) is not None:
                    said = (node.attrib.get("message") or "").splitlines() or [""]
                    found.append((case.attrib["name"], said[0][:160]))
    return found


def _rows(rows: Sequence[Row]) -> list[str]:
    # Rows of different steps or versions may have different columns.
    headings = list(dict.fromkeys(name for row in rows for name in row))
    if not headings:
        return ["Not measured.", ""]
    return _table(headings, ([_number(row.get(name)) for name in headings] for row in rows))


def _limits(bench: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {rate:.1f}" for name, rate in bench["limit_gbps"].items())


def _copies(bench: Mapping[str, Any]) -> list[str]:
    """Returns one line per direction that says which copy paths the lane used. Empty if no step recorded the copy
    paths."""
    return [f"{name.upper()}: {ways}." for name, ways in bench["copies"].items()]


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
