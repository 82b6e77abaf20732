"""Lists the steps of each stage of a visit to a GPU, with their time limits. A visit is a limited time on a machine
with a GPU.

The stages build, smoke and bench together take at most 20 minutes, so that one visit gives the figures; tests and
sanitize need another visit. `all` runs every stage within ten minutes, with fewer and smaller measurements. If the
machine cannot run a step, the step is left out and the reason is recorded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from benchmarks.gpu_machine import not_here
from benchmarks.gpu_stages import Stage, Step
from benchmarks.gpu_vllm_page import RESULT as VLLM_RESULT

LIMITS_S = {"build": 440.0, "smoke": 240.0, "bench": 460.0, "tests": 460.0, "sanitize": 460.0}
"""Limit of each stage in seconds, from the start of the program. Together with `ENDING_S`, each stage ends within eight
minutes, and the first three end within twenty minutes in total.
"""
STAGES = tuple(LIMITS_S)
ALL = "all"
"""Name of the command that runs every stage in one call."""
ALL_LIMIT_S = 570.0
"""Seconds from the start of the program until `all` must end: below ten minutes."""
ALL_SHARES = {"build": 4.0, "smoke": 1.0, "bench": 3.0, "tests": 6.0, "sanitize": 1.5}
"""Weights of the stages of `all`. The stages that have not run yet share the remaining time in proportion to their
weights. Time that a stage does not use goes to later stages.
"""
NEED_A_CORE = STAGES[1:]
"""Stages that need the native core that `build` makes."""

LENIENT = ("-o", "addopts=-ra --import-mode=importlib")
"""Options with which pytest accepts the marks of pytest-timeout even if that plugin is not installed. The plugin is not
needed, because each step has its own time limit.
"""
PYTEST = (sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *LENIENT)
TEST_FILES = {
    "lanes": ("test_transfer_gpu.py", 240.0),
    "large moves": ("test_large_moves_gpu.py", 120.0),
    "staged transfers": ("test_gds_gpu.py", 180.0),
    "disk lane": ("test_gds_lane_gpu.py", 120.0),
    "rotation": ("test_rotation_gpu.py", 60.0),
    "layerwise": ("test_layerwise_gpu.py", 60.0),
}
"""For each step: its file in tests/gpu, and its limit in seconds."""
ENGINES = {
    "vLLM": ("vLLM on the GPU", "test_vllm_gpu.py"),
    "SGLang": ("SGLang on the GPU", "test_sglang_gpu.py"),
    "TensorRT-LLM": ("TensorRT-LLM on the GPU", "test_tensorrt_llm.py"),
}
CARRIED = "the core that is here was built with CUDA"
TORCH_MISSING = "torch is not installed: the tests hold pools in its tensors"
SMOKE = "(every_byte and 4096 and not 80) or capture or digests or measured"
"""pytest's `-k` expression for the tests that `smoke` runs within a minute: a few tests of every copy path."""
SANITIZED = {
    "memcheck lanes": "memcheck and test_transfer_gpu",
    "memcheck staged transfers": "memcheck and test_gds_gpu",
    "memcheck disk lane": "memcheck and test_gds_lane_gpu",
    "memcheck rotation": "memcheck and test_rotation_gpu",
    "initcheck lanes": "initcheck and test_transfer_gpu",
    "controls": "would_have_spoken",
}


@dataclass(frozen=True, slots=True)
class Visit:
    """The facts on which a plan depends.

    Attributes:
        out: folder of results.
        folder: a folder on the disk to measure; None if no disk is measured.
        carried: whether the native core that already exists was built with CUDA, so that it need not be rebuilt.
        quick: whether measurements are smaller (at most 256 MB) and repeated at most three times, so that all stages
            fit into one call.
        prepare: MODULE:FUNCTION that each engine of `vllm_beside_gpu` calls before it imports vLLM; empty if there is
            none.
    """

    out: Path
    device: int = 0
    folder: Path | None = None
    carried: bool = False
    quick: bool = False
    prepare: str = ""


def plan(name: str, visit: Visit) -> Stage:
    """Makes the stage `name` for this visit."""
    makers: dict[str, Callable[[], list[Step]]] = {
        "build": lambda: _build(CARRIED if visit.carried else ""),
        "smoke": lambda: _smoke(visit),
        "bench": lambda: _bench(visit),
        "tests": lambda: _tests(visit),
        "sanitize": lambda: _sanitize(visit.out),
    }
    stage = Stage(name, LIMITS_S[name], tuple(makers[name]()))
    return quick(stage) if visit.quick else stage


QUICK_S = {
    "latency": 20.0,
    "beside": 50.0,
    "lanes": 50.0,
    "ways": 40.0,
    "transform": 15.0,
    "torch": 20.0,
    "small": 20.0,
    "events": 15.0,
    "large moves": 35.0,
    "staged transfers": 40.0,
    "disk lane": 40.0,
    "rotation": 25.0,
    "layerwise": 20.0,
    "vLLM beside copies": 180.0,
}
"""Limits of the steps of `all` in seconds: about twice the time that each step took on an H100 machine with 16 CPUs.
The limits are tight, because a stage divides its time in proportion to its steps' limits. They are not tighter, because
a step that exceeds its limit is ended and has no result.
"""
TWO_MINUTES = "takes minutes: `tests` has it, in a call of its own"
NO_TESTING = "tests/testing_ext is not built (make build-test): the test's disks are made with it"


def quick(stage: Stage) -> Stage:
    """Returns the stage with the steps' limits lowered to those of `QUICK_S`, for `all`."""
    limits = QUICK_S | ({"lanes": 70.0} if stage.name == "tests" else {})
    return replace(
        stage,
        steps=tuple(
            replace(step, limit_s=min(step.limit_s, limits.get(step.name, step.limit_s)))
            for step in stage.steps
        ),
    )


def all_deadlines_s(names: Sequence[str], name: str, now_s: float, ends_s: float) -> float:
    """Returns when stage `name` of `all` must end, by the same clock as `now_s` and `ends_s`.

    Args:
        names: the stages that have not run yet; `name` is the first of them.
        ends_s: when all stages must have ended.
    """
    whole = sum(ALL_SHARES[left] for left in names)
    return now_s + (ends_s - now_s) * ALL_SHARES[name] / whole


def _build(carried: str) -> list[Step]:
    needed = "pybind11, setuptools, numpy, pydantic, yaml, click, rich, pytest, torch"
    asked = (
        "import importlib.util as u, sys; "
        f"lacking = [name for name in {needed.split(', ')!r} if u.find_spec(name) is None]; "
        "print('not installed:', *lacking or ['nothing']); sys.exit(bool(lacking))"
    )
    return [
        Step("packages", (sys.executable, "-c", asked), 30.0),
        Step(
            "core",
            (sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"),
            LIMITS_S["build"],
            missing=carried,
            required=True,
            # 90 is Hopper (H100, H200). A build for all architectures takes three times as long as a build for one.
            environ={"FLEXKV_CUDA": "1", "FLEXKV_CUDA_ARCHS": "90"},
        ),
    ]


def _smoke(visit: Visit) -> list[Step]:
    out = visit.out
    info = (sys.executable, "-m", "flexkv", "info")
    quick = _bench_command(visit, "smoke-lanes.json", 64, 3, "--part", "lanes")
    files = ("tests/gpu/test_transfer_gpu.py", "tests/gpu/test_large_moves_gpu.py")
    without = TORCH_MISSING if find_spec("torch") is None else ""
    return [
        Step("info", info, 60.0),
        _pytest(out, "smoke", "a few tests", 120.0, (*files, "-k", SMOKE), without),
        Step("lanes, quick", quick, 60.0, "smoke-lanes.json"),
    ]


def _bench(visit: Visit) -> list[Step]:
    def part(name: str, megabytes: int, repeats: int, limit_s: float, *more: str, missing: str = "") -> Step:
        result = f"bench-{name}.json"
        if visit.quick:
            megabytes, repeats = min(megabytes, 256), min(repeats, 3)
        command = _bench_command(visit, result, megabytes, repeats, "--part", name, *more)
        return Step(name, command, limit_s, result, missing)

    disk = () if visit.folder is None else ("--folder", str(visit.folder))
    ways = _bench_command(visit, "bench-ways.json", 256, 3, "--save", str(visit.out / "ways.json"))
    return [
        part("latency", 512, 9, 60.0),
        part("beside", 512, 5, 90.0, "--seconds", "24" if visit.quick else "40"),
        part("lanes", 1024, 15, 200.0),
        Step("ways", ways, 60.0, "bench-ways.json"),
        part("transform", 1024, 15, 90.0),
        part("torch", 1024, 9, 90.0),
        part("small", 1024, 15, 60.0),
        part("events", 1024, 15, 60.0),
        part("disk", 512, 9, 150.0, *disk, missing="" if disk else "no --folder was given"),
    ]


def _bench_command(visit: Visit, result: str, megabytes: int, repeats: int, *more: str) -> tuple[str, ...]:
    options = ("--device", str(visit.device), "--megabytes", str(megabytes), "--repeats", str(repeats))
    bench = (sys.executable, "-m", "flexkv", "bench", "transfer")
    return (*bench, *options, *more, "--json", str(visit.out / result))


def _tests(visit: Visit) -> list[Step]:
    out = visit.out
    without = TORCH_MISSING if find_spec("torch") is None else ""
    steps = [
        _pytest(out, "tests", name, limit_s, (f"tests/gpu/{file}",), without or _lacks_testing(name))
        for name, (file, limit_s) in TEST_FILES.items()
    ]
    lacking = not_here()
    engines = [
        _pytest(
            out,
            "tests",
            name,
            240.0,
            (f"tests/gpu/{file}",),
            missing=lacking.get(needed, "") or (TWO_MINUTES if visit.quick else ""),
        )
        for name, (needed, file) in ENGINES.items()
    ]
    options: tuple[str, ...] = ("--seconds", "18") if visit.quick else ()
    options += ("--prepare", visit.prepare) if visit.prepare else ()
    beside = (sys.executable, "-m", "benchmarks.vllm_beside_gpu", "--json", str(out / VLLM_RESULT))
    measured = Step(
        "vLLM beside copies", (*beside, *options), 180.0, VLLM_RESULT, lacking.get("vLLM on the GPU", "")
    )
    # The measurement comes before the engines' tests, because one call may not have enough time for these tests.
    return [*steps, measured, *engines]


def _sanitize(out: Path) -> list[Step]:
    file = "tests/gpu/test_compute_sanitizer.py"
    without = TORCH_MISSING if find_spec("torch") is None else ""
    return [
        _pytest(
            out,
            "sanitize",
            name,
            240.0,
            (file, "-k", chosen),
            "" if name == "controls" else without or _lacks_testing(name),
        )
        for name, chosen in SANITIZED.items()
    ]


def _lacks_testing(step: str) -> str:
    """If the step needs the tests' own extension and the extension is missing, returns why the step cannot run.
    Otherwise returns an empty text.
    """
    needed = "disk lane" in step
    return NO_TESTING if needed and find_spec("tests.testing_ext") is None else ""


def _pytest(
    out: Path, stage: str, name: str, limit_s: float, chosen: tuple[str, ...], missing: str = ""
) -> Step:
    result = f"{stage}-{name.replace(' ', '-')}.xml"
    return Step(name, (*PYTEST, f"--junitxml={out / result}", *chosen), limit_s, result, missing)
