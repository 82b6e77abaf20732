"""All results in a folder come from one machine and one version of the source, and each step's results come from that
step. In these tests the steps are small programs, and the rows are made up.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_files, gpu_machine
from benchmarks.gpu_files import RefusedError
from benchmarks.gpu_page import bench_of, render
from benchmarks.gpu_results import draw_page
from benchmarks.gpu_stages import Stage, Step, read_stage, run_stage
from tests.unit.benchmarks.test_gpu_results import MACHINE, REPORT, bench, program, write_rows

CRASH = Step("lanes", program("import sys; sys.exit('crashed')"), 30.0, "bench-lanes.json")
"""A step that fails before it writes its rows."""
CUT = Step("lanes", program("import time; time.sleep(600)"), 1.0, "bench-lanes.json")


def stage_of(*steps: Step) -> Stage:
    return Stage("bench", 120.0, steps)


def test_results_of_another_machine_or_source_are_never_mixed(tmp_path: Path) -> None:
    here = {"date": "2026-01-01", "GPU": "H100", "source": "aaa"}
    lanes = write_rows(tmp_path, "lanes")
    assert run_stage(stage_of(lanes), tmp_path, here) == ["passed"]
    both = stage_of(lanes, Step("next", program("print(1)"), 30.0))
    for change, words in (
        ({"GPU": "H200"}, "GPU was H100 and is H200"),
        ({"source": "bbb"}, "source was aaa and is bbb"),
        ({"nvcc": "13"}, "nvcc was unknown and is 13"),
    ):
        with pytest.raises(RefusedError, match=rf"bench\.json .*{words}.*--again"):
            run_stage(both, tmp_path, {**here, **change})
    assert read_stage(tmp_path, "bench")["machine"] == here
    assert len(bench_of(tmp_path)["rows"]) == len(bench()["rows"])

    # Another date does not count as another machine.
    assert run_stage(both, tmp_path, {**here, "date": "2026-01-02"}) == ["passed", "passed"]
    assert run_stage(stage_of(CRASH), tmp_path, {**here, "GPU": "H200"}, again=True) == ["failed"]
    assert read_stage(tmp_path, "bench")["machine"]["GPU"] == "H200"
    assert bench_of(tmp_path)["rows"] == []


def test_a_stage_that_measured_nothing_binds_no_machine(tmp_path: Path) -> None:
    missing = Step("disk", program("print(1)"), 30.0, missing="no --folder was given")
    assert run_stage(stage_of(missing), tmp_path, {"GPU": "H100"}) == ["not run"]
    assert run_stage(stage_of(write_rows(tmp_path, "lanes")), tmp_path, {"GPU": "H200"}) == ["passed"]


@pytest.mark.parametrize(("step", "state"), [(CRASH, "failed"), (CUT, "cut")])
def test_a_step_that_wrote_nothing_shows_no_rows_of_an_earlier_call(
    step: Step, state: str, tmp_path: Path
) -> None:
    run_stage(stage_of(write_rows(tmp_path, "lanes")), tmp_path, MACHINE)
    assert bench_of(tmp_path)["rows"]
    assert run_stage(stage_of(step), tmp_path, MACHINE, again=True) == [state]
    assert bench_of(tmp_path)["rows"] == []
    assert "One contiguous copy: not measured" in render(tmp_path)


def test_a_report_of_an_earlier_call_is_not_counted(tmp_path: Path) -> None:
    (tmp_path / "tests-lanes.xml").write_text(REPORT)
    slow = Step("lanes", program("import time; time.sleep(600)"), 1.0, "tests-lanes.xml")
    assert run_stage(Stage("tests", 60.0, (slow,)), tmp_path, MACHINE) == ["cut"]
    assert "| tests: lanes | 3 |" not in render(tmp_path)


def test_files_of_steps_that_were_not_begun_are_not_read(tmp_path: Path) -> None:
    lanes = write_rows(tmp_path, "lanes")
    run_stage(stage_of(lanes), tmp_path, MACHINE)
    assert run_stage(Stage("bench", 1.0, (lanes,)), tmp_path, MACHINE, again=True) == ["not run"]
    (tmp_path / lanes.result).write_text(json.dumps(bench()))
    assert bench_of(tmp_path)["rows"] == []


@pytest.mark.parametrize(
    ("then", "state"), [("time.sleep(600)", "cut"), ("raise SystemExit(3)", "failed"), ("", "passed")]
)
def test_rows_of_a_step_that_did_not_pass_are_marked(then: str, state: str, tmp_path: Path) -> None:
    written = write_rows(tmp_path, "lanes", then)
    step = Step("lanes", written.command, 5.0, written.result)
    assert run_stage(stage_of(step), tmp_path, MACHINE) == [state]
    page = render(tmp_path)
    row = next(line for line in page.splitlines() if line.startswith("| 1048576 | H2D | batch |"))
    assert row.endswith("|  |" if state == "passed" else f"| lanes: {state} |")
    assert ("Not all rows that they are judged by are there" in page) is (state != "passed")


def test_what_a_cut_step_measured_stays_until_it_runs_again(tmp_path: Path) -> None:
    written = write_rows(tmp_path, "lanes", "time.sleep(600)")
    step = Step("lanes", written.command, 5.0, written.result)
    run_stage(stage_of(step), tmp_path, MACHINE)
    assert run_stage(Stage("bench", 1.0, (step,)), tmp_path, MACHINE) == ["cut"]
    assert bench_of(tmp_path)["rows"]
    assert run_stage(stage_of(CRASH), tmp_path, MACHINE) == ["failed"]
    assert bench_of(tmp_path)["rows"] == []


@pytest.mark.parametrize(
    "content", ["", '{"steps": [', "[]", '{"stage": "bench", "machine": {}, "steps": [{}]}']
)
def test_a_stage_file_that_cannot_be_read_is_named(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lanes = write_rows(tmp_path, "lanes")
    run_stage(stage_of(lanes), tmp_path, MACHINE)
    (tmp_path / "bench.json").write_text(content)
    page = render(tmp_path)
    assert "| stage bench | no result, because bench.json cannot be read: " in page
    assert "| stage bench | never called |" not in page
    assert draw_page(tmp_path, tmp_path / "page.png") == "no picture: no lane was measured"
    capsys.readouterr()
    assert run_stage(stage_of(lanes), tmp_path, {"GPU": "another"}) == ["passed"]
    assert "bench: no result is kept, because bench.json cannot be read" in capsys.readouterr().out


def of_another_version(change: str) -> dict[str, Any]:
    content = bench()
    if change == "row":
        del content["rows"][0]["share_of_limit"]
    elif change == "type":
        content["rows"][0]["run_bytes"] = "1 MiB"
    elif change == "rows":
        content["rows"] = [1]
    else:
        del content["thresholds"]
    return content


@pytest.mark.parametrize("change", ["row", "type", "rows", "thresholds", "half", "empty"])
def test_a_bench_file_that_cannot_be_read_is_named(change: str, tmp_path: Path) -> None:
    steps = (write_rows(tmp_path, "lanes"), write_rows(tmp_path, "small"))
    run_stage(stage_of(*steps), tmp_path, MACHINE)
    halves = {"half": json.dumps(bench())[:100], "empty": ""}
    (tmp_path / "bench-lanes.json").write_text(
        halves[change] if change in halves else json.dumps(of_another_version(change))
    )
    page = render(tmp_path)
    assert "| bench: lanes | no result, because bench-lanes.json cannot be read: " in page
    assert len(bench_of(tmp_path)["rows"]) == len(bench()["rows"]), "the other part counts"


def test_rows_with_a_name_more_are_shown_and_not_drawn(tmp_path: Path) -> None:
    run_stage(stage_of(write_rows(tmp_path, "lanes")), tmp_path, MACHINE)
    content = bench()
    content["rows"][1]["later"] = 7
    (tmp_path / "bench-lanes.json").write_text(json.dumps(content))
    page = render(tmp_path)
    assert "| later |" in page
    assert "H2D: in batches." in page
    assert "later" in draw_page(tmp_path, tmp_path / "page.png")


@pytest.mark.parametrize("report", [REPORT[:60], "", "<testsuites/>", REPORT.replace("errors", "other")])
def test_a_report_that_cannot_be_read_is_named(report: str, tmp_path: Path) -> None:
    path = tmp_path / "tests-lanes.xml"
    write = f"import pathlib; pathlib.Path({str(path)!r}).write_text({report!r})"
    run_stage(Stage("tests", 60.0, (Step("lanes", program(write), 30.0, path.name),)), tmp_path, MACHINE)
    assert "| tests: lanes | no result, because tests-lanes.xml cannot be read: " in render(tmp_path)


def test_a_file_is_on_the_disk_before_it_takes_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)

        def call(*arguments: Any, name: str = name, real: Any = real) -> None:
            done.append(name)
            real(*arguments)

        monkeypatch.setattr(os, name, call)
    gpu_files.write_whole(tmp_path / "a.json", "{}")
    assert done == ["fsync", "replace"]


def test_two_calls_with_one_folder_are_kept_apart(tmp_path: Path) -> None:
    step = write_rows(tmp_path, "lanes")
    with (tmp_path / gpu_files.LOCK).open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(RefusedError, match=rf"another call measures with {tmp_path}"):
            run_stage(stage_of(step), tmp_path, MACHINE)
        assert not (tmp_path / "bench.json").exists()
    assert run_stage(stage_of(step), tmp_path, MACHINE) == ["passed"]


def test_a_driver_that_does_not_answer_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(*arguments: object, **options: object) -> None:
        raise subprocess.TimeoutExpired("python", 120.0)

    monkeypatch.setattr(gpu_machine, "driver_refusal", lambda: "")
    monkeypatch.setattr(subprocess, "run", silent)
    assert gpu_machine.refusal() == "the driver did not answer in 120 s"


class Stuck:
    """Replaces a child process that hangs inside a driver, so that it does not end even after a kill."""

    pid, returncode = 1 << 30, None

    def __init__(self, *arguments: object, **options: object) -> None:
        pass

    def wait(self, limit_s: float) -> int:
        raise subprocess.TimeoutExpired("bench", limit_s)


def test_a_step_that_cannot_be_ended_ends_its_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", Stuck)
    monkeypatch.setattr(os, "killpg", lambda pid, number: None)
    after = Step("after", (sys.executable, "-c", "print(1)"), 30.0)
    assert run_stage(stage_of(CUT, after), tmp_path, MACHINE) == ["cut", "not run"]
    record = read_stage(tmp_path, "bench")["steps"][0]
    assert record["why"] == f"process {Stuck.pid} did not end after 1 s, nor when it was killed"


def test_a_stage_counts_its_time_from_the_call_on(tmp_path: Path) -> None:
    step = Step("one", program("print(1)"), 30.0)
    began_s = time.monotonic() - 118.0
    assert run_stage(stage_of(step), tmp_path, MACHINE, began_s=began_s) == ["not run"]
