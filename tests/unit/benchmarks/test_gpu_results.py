"""The page of a GPU's results: what it says of each goal follows from the rows, and what did not run is not made up."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_results import Goal, closing_words, goals, outcomes, render, status_text, waiting_rows
from flexkv import c_ext

MACHINE = {"date": "2026-01-01", "GPU": "none, made up for a test"}
TESTS = {"passed": 1, "failed": 0, "skipped": 0}
MIB = 1 << 20


def lane_row(
    run_bytes: int, direction: str, path: str, share: float | None, both: float | None
) -> dict[str, Any]:
    return {
        "run_bytes": run_bytes,
        "direction": direction,
        "path": path,
        "multiprocessors": 0,
        "gbps": 40.0,
        "share_of_limit": share,
        "share_of_one_way": both,
        "single_calls_gbps": None,
    }


def beside(what: str, run_bytes: int = 4096, **values: object) -> dict[str, Any]:
    empty = {
        "gbps": None,
        "calls": None,
        "p99_ms": None,
        "path": "",
        "multiprocessors": 0,
        "share": None,
        "note": "",
    }
    return {"what": what, "direction": "", "run_bytes": run_bytes, **empty, **values}


def bench() -> dict[str, Any]:
    note = "cuFile, GPUDirect Storage (nvidia-fs 2.20) to GPU 0"
    return {
        "limit_gbps": {"H2D": 50.0, "D2H": 50.0},
        "rows": [
            lane_row(MIB, "H2D", "batch", 0.95, None),
            lane_row(MIB, "D2H", "kernel", 0.2, None),
            lane_row(256 << 10, "D2H", "batch", 0.9, None),
            lane_row(32 << 10, "H2D", "batch", 0.6, None),
            lane_row(2 * MIB, "both", "batch", None, 1.7),
        ],
        "comparisons": [
            beside("4 KiB copy, p99", p99_ms=0.1),
            beside("4 KiB copy, p99", p99_ms=0.3),
            beside("layout transform", share=0.9, gbps=2000.0, multiprocessors=132),
            beside("layout transform", share=0.1, gbps=90.0, multiprocessors=8),
            beside("disk to pool, staged", gbps=6.0, calls=10, share=0.97, note=note),
            beside("disk to pool, a call a run", gbps=1.0, calls=1600, share=0.2, note=note),
        ],
    }


def verdicts(content: dict[str, Any]) -> list[str]:
    return [goal.verdict for goal in goals(content)]


def test_each_goal_is_judged_by_its_own_rows() -> None:
    good, missed = "reached", "**missed**"
    assert verdicts(bench()) == [good, good, missed, good, good, good, missed, good, good, good]
    found = [goal.found for goal in goals(bench())]
    assert found == pytest.approx([0.95, 0.9, 0.6, 1.7, 0.2, 0.9, 90.0, 160.0, 0.97, 6.0])
    slow = bench()
    slow["comparisons"][1]["p99_ms"] = 0.5
    slow["rows"][4]["share_of_one_way"] = 1.5
    assert verdicts(slow)[3:5] == [missed, missed]


def test_compatibility_mode_and_what_did_not_run_are_no_results() -> None:
    content = bench()
    for row in content["comparisons"]:
        row["note"] = row["note"] and "cuFile in compatibility mode (no GPUDirect Storage) to GPU 0"
    assert verdicts(content)[-3:] == ["not measured"] * 3
    content["comparisons"], content["rows"] = [], []
    assert set(verdicts(content)) == {"not measured"}


def test_the_page_has_every_row_and_figure() -> None:
    page = render(MACHINE, {**TESTS, "failed": 2}, bench())
    assert "| failed | 2 |" in page
    assert page.count("| disk to pool, staged |") == 1
    assert "| the same, 32 KiB | >= 0.65 | 0.6 | **missed** |" in page
    assert "One contiguous copy: H2D 50.0, D2H 50.0" in page
    assert Goal("a", 1.0, None).verdict == "not measured"


def test_the_tests_are_counted(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite tests="9" failures="2" errors="1" skipped="3"></testsuite></testsuites>'
    )
    assert outcomes(report) == {"passed": 3, "failed": 3, "skipped": 3}


def test_the_closing_words_name_the_rows_that_wait() -> None:
    status = status_text()
    waiting = [
        line
        for line in status.splitlines()
        if line.startswith("| ") and "not yet run on a GPU" in line and "2 virtual cores" not in line
    ]
    assert len(waiting) > 3
    words = closing_words(status)
    for line in waiting:
        assert f'"{line.split("|")[1].strip()}"' in words


def test_rows_that_have_run_are_named_no_more() -> None:
    said = (
        "not yet run on a GPU",
        "**not yet on a GPU**",
        "has not been run on one",
        "has not yet run on a GPU",
    )
    table = "\n".join(
        f"| row {number} | works; {words} ([page](page.md)) |" for number, words in enumerate(said)
    )
    assert waiting_rows(table) == ["row 0", "row 1", "row 2", "row 3"]
    assert waiting_rows(table.replace("**not yet on a GPU**", "runs on a GPU")) == ["row 0", "row 2", "row 3"]


def test_without_a_gpu_nothing_is_written() -> None:
    found = c_ext.cuda_info()
    if found["built"] and found["device_count"]:
        pytest.skip("there is a GPU")
    root = Path(__file__).resolve().parents[3]
    command = [sys.executable, "-m", "benchmarks.gpu_results"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "nothing was run" in done.stderr
    assert not (root / "docs" / "gpu-results.md").exists()
