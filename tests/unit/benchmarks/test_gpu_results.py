"""The page of a GPU's results. It judges each goal by the measured rows, and shows no value for steps that did not run.

No row in these tests comes from a GPU: the rows are made up, and the steps of the stages are small programs.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_machine, gpu_plan
from benchmarks.gpu_goal import Goal
from benchmarks.gpu_goals import goals
from benchmarks.gpu_page import failed_tests, outcomes, render
from benchmarks.gpu_plan import ALL, LIMITS_S, STAGES, Visit, plan
from benchmarks.gpu_results import closing_words, status_text, waiting_rows
from benchmarks.gpu_stages import ENDING_S, Stage, Step, read_stage, run_stage
from flexkv import c_ext

ROOT = Path(__file__).resolve().parents[3]
MACHINE = {"date": "2026-01-01", "GPU": "none, made up for a test"}
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
        "path_bytes": {path: 64 << 20},
        "pinned": True,
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


def work_row(work: str, direction: str, path: str, **values: object) -> dict[str, Any]:
    measured = {
        "alone_p50_ms": 0.6,
        "alone_p99_ms": 0.7,
        "beside_p50_ms": 0.6,
        "beside_p99_ms": 0.8,
        "factor": 1.0,
        "load_gbps": 45.0,
        "store_gbps": 30.0,
        "pinned": True,
    }
    names = {"work": work, "direction": direction, "path": path, "run_bytes": 4096}
    return {**names, **measured, **values}


def latency_row(what: str, run_bytes: int, blocks: int, p50_us: float, first: float | None) -> dict[str, Any]:
    names = {"what": what, "run_bytes": run_bytes, "blocks": blocks, "pinned": True}
    return {**names, "p50_us": p50_us, "first_layer_us": first}


def processor_row(what: str, path: str, cores: float) -> dict[str, Any]:
    return {"what": what, "path": path, "cores": cores, "pinned": True}


def bench() -> dict[str, Any]:
    note = "cuFile, GPUDirect Storage (nvidia-fs 2.20) to GPU 0"
    return {
        "thresholds": {"transform_multiprocessors": 8},
        "copies": {"h2d": "in batches"},
        "parts": [],
        "limit_gbps": {"H2D": 50.0, "D2H": 50.0},
        "rows": [
            lane_row(MIB, "H2D", "batch", 0.95, None),
            lane_row(MIB, "D2H", "batch", 0.8, None),
            lane_row(32 << 10, "H2D", "batch", 0.86, None),
            lane_row(64 << 10, "H2D", "batch", 0.6, None),
            lane_row(4096, "D2H", "kernel", 0.66, None),
            lane_row(2 * MIB, "both", "batch", 0.85, 1.7),
        ],
        "comparisons": [
            beside("layout transform", share=0.9, gbps=2000.0, multiprocessors=132),
            beside("layout transform", share=0.1, gbps=90.0, multiprocessors=8),
            beside("disk to pool, staged", gbps=6.0, calls=10, share=0.97, note=note),
            beside("disk to pool, a call a run", gbps=1.0, calls=1600, share=0.2, note=note),
        ],
        "beside": [
            work_row("decoding step", "D2H", "batch", factor=1.05),
            work_row("decoding step", "H2D", "kernel", factor=1.2),
            work_row("decoding step", "both", "batch", factor=1.1),
            work_row("large product", "H2D", "kernel", factor=1.01, store_gbps=None),
            work_row("large product", "D2H", "kernel", factor=1.0, load_gbps=None, store_gbps=7.0),
            work_row("small D2H", "D2H", "batch", beside_p99_ms=5.0),
        ],
        "latency": [
            latency_row("load by layer", 4096, 1, 38.0, 25.0),
            latency_row("store", 4096, 1, 60.0, None),
            latency_row("load by layer", 32 << 10, 1024, 5700.0, 800.0),
        ],
        "processor": [
            processor_row("loads", "kernel", 0.2),
            processor_row("loads", "batch", 1.5),
            processor_row("idle", "", 0.0),
        ],
    }


def judged(content: dict[str, Any]) -> dict[str, tuple[float | None, str]]:
    """Returns the measured value and the verdict of each goal, by the goal's name."""
    return {goal.what: (goal.found, goal.verdict) for goal in goals(content)}


GOOD, MISSED, NOTHING = "reached", "**missed**", "not measured"
JUDGED = {
    "a decoding step beside copies by copy engine: of alone": (1.05, GOOD),
    "its p99, more than alone, ms": (0.1, GOOD),
    "p99 of the engine's 4 KiB copies beside them, more than alone, ms": (4.3, MISSED),
    "a decoding step beside copies by kernel: of alone": (1.2, MISSED),
    "a decoding step beside both ways at once: of alone": (1.1, GOOD),
    "a large product beside either way: of its rate alone": (1 / 1.01, GOOD),
    "loads beside the large product, runs of 4 KiB, GB/s": (45.0, GOOD),
    "stores beside the large product, runs of 4 KiB, GB/s": (7.0, MISSED),
    "loads, runs of 4 KiB: of one contiguous copy": (None, NOTHING),
    "stores, runs of 4 KiB: of one contiguous copy": (0.66, GOOD),
    "loads, runs of 32 and 64 KiB: of one contiguous copy": (0.6, MISSED),
    "loads, runs of 256 KiB and more: of one contiguous copy": (0.95, GOOD),
    "stores, runs of 256 KiB and more: of one contiguous copy": (0.8, MISSED),
    "both ways at once, runs of less than 256 KiB: of a contiguous copy each way": (None, NOTHING),
    "both ways at once, runs of 256 KiB and more: of a contiguous copy each way": (0.85, GOOD),
    "load by layer of 1 block of 8 layers of 4 KiB, ms": (0.038, GOOD),
    "store of 1 block of 8 layers of 4 KiB, ms": (0.06, MISSED),
    "load by layer of 1,024 blocks of 8 layers of 32 KiB (268 MB), ms": (5.7, GOOD),
    # At 50 GB/s, the 32 MiB of the layer alone take 671 of the 800 us.
    "first layer of a load, more than its bytes take, us": (800.0 - 32 * 1024 * 1024 / 50e3, MISSED),
    "CPU while the link is full, by kernel, cores": (0.2, GOOD),
    "CPU while the link is full, by copy engine, cores": (1.5, MISSED),
    "CPU when idle, cores": (0.0, GOOD),
    "layout transform with digests, full grid: of a device-to-device copy": (0.9, GOOD),
    "the same, at most 8 SMs, GB/s": (90.0, MISSED),
    "staged GDS, 80 layers: calls fewer than a call a run, times": (160.0, GOOD),
    "staged GDS: of the disk's 2 MiB rate": (0.97, GOOD),
    "staged GDS, runs of at most 16 KiB: of a call a run, times": (6.0, GOOD),
}


@pytest.mark.parametrize("what", JUDGED)
def test_each_goal_is_judged_by_its_own_rows(what: str) -> None:
    found, verdict = judged(bench())[what]
    expected, right = JUDGED[what]
    assert verdict == right
    assert found == (None if expected is None else pytest.approx(expected))


def test_compatibility_mode_and_what_did_not_run_are_no_results() -> None:
    content = bench()
    for row in content["comparisons"]:
        row["note"] = row["note"] and "cuFile in compatibility mode (no GPUDirect Storage) to GPU 0"
    assert [goal.verdict for goal in goals(content)][-3:] == [NOTHING] * 3
    for kind in ("comparisons", "rows", "beside", "latency", "processor"):
        content[kind] = []
    assert {goal.verdict for goal in goals(content)} == {NOTHING}


@pytest.mark.parametrize(
    ("kind", "row", "what"),
    [
        ("rows", lane_row(MIB, "H2D", "batch", 0.1, None), "loads, runs of 256 KiB and more: of one contiguous copy"),
        ("beside", work_row("decoding step", "H2D", "batch", factor=3.0),
         "a decoding step beside copies by copy engine: of alone"),
        ("latency", latency_row("load by layer", 4096, 1, 900.0, 1.0),
         "load by layer of 1 block of 8 layers of 4 KiB, ms"),
        ("processor", processor_row("stores", "kernel", 2.0), "CPU while the link is full, by kernel, cores"),
    ],
)  # fmt: skip
def test_a_row_that_was_measured_before_memory_was_pinned_counts_for_no_goal(
    kind: str, row: dict[str, Any], what: str
) -> None:
    content = bench()
    content[kind].append({**row, "pinned": False})
    assert judged(content)[what][1] == GOOD
    content[kind][-1]["pinned"] = True
    assert judged(content)[what][1] == MISSED


def test_a_work_that_could_not_run_is_not_measured() -> None:
    content = bench()
    content["beside"] = [
        {**row, "factor": None, "note": "torch is not installed"} for row in content["beside"]
    ]
    assert judged(content)["a decoding step beside both ways at once: of alone"] == (None, NOTHING)


REPORT = """<testsuites><testsuite tests="9" failures="2" errors="1" skipped="3">
<testcase name="test_a"/><testcase name="test_b[1]"><failure message="assert 1 == 2&#10;more"/></testcase>
</testsuite></testsuites>"""


def test_the_tests_are_counted_and_the_failed_ones_named(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    assert outcomes(report) == {"passed": 3, "failed": 3, "skipped": 3}
    assert failed_tests(report) == [("test_b[1]", "assert 1 == 2")]


def test_the_closing_words_name_the_rows_that_wait() -> None:
    status = status_text()
    waiting = [
        line
        for line in status.splitlines()
        if line.startswith("| ") and "not yet run on a GPU" in line and "2 virtual cores" not in line
    ]
    assert len(waiting) > 3
    words = closing_words(Path("other.md"), status)
    assert words.startswith("other.md: put its figures into docs/gpu-results.md")
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


def gpu_results(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs `python -m benchmarks.gpu_results` with the given arguments, as a user does."""
    command = [sys.executable, "-m", "benchmarks.gpu_results", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("stage", [ALL, *STAGES])
def test_without_a_gpu_nothing_is_written(stage: str, tmp_path: Path) -> None:
    found = c_ext.cuda_info()
    if found["built"] and found["device_count"]:
        pytest.skip("there is a GPU")
    page = ROOT / "docs" / "gpu-results.md"
    before = page.read_bytes()
    done = gpu_results(stage, "--out", str(tmp_path / "out"))
    assert done.returncode == 1
    assert "nothing was run: no NVIDIA driver" in done.stderr
    assert not (tmp_path / "out").exists()
    assert page.read_bytes() == before


def test_without_results_no_page_is_written(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    done = gpu_results("render", "--out", str(tmp_path), "--page", str(page))
    assert (done.returncode, page.exists()) == (1, False)
    assert "nothing is written" in done.stderr


def program(text: str) -> tuple[str, ...]:
    return (sys.executable, "-c", text)


def write_rows(out: Path, name: str, then: str = "") -> Step:
    """Returns a step that replaces a part of the bench. The step writes the made-up rows to its file, then runs the
    code `then`."""
    path = out / f"bench-{name}.json"
    text = f"import pathlib, time; pathlib.Path({str(path)!r}).write_text({json.dumps(bench())!r}); {then}"
    return Step(name, program(text), 60.0, path.name)


def test_limits_leave_room_in_twenty_minutes() -> None:
    assert all(limit_s + ENDING_S <= 480 for limit_s in LIMITS_S.values())
    assert sum(LIMITS_S[name] + ENDING_S for name in ("build", "smoke", "bench")) <= 1200
    assert set(STAGES) == {"build", "smoke", "bench", "tests", "sanitize"}


@pytest.mark.parametrize("name", STAGES)
def test_every_step_names_files_and_tests_that_there_are(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_plan, "not_here", dict)
    stage = plan(name, Visit(tmp_path))
    assert len({step.name for step in stage.steps}) == len(stage.steps) > 0
    results = [step.result for step in stage.steps if step.result]
    assert len(set(results)) == len(results)
    for step in stage.steps:
        assert step.limit_s <= stage.limit_s
        for word in step.command:
            assert not word.startswith("tests/") or (ROOT / word).exists(), word
    assert [step.missing for step in stage.steps if step.missing] == (
        ["no --folder was given"] if name == "bench" else []
    )


@pytest.mark.parametrize(
    "chosen", [("tests/gpu/test_transfer_gpu.py", "tests/gpu/test_large_moves_gpu.py", "-k", gpu_plan.SMOKE)]
    + [("tests/gpu/test_compute_sanitizer.py", "-k", words) for words in gpu_plan.SANITIZED.values()]
)  # fmt: skip
def test_what_a_step_chooses_is_some_of_the_tests(chosen: tuple[str, ...]) -> None:
    command = [*gpu_plan.PYTEST, "--collect-only", *chosen]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:]
    assert " deselected" in done.stdout


def test_what_the_machine_lacks_is_left_out_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_machine, "gpus", lambda: 1)
    lacking = gpu_machine.not_here()
    assert lacking["a device other than 0"] == "1 GPU(s) in this machine"
    assert "SGLang on the GPU" in lacking
    assert "GPUDirect Storage, direct" in lacking
    steps = {step.name: step.missing for step in plan("tests", Visit(tmp_path)).steps}
    assert steps["SGLang"] == lacking["SGLang on the GPU"] == "sglang is not installed"
    monkeypatch.setattr(gpu_machine, "gpus", lambda: 2)
    assert "a device other than 0" not in gpu_machine.not_here()


def test_without_torch_its_tests_are_left_out_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_plan, "find_spec", lambda name: None)
    for stage, runs in (("smoke", {"info", "lanes, quick"}), ("tests", set()), ("sanitize", {"controls"})):
        steps = plan(stage, Visit(tmp_path)).steps
        assert {step.name for step in steps if not step.missing} - {"vLLM", "vLLM beside copies"} == runs
        assert any(step.missing.startswith("torch is not installed") for step in steps)


def test_the_source_is_known_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_machine, "ROOT", tmp_path)
    source = tmp_path / "csrc" / "a.cpp"
    source.parent.mkdir()
    source.write_text("1")
    first = gpu_machine.source_digest()
    (tmp_path / "csrc" / "a.so").write_text("built")
    assert gpu_machine.source_digest() == first
    source.write_text("2")
    assert gpu_machine.source_digest() != first


def test_a_driver_is_known_by_what_a_container_shows_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing, there = tmp_path / "missing", tmp_path
    for driver, control, gpus, found in (
        (missing, missing, 0, False),
        (there, missing, 0, True),
        (missing, there, 0, True),
        (missing, missing, 1, True),
    ):
        monkeypatch.setattr(gpu_machine, "DRIVER", driver)
        monkeypatch.setattr(gpu_machine, "CONTROL_DEVICE", control)
        monkeypatch.setattr(gpu_machine, "gpus", lambda count=gpus: count)
        assert (gpu_machine.driver_refusal() == "") is found


def test_a_machine_without_tools_says_what_is_unknown() -> None:
    said = gpu_machine.said(["no-such-program"])
    assert said == "unknown: no no-such-program here"
    assert gpu_machine.said([sys.executable, "-c", "import sys; sys.exit('refused')"]) == "unknown: refused"
    facts = gpu_machine.machine(0)
    assert all(facts.values())
    assert facts["torch"]


def test_a_step_that_takes_too_long_is_cut_with_all_it_started(tmp_path: Path) -> None:
    started = tmp_path / "pid"
    text = (
        "import pathlib, subprocess, sys, time; "
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
        f"pathlib.Path({str(started)!r}).write_text(str(child.pid)); print('said', flush=True); time.sleep(600)"
    )
    stage = Stage("bench", 60.0, (Step("slow", program(text), 10.0), Step("next", program("print(1)"), 30.0)))
    assert run_stage(stage, tmp_path, MACHINE) == ["cut", "passed"]
    slow, after = read_stage(tmp_path, "bench")["steps"]
    assert slow["why"] == "ended after 10 s"
    assert slow["tail"].strip() == "said"
    assert after["state"] == "passed"
    wait_for_end(int(started.read_text()))


def started_step(out: Path) -> int:
    """Waits until the second step of `two_steps` runs. Returns its process id."""
    ends_s = time.monotonic() + 60.0
    while not ((out / "pid").exists() and (out / "pid").read_text()):
        assert time.monotonic() < ends_s
        time.sleep(0.05)
    return int((out / "pid").read_text())


def wait_for_end(pid: int) -> None:
    ends_s = time.monotonic() + 30.0
    while alive(pid):
        assert time.monotonic() < ends_s
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


def test_a_stage_without_time_left_begins_nothing(tmp_path: Path) -> None:
    stage = Stage("bench", 1.0, (Step("one", program("print(1)"), 30.0),))
    assert run_stage(stage, tmp_path, MACHINE) == ["not run"]
    assert read_stage(tmp_path, "bench")["machine"] == MACHINE


def test_a_required_step_that_fails_ends_its_stage(tmp_path: Path) -> None:
    bad = Step("core", program("import sys; print('broken'); sys.exit(3)"), 30.0, required=True)
    stage = Stage("build", 60.0, (bad, Step("after", program("print(1)"), 30.0)))
    assert run_stage(stage, tmp_path, MACHINE) == ["failed", "not run"]
    first, second = read_stage(tmp_path, "build")["steps"]
    assert (first["why"], first["tail"].strip()) == ("exit 3: broken", "broken")
    assert second["why"] == "the stage ended before it"


KILLED = """
import pathlib, sys
from benchmarks.gpu_stages import run_stage
from tests.unit.benchmarks.test_gpu_results import MACHINE, two_steps
out = pathlib.Path(sys.argv[1])
run_stage(two_steps(out, "time.sleep(600)"), out, MACHINE, {"vLLM": "no wheel"})
"""


def two_steps(out: Path, second: str) -> Stage:
    """Returns a stage with two steps. The first one counts its runs. The second one records its process id, then runs
    `second`."""
    count = f"open({str(out / 'count')!r}, 'a').write('x')"
    said = (
        f"import os, pathlib, time; pathlib.Path({str(out / 'pid')!r}).write_text(str(os.getpid())); {second}"
    )
    return Stage("bench", 120.0, (write_rows(out, "lanes", count), Step("second", program(said), 90.0)))


def test_a_run_killed_in_the_middle_is_rendered_and_goes_on(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    runner = subprocess.Popen(command, cwd=ROOT)
    step = started_step(tmp_path)
    runner.send_signal(signal.SIGKILL)  # after SIGKILL, the runner can write nothing
    runner.wait(30.0)
    wait_for_end(step)

    page = render(tmp_path)
    assert "| bench | lanes | passed |" in page
    assert "| bench: second | the call was cut while it ran |" in page
    assert "| vLLM | no wheel |" in page
    assert "| stage tests | never called |" in page
    assert "| GPU | none, made up for a test |" in page
    assert "| loads, runs of 32 and 64 KiB: of one contiguous copy | >= 0.85 | 0.6 | **missed** |" in page
    assert "| decoding step | D2H | batch | 4096 |" in page
    assert page.count("| disk to pool, staged |") == 1
    assert "One contiguous copy: H2D 50.0, D2H 50.0" in page
    assert "batch 64 MiB" in page

    assert run_stage(two_steps(tmp_path, "print(2)"), tmp_path, MACHINE) == ["passed", "passed"]
    assert (tmp_path / "count").read_text() == "x", "what had a result was run again"
    assert "bench: second" not in render(tmp_path)
    run_stage(two_steps(tmp_path, "print(3)"), tmp_path, MACHINE, again=True)
    assert (tmp_path / "count").read_text() == "xx"


def test_a_terminated_run_takes_its_step_along(tmp_path: Path) -> None:
    runner = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], cwd=ROOT)
    step = started_step(tmp_path)
    runner.terminate()
    assert runner.wait(30.0) == 128 + signal.SIGTERM
    wait_for_end(step)


def test_the_page_counts_tests_and_names_those_that_failed(tmp_path: Path) -> None:
    report = f"import pathlib; pathlib.Path({str(tmp_path / 'tests-lanes.xml')!r}).write_text({REPORT!r})"
    stage = Stage("tests", 60.0, (Step("lanes", program(report), 30.0, "tests-lanes.xml"),))
    run_stage(stage, tmp_path, MACHINE)
    page = render(tmp_path)
    assert "| tests: lanes | 3 | 3 | 3 |" in page
    assert "| test_b[1] | assert 1 == 2 |" in page
    assert "not measured" in page
    assert "Not measured." in page
    assert Goal("a", 1.0, None).verdict == "not measured"


SKIPPED = """<testsuites><testsuite tests="2" failures="0" errors="0" skipped="2">
<testcase name="test_a"><skipped message="no GPU: no NVIDIA driver"/></testcase>
<testcase name="test_b"><skipped message="other"/></testcase></testsuite></testsuites>"""


def test_a_step_that_skipped_all_its_tests_is_among_what_did_not_run(tmp_path: Path) -> None:
    steps = []
    for name, content in (("lanes", SKIPPED), ("rotation", REPORT)):
        path = tmp_path / f"tests-{name}.xml"
        write = f"import pathlib; pathlib.Path({str(path)!r}).write_text({content!r})"
        steps.append(Step(name, program(write), 30.0, path.name))
    run_stage(Stage("tests", 60.0, tuple(steps)), tmp_path, MACHINE)
    page = render(tmp_path)
    assert "| tests | lanes | **all skipped** |" in page
    assert "| tests: lanes | all 2 tests were skipped: no GPU: no NVIDIA driver |" in page
    assert "| tests | rotation | passed |" in page


def test_results_of_two_machines_are_told_apart(tmp_path: Path) -> None:
    for name, number in (("build", 1), ("smoke", 1), ("bench", 2)):
        run_stage(
            Stage(name, 60.0, (Step("one", program("print(1)"), 30.0),)),
            tmp_path,
            {"GPU": f"number {number}"},
        )
    page = render(tmp_path)
    assert "Stages build, smoke:" in page
    assert "Stages bench:" in page
    assert "| GPU | number 2 |" in page


def test_the_rows_of_the_real_bench_render(tmp_path: Path) -> None:
    """The page shows the rows that the real bench measures. Without a GPU, the bench measures plain memory, and its
    rows say so."""
    if c_ext.cuda_info()["device_count"]:
        pytest.skip("there is a GPU")
    command = (
        sys.executable,
        "-m",
        "flexkv",
        "bench",
        "transfer",
        "--megabytes",
        "1",
        "--repeats",
        "1",
        "--part",
    )
    steps = tuple(
        Step(
            part, (*command, part, "--json", str(tmp_path / f"bench-{part}.json")), 60.0, f"bench-{part}.json"
        )
        for part in ("lanes", "transform")
    )
    assert run_stage(Stage("bench", 120.0, steps), tmp_path, MACHINE) == ["passed", "passed"]
    out = tmp_path / "page.md"
    done = gpu_results("render", "--out", str(tmp_path), "--page", str(out))
    assert done.returncode == 0, done.stderr
    assert "| layout transform |" in out.read_text()
    assert "| 4096 | H2D | cpu | 0 |" in out.read_text()
    assert out.with_suffix(".png").exists() or "no picture: " in done.stdout
