"""A single call runs all GPU measurements. The time limits of its stages add up to less than ten minutes. If a
native core was carried to the machine, the call does not build another one.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from benchmarks import gpu_plan, gpu_results
from benchmarks.gpu_plan import ALL_LIMIT_S, ALL_SHARES, STAGES, Visit, all_deadlines_s, plan
from benchmarks.gpu_results import run_all
from benchmarks.gpu_stages import ENDING_S, SHORTEST_S, Stage, Step, fair_limit_s, read_stage, run_stage
from tests.unit.benchmarks.test_gpu_results import MACHINE, program


def test_every_stage_has_a_share_and_the_whole_fits_ten_minutes() -> None:
    assert set(ALL_SHARES) == set(STAGES)
    assert ALL_LIMIT_S < 600
    now_s, ends_s = 0.0, ALL_LIMIT_S - ENDING_S
    for number, name in enumerate(STAGES):  # the test assumes that each stage takes all of its time
        now_s = all_deadlines_s(STAGES[number:], name, now_s, ends_s)
        assert now_s <= ends_s + 1e-6
    assert now_s == pytest.approx(ends_s)


def test_what_a_stage_does_not_use_is_for_the_others() -> None:
    after_a_long_build = all_deadlines_s(STAGES[1:], "smoke", 200.0, 570.0) - 200.0
    after_none = all_deadlines_s(STAGES[1:], "smoke", 0.0, 570.0)
    assert after_none > 1.5 * after_a_long_build


def test_steps_share_the_time_that_is_left() -> None:
    assert fair_limit_s(1000.0, [60.0, 240.0]) == 60.0, "there is time for all"
    assert fair_limit_s(100.0, [60.0, 240.0]) == 20.0
    assert fair_limit_s(80.0, [240.0]) == 80.0
    assert fair_limit_s(20.0, [60.0, 6000.0]) == SHORTEST_S


def test_a_slow_step_leaves_time_for_those_behind_it(tmp_path: Path) -> None:
    slow = Step("slow", program("import time; time.sleep(600)"), 300.0)
    stage = Stage("bench", 20.0, (slow, Step("next", program("print(1)"), 300.0)))
    began_s = time.monotonic()
    assert run_stage(stage, tmp_path, MACHINE) == ["cut", "passed"]
    assert time.monotonic() - began_s < 20.0 + ENDING_S


def test_a_carried_core_is_not_built(tmp_path: Path) -> None:
    steps = {step.name: step.missing for step in plan("build", Visit(tmp_path, carried=True)).steps}
    assert steps == {"packages": "", "core": gpu_plan.CARRIED}
    assert not any(step.missing for step in plan("build", Visit(tmp_path)).steps)


@pytest.fixture
def small_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces each stage by a stage with a single step, which prints the stage's name. If a core was carried to the
    machine, the step of the build stage does not run."""

    def small(name: str, visit: Visit) -> Stage:
        missing = gpu_plan.CARRIED if name == "build" and visit.carried else ""
        return Stage(
            name, 1.0, (Step("one", (sys.executable, "-c", f"print({name!r})"), 60.0, missing=missing),)
        )

    monkeypatch.setattr(gpu_results, "plan", small)
    monkeypatch.setattr(gpu_results, "machine", lambda device: MACHINE)
    monkeypatch.setattr(gpu_results, "not_here", dict)


@pytest.mark.usefixtures("small_stages")
def test_one_call_runs_every_stage(tmp_path: Path) -> None:
    states = run_all(Visit(tmp_path), False, time.monotonic() + 300.0, "")
    assert states == ["not run", "passed", "passed", "passed", "passed"]
    for name in STAGES[1:]:
        (step,) = read_stage(tmp_path, name)["steps"]
        assert step["tail"].strip() == name


@pytest.mark.usefixtures("small_stages")
def test_a_core_without_cuda_is_built_and_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_results, "refusal", lambda: "")
    states = run_all(Visit(tmp_path), False, time.monotonic() + 300.0, "built without CUDA")
    assert states == ["passed"] * 5
    monkeypatch.setattr(gpu_results, "refusal", lambda: "still without CUDA")
    again = run_all(Visit(tmp_path / "other"), False, time.monotonic() + 300.0, "built without CUDA")
    assert again == ["passed", "failed"]
    assert not (tmp_path / "other" / "smoke.json").exists()


def test_one_call_measures_less(tmp_path: Path) -> None:
    """The bench measures less if it runs in one call with all other stages. It has the same steps and results as when
    it runs alone, but no number of its options is larger."""
    whole, quick = (plan("bench", Visit(tmp_path, quick=quick)).steps for quick in (False, True))
    assert [step.result for step in whole] == [step.result for step in quick]
    beside = next(step for step in quick if step.name == "beside")
    assert beside.command[beside.command.index("--seconds") + 1] == "24"
    for more, less in zip(whole, quick, strict=True):
        for option in ("--megabytes", "--repeats"):
            first, second = (int(step.command[step.command.index(option) + 1]) for step in (more, less))
            assert second <= min(first, 256)


def test_engines_are_prepared_as_asked(tmp_path: Path) -> None:
    def command(prepare: str) -> tuple[str, ...]:
        steps = plan("tests", Visit(tmp_path, prepare=prepare)).steps
        return next(step.command for step in steps if step.name == "vLLM beside copies")

    assert command("my.module:prepare")[-2:] == ("--prepare", "my.module:prepare")
    assert "--prepare" not in command("")
