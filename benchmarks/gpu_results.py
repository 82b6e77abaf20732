"""All that waits for a GPU, in one command: tests, measurements, and docs/gpu-results.md with what came of both.

`python -m benchmarks.gpu_results [--device N] [--folder DIR]`

Needs an NVIDIA GPU, a native core that was built with its toolkit, and torch with CUDA. `--folder` is on the disk to
measure; without it nothing is said of disks. What is missing ends it, or is said in the page; nothing is estimated.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from flexkv import c_ext

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "gpu-results.md"
STATUS = (ROOT / "README.md", ROOT / "docs" / "status.md")
"""Pages with tables of what has run."""
NOT_YET = re.compile(r"\bnot (yet |been )*(run )?on (a GPU|one)\b")
"""In a row of those tables that waits for a GPU."""
KIB, MIB = 1 << 10, 1 << 20
TRUE_GDS = "cuFile, GPUDirect Storage"
"""In the note of a row: how `GDSManager.describe` names it, and nothing else."""
COPY_ENGINE = ("batch", "pitched", "single")

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Goal:
    """What is to be reached.

    Attributes:
        found: what was measured, the worst of its rows; None where nothing was.
        at_most: `reach` is an upper bound.
    """

    what: str
    reach: float
    found: float | None
    at_most: bool = False

    @property
    def verdict(self) -> str:
        if self.found is None:
            return "not measured"
        good = self.found <= self.reach if self.at_most else self.found >= self.reach
        return "reached" if good else "**missed**"


def goals(bench: Mapping[str, Any]) -> list[Goal]:
    """The goals of a data-centre GPU, and what the JSON of `flexkv bench transfer` says of each."""
    rows: Sequence[Row] = bench["rows"]
    beside: Sequence[Row] = bench["comparisons"]
    one_way = [row for row in rows if row["direction"] in ("H2D", "D2H")]

    def of_limit(smallest: int, largest: int, paths: Iterable[str] | None = None) -> float | None:
        return _least(
            row["share_of_limit"]
            for row in one_way
            if smallest <= row["run_bytes"] <= largest and (paths is None or row["path"] in paths)
        )

    both = _least(
        row["share_of_one_way"]
        for row in rows
        if row["direction"] not in ("H2D", "D2H") and row["run_bytes"] == 2 * MIB
    )
    small = [row["p99_ms"] for row in beside if row["p99_ms"] is not None]
    transforms = [row for row in beside if row["what"] == "layout transform"]
    few = c_ext.CUDA_THRESHOLDS["transform_multiprocessors"]
    all_of_it = _least(row["share"] for row in transforms if row["multiprocessors"] > few)
    beside_model = _least(row["gbps"] for row in transforms if row["multiprocessors"] <= few)
    return [
        Goal("H2D, D2H, runs of 1 MiB and more, copy engine alone: of one contiguous copy", 0.93,
             of_limit(MIB, 1 << 40, COPY_ENGINE)),
        Goal("the same, 256 KiB", 0.88, of_limit(256 * KIB, 256 * KIB)),
        Goal("the same, 32 KiB", 0.65, of_limit(32 * KIB, 32 * KIB)),
        Goal("both at once, 2 MiB: of one way", 1.6, both),
        Goal("p99 of a 4 KiB D2H while a store streams, more than alone, ms", 0.3,
             small[1] - small[0] if len(small) == 2 else None, at_most=True),
        Goal("layout transform with digests, full grid: of a device-to-device copy", 0.8, all_of_it),
        Goal(f"the same, at most {few} SMs, GB/s", 100.0, beside_model),
        *_disk_goals(beside),
    ]  # fmt: skip


def _disk_goals(beside: Sequence[Row]) -> list[Goal]:
    def of(what: str) -> dict[int, Row]:
        return {
            row["run_bytes"]: row
            for row in beside
            if row["what"] == f"disk to pool, {what}" and TRUE_GDS in row["note"]
        }

    staged, by_run = of("staged"), of("a call a run")
    shared = sorted(staged.keys() & by_run.keys())
    return [
        Goal("staged GDS, 80 layers: calls fewer than a call a run, times", 80.0,
             _least(by_run[run]["calls"] / staged[run]["calls"] for run in shared)),
        Goal("staged GDS: of the disk's 2 MiB rate", 0.95, _least(row["share"] for row in staged.values())),
        Goal("staged GDS, runs of at most 16 KiB: of a call a run, times", 3.0,
             _least(staged[run]["gbps"] / by_run[run]["gbps"] for run in shared if run <= 16 * KIB)),
    ]  # fmt: skip


def _least(values: Iterable[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)


def render(machine: Mapping[str, str], tests: Mapping[str, int], bench: Mapping[str, Any]) -> str:
    """The page.

    Args:
        machine: what it ran on, by name.
        tests: how many passed, failed and were skipped.
        bench: the JSON of `flexkv bench transfer`.
    """
    lines = [
        "# Results on a GPU",
        "",
        "Written by `python -m benchmarks.gpu_results`; every figure was measured.",
        "",
    ]
    lines += _table(("", ""), machine.items())
    lines += [
        "## Tests",
        "",
        "`pytest -m gpu tests/gpu`, compute-sanitizer's memcheck and racecheck among them.",
        "",
    ]
    lines += _table(("outcome", "tests"), ((name, str(count)) for name, count in tests.items()))
    lines += ["## Goals", ""]
    lines += _table(
        ("", "to reach", "measured", ""),
        (
            (goal.what, f"{'<=' if goal.at_most else '>='} {goal.reach:g}", _number(goal.found), goal.verdict)
            for goal in goals(bench)
        ),
    )
    limits = ", ".join(f"{name} {rate:.1f}" for name, rate in bench["limit_gbps"].items())
    lines += ["## Lanes", "", f"GB/s, median. One contiguous copy: {limits}.", ""]
    lines += _rows(bench["rows"])
    lines += ["## Beside them", ""]
    lines += _rows(bench["comparisons"])
    return "\n".join(lines).rstrip() + "\n"


def _rows(rows: Sequence[Row]) -> list[str]:
    headings = list(rows[0]) if rows else []
    return _table(headings, ([_number(row[name]) for name in headings] for row in rows))


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    lines += ["| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in rows]
    return [*lines, ""]


def _number(value: object) -> str:
    return "-" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)


def outcomes(junit: Path) -> dict[str, int]:
    """Passed, failed and skipped, of a report that pytest wrote."""
    (suite,) = ElementTree.parse(junit).getroot().iter("testsuite")
    failed = int(suite.attrib["failures"]) + int(suite.attrib["errors"])
    skipped = int(suite.attrib["skipped"])
    return {"passed": int(suite.attrib["tests"]) - failed - skipped, "failed": failed, "skipped": skipped}


def describe(device: int) -> dict[str, str]:
    """What this machine is."""
    query = ["nvidia-smi", f"--id={device}", "--format=csv,noheader"]
    query.append("--query-gpu=name,driver_version,memory.total,pcie.link.gen.max,pcie.link.width.max")
    import torch

    return {
        "date": time.strftime("%Y-%m-%d"),
        "GPU, driver, memory, PCIe generation and width": _said(query),
        "CUDA driver": str(c_ext.cuda_info()["driver"]),
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}",
        "system": f"{platform.platform()}, Python {platform.python_version()}",
        "commit": _said(["git", "-C", str(ROOT), "describe", "--always", "--dirty"]),
        "GPUDirect Storage": c_ext.gpudirect_refusal() or "yes",
    }


def _said(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def status_text() -> str:
    """Both pages."""
    return "\n".join(page.read_text() for page in STATUS)


def waiting_rows(status: str) -> list[str]:
    """The first cells of those rows of the tables that hold `NOT_YET`."""
    rows = [line for line in status.splitlines() if line.startswith("| ") and NOT_YET.search(line)]
    return [row.split("|")[1].strip() for row in rows]


def closing_words(status: str) -> str:
    """What whoever has the GPU does now."""
    lines = [
        f"{PAGE}: commit it. In docs/gpu.md say what has run; in README.md and "
        "docs/status.md, of these rows, those that have:"
    ]
    lines += [f'  "{row}"' for row in waiting_rows(status)]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="on the disk to measure")
    arguments = parser.parse_args()
    found = c_ext.cuda_info()
    if not (found["built"] and found["device_count"]):
        raise SystemExit(f"nothing was run: {found['reason'] or 'the native core was built without CUDA'}")
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("nothing was run: torch was built without CUDA, or for another driver")
    with tempfile.TemporaryDirectory() as made:
        junit, results = Path(made, "tests.xml"), Path(made, "bench.json")
        pytest = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", f"--junitxml={junit}", "tests/gpu"]
        failed = subprocess.run(pytest, cwd=ROOT).returncode
        bench = [sys.executable, "-m", "flexkv", "bench", "transfer", "--device", str(arguments.device)]
        bench += ["--megabytes", "1024", "--repeats", "9", "--json", str(results)]
        bench += ["--png", str(PAGE.with_suffix(".png"))]
        bench += [] if arguments.folder is None else ["--folder", str(arguments.folder)]
        subprocess.run(bench, cwd=ROOT, check=True)
        PAGE.write_text(render(describe(arguments.device), outcomes(junit), json.loads(results.read_text())))
    print(closing_words(status_text()))
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
