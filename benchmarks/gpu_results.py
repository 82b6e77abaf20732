"""Runs everything that needs a GPU, in stages, and writes a page of the results.

`python -m benchmarks.gpu_results all --out DIR [--limit-s 570] [--device N] [--folder DIR] [--again] [--prepare M:F]`
`python -m benchmarks.gpu_results build|smoke|bench|tests|sanitize --out DIR [--device N] [--folder DIR] [--again]`
`python -m benchmarks.gpu_results render --out DIR`

A stage writes DIR/<stage>.json after each step, and ends within 8 minutes. If it is called again, it continues with the
steps that have no result, or refuses if the results are from another machine or source. `all` runs every stage in one
call within `--limit-s` seconds, and builds the native core only if the existing one has no CUDA. The program needs an
NVIDIA GPU with its driver and the CUDA toolkit. Most tests and the comparisons with torch also need torch with CUDA.
`--folder` is a folder on the disk to measure; without it no disk is measured. The results list what could not run, with
the reason.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import time
from collections.abc import Mapping
from pathlib import Path

from benchmarks.gpu_files import RefusedError
from benchmarks.gpu_machine import ROOT, driver_refusal, machine, not_here, refusal
from benchmarks.gpu_page import PARTIAL, bench_of, render
from benchmarks.gpu_plan import ALL, ALL_LIMIT_S, NEED_A_CORE, STAGES, Visit, all_deadlines_s, plan
from benchmarks.gpu_stages import ENDING_S, State, run_stage

PAGE_NAME = "gpu-results.md"
"""The file that `render` writes into the folder of results. docs/gpu-results.md is written by hand from such pages."""
STATUS = (ROOT / "README.md", ROOT / "docs" / "status.md")
"""Pages with tables that list, for each feature, the hardware on which it has run."""
NOT_YET = re.compile(r"\bnot (yet |been )*(run )?on (a GPU|one)\b")
"""Matches a row of the tables in the `STATUS` pages whose subject has not run on a GPU."""


def status_text() -> str:
    """Returns the text of both `STATUS` pages."""
    return "\n".join(page.read_text() for page in STATUS)


def waiting_rows(status: str) -> list[str]:
    """Returns the first cell of each table row that matches `NOT_YET`."""
    rows = [line for line in status.splitlines() if line.startswith("| ") and NOT_YET.search(line)]
    return [row.split("|")[1].strip() for row in rows]


def closing_words(page: Path, status: str) -> str:
    """Returns a text for the user: what to do with the page."""
    lines = [
        f"{page}: put its figures into docs/gpu-results.md. In docs/gpu.md say what has run; in README.md "
        "and docs/status.md, of these rows, those that have:"
    ]
    lines += [f'  "{row}"' for row in waiting_rows(status)]
    return "\n".join(lines)


def draw_page(out: Path, picture: Path) -> str:
    """Draws a picture of the rows in the folder `out`. Returns a line with the picture's path, or with the reason why
    there is none.
    """
    bench = bench_of(out)
    if not bench["rows"]:
        return "no picture: no lane was measured"
    try:
        from flexkv.cli.bench.base import ComparisonRow
        from flexkv.cli.bench.picture import draw
        from flexkv.cli.bench.transfer_bench import TransferRow

        rows, beside = (
            [{name: value for name, value in row.items() if name != PARTIAL} for row in bench[kind]]
            for kind in ("rows", "comparisons")
        )
        draw([TransferRow(**row) for row in rows], [ComparisonRow(**row) for row in beside], picture)
    except (
        ImportError,
        TypeError,
    ) as error:  # matplotlib or the native core is missing, or the rows are from a different version
        return f"no picture: {error}"
    return f"{picture}: the picture"


def run_all(visit: Visit, again: bool, ends_s: float, lacking: str) -> list[State]:
    """Runs every stage, and returns the state of every step.

    Args:
        ends_s: when everything must have ended, by `time.monotonic`.
        lacking: why the existing core cannot be used; empty if it can.

    Raises:
        RefusedError: a stage was refused (see `run_stage`). Later stages were not run.
    """
    facts: Mapping[str, str] = machine(visit.device)
    missing = not_here()
    states: list[State] = []
    for number, name in enumerate(STAGES):
        if name in NEED_A_CORE and lacking:
            lacking = refusal()
            if lacking:
                print(f"{name}: nothing was run: {lacking}", flush=True)
                return [*states, "failed"]
        now_s = time.monotonic()
        until_s = all_deadlines_s(STAGES[number:], name, now_s, ends_s - ENDING_S)
        stage = plan(name, dataclasses.replace(visit, carried=not lacking))
        stage = dataclasses.replace(stage, limit_s=max(0.0, until_s - now_s))
        states += run_stage(stage, visit.out, facts, missing, again, now_s)
    return states


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stage", choices=(ALL, *STAGES, "render"))
    parser.add_argument("--out", type=Path, required=True, help="folder of results")
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="on the disk to measure")
    parser.add_argument("--limit-s", type=float, default=ALL_LIMIT_S, help="for all of `all`")
    parser.add_argument("--prepare", default="", help="MODULE:FUNCTION, called before vLLM is imported")
    parser.add_argument("--again", action="store_true", help="also what has a result")
    parser.add_argument(
        "--page", type=Path, help="that render writes, beside a picture (default: in the folder of results)"
    )
    arguments = parser.parse_args()
    began_s = time.monotonic()
    out = arguments.out.absolute()
    if arguments.stage == "render":
        if not any((out / f"{name}.json").exists() for name in STAGES):
            raise SystemExit(f"{out} has no stage's results: nothing is written")
        page = arguments.page or out / PAGE_NAME
        page.write_text(render(out))
        print(draw_page(out, page.with_suffix(".png")))
        print(closing_words(page, status_text()))
        return
    lacking = refusal() if arguments.stage in NEED_A_CORE else driver_refusal()
    if lacking:
        raise SystemExit(f"nothing was run: {lacking}")
    visit = Visit(out, arguments.device, arguments.folder, prepare=arguments.prepare)
    try:
        if arguments.stage == ALL:
            ends_s = began_s + arguments.limit_s
            quick = dataclasses.replace(visit, quick=True)
            states = run_all(quick, arguments.again, ends_s, refusal())
            raise SystemExit(0 if set(states) <= {"passed", "not run"} else 1)
        stage = plan(arguments.stage, visit)
        states = run_stage(stage, out, machine(arguments.device), not_here(), arguments.again, began_s)
    except RefusedError as error:
        raise SystemExit(f"nothing was run: {error}") from error
    raise SystemExit(0 if set(states) <= {"passed", "not run"} else 1)


if __name__ == "__main__":
    main()
