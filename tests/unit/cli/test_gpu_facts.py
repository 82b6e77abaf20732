"""Tests `flexkv info` with the extra `gpu`, without it, and with a driver that returns errors. The driver is a
stand-in.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import types
from enum import IntEnum
from pathlib import Path
from typing import Any

import pytest

from flexkv import c_ext
from flexkv.cli import gpu_facts
from flexkv.cli.driver_calls import DriverRefused
from flexkv.cli.gpu_facts import devices, words
from flexkv.cli.info_command import gds_pool_words
from flexkv.cli.info_facts import collect, gds_pool_facts
from flexkv.config import load_config

ROOT = Path(__file__).resolve().parents[3]


class Result(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_NO_DEVICE = 100


class Attribute(IntEnum):
    """Attributes of the stand-in's bindings. They lack `numa_node`, as old bindings do, and the driver returns an error
    for MAX_PITCH.
    """

    CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76
    CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT = 40
    CU_DEVICE_ATTRIBUTE_MAX_PITCH = 11
    CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM = 91


class StandIn:
    """Replaces `cuda.bindings.driver`, whose calls all return a tuple that begins with an error code."""

    CUdevice_attribute = Attribute

    def __init__(self, init: Result = Result.CUDA_SUCCESS) -> None:
        self.init = init

    def cuInit(self, flags: int) -> tuple[Result]:
        return (self.init,)

    def cuDeviceGetCount(self) -> tuple[Result, int]:
        return Result.CUDA_SUCCESS, 1

    def cuDeviceGet(self, number: int) -> tuple[Result, int]:
        return Result.CUDA_SUCCESS, number

    def cuDeviceGetName(self, size: int, device: int) -> tuple[Result, bytes]:
        return Result.CUDA_SUCCESS, b"A stand-in".ljust(size, b"\0")

    def cuDeviceTotalMem(self, device: int) -> tuple[Result, int]:
        return Result.CUDA_SUCCESS, 8 << 30

    def cuDeviceGetPCIBusId(self, size: int, device: int) -> tuple[Result, bytes]:
        return Result.CUDA_SUCCESS, b"0000:0A:00.0\0"

    def cuDeviceGetAttribute(self, attribute: Attribute, device: int) -> tuple[Result, int]:
        if attribute is Attribute.CU_DEVICE_ATTRIBUTE_MAX_PITCH:
            return Result.CUDA_ERROR_INVALID_VALUE, 0
        return Result.CUDA_SUCCESS, int(attribute)


def give(monkeypatch: pytest.MonkeyPatch, driver: Any) -> None:
    """Makes `import cuda.bindings.driver` return the stand-in `driver`."""
    bindings = types.ModuleType("cuda.bindings")
    bindings.driver = driver  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda", types.ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    monkeypatch.setattr(gpu_facts, "_version", lambda package: "13.0.0")


def test_a_device_has_its_attributes_and_unknown_ones_are_null(monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, StandIn())
    facts = gpu_facts.gpu_facts()
    assert facts["reason"] == ""
    (device,) = facts["devices"]
    assert device == {
        "name": "A stand-in",
        "bytes": 8 << 30,
        "pci": "0000:0A:00.0",
        "bar_bytes": 0,
        "multiprocessors": 16,
        "compute_major": 75,
        "compute_minor": 76,
        "copy_engines": 40,
        "max_pitch_bytes": None,
        "host_pointer_is_device_pointer": 91,
        "numa_node": None,
    }
    assert "A stand-in, 8.0 GiB, compute 75.76, 16 multiprocessors" in words(device)
    assert "compute ?.76" in words(device | {"compute_major": None})


WINDOWS = """0x00000000fa000000 0x00000000faffffff 0x0000000000040200
0x0000000000000000 0x0000000000000000 0x0000000000000000
0x0000206000000000 0x0000206{last} 0x000000000014220c
"""


@pytest.mark.parametrize(
    ("last", "size", "said"),
    [
        ("00fffffff", 256 << 20, "gpu 0: a pool larger than its BAR1 of 256.0 MiB passes through staging"),
        ("3ffffffff", 16 << 30, "gpu 0: its BAR1 reaches all of its memory"),
    ],
)
def test_info_says_which_pools_are_too_large_for_a_gpus_bar1(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, last: str, size: int, said: str
) -> None:
    (tmp_path / "0000:0a:00.0").mkdir()
    (tmp_path / "0000:0a:00.0" / "resource").write_text(WINDOWS.replace("{last}", last))
    read = gpu_facts.bar_bytes
    assert read("0000:0A:00.0", tmp_path) == size
    monkeypatch.setattr(gpu_facts, "bar_bytes", lambda pci: read(pci, tmp_path))
    give(monkeypatch, StandIn())
    config = load_config({"host.bytes": "64MiB"}, {})
    pool = collect(config, None)["gds_pool"]
    assert pool["register_pool"] == "auto"
    assert pool["limits"] == [{"gpu": 0, "memory_bytes": 8 << 30, "most_bytes": min(size, 8 << 30)}]
    assert gds_pool_words(pool) == f"gds.register_pool auto; {said}"
    assert gds_pool_words(pool | {"register_pool": "off"}).endswith("gds.register_pool is off")
    unknown = gds_pool_facts(config, [{"bytes": 8 << 30, "bar_bytes": 0}])
    assert "its BAR1 is not known" in gds_pool_words(unknown)


def test_what_the_driver_refuses_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = StandIn(Result.CUDA_ERROR_NO_DEVICE)
    with pytest.raises(DriverRefused, match=r"cuInit: .*NO_DEVICE"):
        devices(refused)
    give(monkeypatch, refused)
    facts = gpu_facts.gpu_facts()
    assert facts["devices"] == []
    assert "cuInit" in facts["reason"]


def test_without_a_driver_the_reason_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the driver is missing, `flexkv info` shows a short reason. The bindings' own error lists every path that they
    have searched, which is too long.
    """

    class Silent:
        def cuInit(self, flags: int) -> None:
            raise RuntimeError("libcuda.so.1: a long story")

    give(monkeypatch, Silent())
    for driver, said in ((0, "no NVIDIA driver"), (13000, "libcuda.so.1: a long story")):
        monkeypatch.setattr(c_ext, "cuda_info", lambda driver=driver: {"driver": driver})
        assert gpu_facts.gpu_facts()["reason"] == said


def test_info_names_a_profiler_library_that_the_start_would_refuse() -> None:
    config = load_config({"observe.nvtx": "/no/such.so", "host.bytes": "64MiB"}, {})
    (problem,) = collect(config, None)["problems"]
    assert problem.startswith("observe.nvtx=/no/such.so: ")
    assert "allowed are off, on, and the path of NVTX's library" in problem
    assert collect(load_config({"host.bytes": "64MiB"}, {}), None)["problems"] == []


def test_without_the_extra_info_says_what_is_missing_and_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    facts = gpu_facts.gpu_facts()
    assert facts["packages"] == {"cuda-bindings": None, "cuda-pathfinder": None}
    assert facts["reason"].startswith(
        "cuda-bindings and cuda-pathfinder not installed: pip install cuda-bindings"
    )


LOADED = """
import sys, flexkv, flexkv.adapters.tensorrt_llm, flexkv.transfer.engine, flexkv.cli.main, flexkv.cli.info_command
{more}
print(sorted(name for name in sys.modules if name.split('.')[0] in ('cuda', 'nvtx')))
"""


@pytest.mark.parametrize(
    ("more", "loads"), [("", False), ("import cuda.pathfinder", True)], ids=["flexkv", "control"]
)
def test_flexkv_loads_nothing_of_the_extra(more: str, loads: bool) -> None:
    if loads:
        pytest.importorskip("cuda.pathfinder", reason="the extra flexkv[gpu] is not installed")
    done = subprocess.run(
        [sys.executable, "-c", LOADED.format(more=more)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert ("cuda" in done.stdout) is loads, done.stdout


def test_the_real_bindings_answer_here_too() -> None:
    """With the real bindings, `flexkv info` shows either devices or a reason why there are none."""
    pytest.importorskip("cuda.bindings.driver", reason="the extra flexkv[gpu] is not installed")
    facts = gpu_facts.gpu_facts()
    assert all(facts["packages"].values())
    assert bool(facts["devices"]) is not bool(facts["reason"])
