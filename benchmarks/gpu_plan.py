"""The steps of each stage of a visit to a GPU, with their time limits.

build, smoke and bench take 20 minutes together at most, so that one visit gives the figures; tests and sanitize are for
another. `all` has parts of every stage within ten minutes. A step that lacks something says so and is left out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from benchmarks.gpu_machine import not_here
from benchmarks.gpu_stages import Stage, Step
from benchmarks.gpu_vllm_page import RESULT as VLLM_RESULT

LIMITS_S = {"build": 440.0, "smoke": 240.0, "bench": 460.0, "tests": 460.0, "sanitize": 460.0}
"""Seconds from the call on. With `ENDING_S` each ends within eight minutes, the first three within twenty together."""
STAGES = tuple(LIMITS_S)
ALL = "all"
"""Every stage in one call."""
ALL_LIMIT_S = 570.0
"""Seconds for `all`, from the call on: below ten minutes."""
ALL_SHARES = {"build": 4.0, "smoke": 1.0, "bench": 3.5, "tests": 3.0, "sanitize": 2.0}
"""How the stages that are left share the time that is left; time that one does not use goes to the others."""
NEED_A_CORE = STAGES[1:]
"""Stages that run the native core which `build` has made."""

LENIENT = ("-o", "addopts=-ra --import-mode=importlib")
"""Options of pytest: marks of a plugin that is not installed (pytest-timeout) are allowed. Steps have limits anyway."""
PYTEST = (sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *LENIENT)
TEST_FILES = {
    "lanes": ("test_transfer_gpu.py", 240.0),
    "large moves": ("test_large_moves_gpu.py", 120.0),
    "staged transfers": ("test_gds_gpu.py", 180.0),
    "disk lane": ("test_gds_lane_gpu.py", 120.0),
    "rotation": ("test_rotation_gpu.py", 60.0),
    "layerwise": ("test_layerwise_gpu.py", 60.0),
}
"""Step -> its file in tests/gpu, and its limit in seconds."""
ENGINES = {
    "vLLM": ("vLLM on the GPU", "test_vllm_gpu.py"),
    "SGLang": ("SGLang on the GPU", "test_sglang_gpu.py"),
    "TensorRT-LLM": ("TensorRT-LLM on the GPU", "test_tensorrt_llm.py"),
}
CARRIED = "the core that is here was built with CUDA"
TORCH_MISSING = "torch is not installed: the tests hold pools in its tensors"
SMOKE = "(every_byte and 4096 and not 80) or capture or digests or measured"
"""Tests of the lanes that run within a minute: a few of every path."""
SANITIZED = {
    "memcheck lanes": "memcheck and test_transfer_gpu",
    "memcheck staged transfers": "memcheck and test_gds_gpu",
    "memcheck disk lane": "memcheck and test_gds_lane_gpu",
    "memcheck rotation": "memcheck and test_rotation_gpu",
    "initcheck lanes": "initcheck and test_transfer_gpu",
    "controls": "would_have_spoken",
}


def plan(name: str, out: Path, device: int, folder: Path | None, carried: bool = False) -> Stage:
    """The stage `name`.

    Args:
        out: the folder of results.
        folder: lies on the disk to measure; None leaves disks out.
        carried: the core that is here was built with CUDA, and is not rebuilt.
    """
    makers: dict[str, Callable[[], list[Step]]] = {
        "build": lambda: _build(CARRIED if carried else ""),
        "smoke": lambda: _smoke(out, device),
        "bench": lambda: _bench(out, device, folder),
        "tests": lambda: _tests(out),
        "sanitize": lambda: _sanitize(out),
    }
    return Stage(name, LIMITS_S[name], tuple(makers[name]()))


def all_deadlines_s(names: Sequence[str], name: str, now_s: float, ends_s: float) -> float:
    """The latest end of stage `name` of `all`, by the same clock as `now_s` and `ends_s`.

    Args:
        names: stages that have not run yet, `name` the first of them.
        ends_s: latest end of all stages.
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
            # For current GPUs of data centres; a build for every architecture takes three times as long.
            environ={"FLEXKV_CUDA": "1", "FLEXKV_CUDA_ARCHS": "90"},
        ),
    ]


def _smoke(out: Path, device: int) -> list[Step]:
    info = (sys.executable, "-m", "flexkv", "info")
    quick = _bench_command(out, "smoke-lanes.json", device, 256, 5, "lanes")
    files = ("tests/gpu/test_transfer_gpu.py", "tests/gpu/test_large_moves_gpu.py")
    without = TORCH_MISSING if find_spec("torch") is None else ""
    return [
        Step("info", info, 60.0),
        _pytest(out, "smoke", "a few tests", 120.0, (*files, "-k", SMOKE), without),
        Step("lanes, quick", quick, 60.0, "smoke-lanes.json"),
    ]


def _bench(out: Path, device: int, folder: Path | None) -> list[Step]:
    def part(name: str, megabytes: int, repeats: int, limit_s: float, *more: str, missing: str = "") -> Step:
        result = f"bench-{name}.json"
        command = _bench_command(out, result, device, megabytes, repeats, name)
        return Step(name, (*command, *more), limit_s, result, missing)

    disk = () if folder is None else ("--folder", str(folder))
    return [
        part("latency", 512, 9, 60.0),
        part("beside", 512, 5, 90.0),
        part("lanes", 1024, 15, 200.0),
        part("small", 1024, 15, 60.0),
        part("transform", 1024, 15, 90.0),
        part("torch", 1024, 9, 90.0),
        part("events", 1024, 15, 60.0),
        part("disk", 512, 9, 150.0, *disk, missing="" if disk else "no --folder was given"),
    ]


def _bench_command(
    out: Path, result: str, device: int, megabytes: int, repeats: int, part: str
) -> tuple[str, ...]:
    options = ("--device", str(device), "--megabytes", str(megabytes), "--repeats", str(repeats))
    bench = (sys.executable, "-m", "flexkv", "bench", "transfer")
    return (*bench, *options, "--part", part, "--json", str(out / result))


def _tests(out: Path) -> list[Step]:
    without = TORCH_MISSING if find_spec("torch") is None else ""
    steps = [
        _pytest(out, "tests", name, limit_s, (f"tests/gpu/{file}",), without)
        for name, (file, limit_s) in TEST_FILES.items()
    ]
    lacking = not_here()
    for name, (needed, file) in ENGINES.items():
        steps.append(
            _pytest(out, "tests", name, 240.0, (f"tests/gpu/{file}",), missing=lacking.get(needed, ""))
        )
    beside = (sys.executable, "-m", "benchmarks.vllm_beside_gpu", "--json", str(out / VLLM_RESULT))
    steps.append(Step("vLLM beside copies", beside, 180.0, VLLM_RESULT, lacking.get("vLLM on the GPU", "")))
    return steps


def _sanitize(out: Path) -> list[Step]:
    file = "tests/gpu/test_compute_sanitizer.py"
    without = TORCH_MISSING if find_spec("torch") is None else ""
    return [
        _pytest(out, "sanitize", name, 240.0, (file, "-k", chosen), "" if name == "controls" else without)
        for name, chosen in SANITIZED.items()
    ]


def _pytest(
    out: Path, stage: str, name: str, limit_s: float, chosen: tuple[str, ...], missing: str = ""
) -> Step:
    result = f"{stage}-{name.replace(' ', '-')}.xml"
    return Step(name, (*PYTEST, f"--junitxml={out / result}", *chosen), limit_s, result, missing)
