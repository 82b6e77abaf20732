"""The environment selects the variant of the build: with CUDA or without."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from build_support.cuda_toolkit import CudaToolkit, select_toolkit
from build_support.ninja_file import NinjaFile, Variant


@pytest.fixture
def no_nvcc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Simulates a machine that has no nvcc in any of its usual places."""
    monkeypatch.setattr("build_support.cuda_toolkit.find_nvcc", lambda: None)


@pytest.fixture
def broken_nvcc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho no licence >&2\nexit 3\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("FLEXKV_NVCC", os.fspath(nvcc))
    return nvcc


def test_without_nvcc_auto_builds_without_cuda(no_nvcc: None) -> None:
    assert select_toolkit("auto") is None
    with pytest.raises(RuntimeError, match="FLEXKV_CUDA=1, but no nvcc in"):
        select_toolkit("1")


def test_an_nvcc_that_does_not_work_is_named(broken_nvcc: Path) -> None:
    assert select_toolkit("auto") is None
    with pytest.raises(RuntimeError, match=rf"FLEXKV_CUDA=1, but {broken_nvcc}"):
        select_toolkit("1")


def test_cuda_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("build_support.cuda_toolkit.find_nvcc", lambda: pytest.fail("nvcc was looked for"))
    assert select_toolkit("0") is None


@pytest.mark.parametrize("mode", ["", "yes", "2"])
def test_another_word_for_cuda_is_refused(mode: str) -> None:
    with pytest.raises(ValueError, match=f"FLEXKV_CUDA='{mode}': allowed are 'auto', '1' and '0'"):
        select_toolkit(mode)


@pytest.mark.parametrize(
    ("sanitizer", "name", "folder"),
    [
        ("", "cpu", "usual"),
        ("address", "cpu-address", "address"),
        ("thread", "cpu-thread", "thread"),
        ("undefined", "cpu-undefined", "undefined"),
    ],
)
def test_each_sanitizer_has_a_folder_of_its_own(
    sanitizer: str, name: str, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEXKV_CUDA", "0")
    monkeypatch.setenv("FLEXKV_SANITIZE", sanitizer)
    variant = Variant.from_environment()
    assert (variant.name, variant.folder.name) == (name, folder)


TOOLKIT = CudaToolkit("/cuda/bin/nvcc", "/cuda", (13, 0))


@pytest.mark.parametrize(
    ("asked", "in_place", "gpu", "built"),
    [
        (None, True, False, False),
        (None, True, True, True),
        (None, False, False, True),
        ("auto", True, False, True),
        ("1", True, False, True),
        ("0", True, True, False),
    ],
)
def test_in_place_cuda_is_left_out_without_a_gpu_unless_asked_for(
    asked: str | None,
    in_place: bool,
    gpu: bool,
    built: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("FLEXKV_CUDA", raising=False)
    monkeypatch.delenv("FLEXKV_SANITIZE", raising=False)
    if asked is not None:
        monkeypatch.setenv("FLEXKV_CUDA", asked)
    for module in ("ninja_file", "cuda_toolkit"):
        monkeypatch.setattr(f"build_support.{module}.find_nvcc", lambda: TOOLKIT.nvcc)
    monkeypatch.setattr("build_support.cuda_toolkit.probe", lambda nvcc: TOOLKIT)
    monkeypatch.setattr("build_support.ninja_file.has_gpu", lambda: gpu)
    variant = Variant.from_environment(in_place)
    assert variant.toolkit == (TOOLKIT if built else None)
    left_out = "FLEXKV_CUDA=1 compiles them" in capsys.readouterr().out
    assert left_out is (asked is None and not built)


def test_with_and_without_cuda_share_all_objects_but_those_that_differ() -> None:
    def targets(toolkit: CudaToolkit | None) -> dict[str, str]:
        ninja = NinjaFile(Variant(toolkit, ""))
        ninja.add_extension("c_ext.so")
        text = "\n".join(ninja.lines)
        builds = re.findall(r"^build (\S+): cxx (.*(?:\n  more.*)?)", text, re.M)
        return dict(builds)

    without, with_cuda = targets(None), targets(TOOLKIT)
    shared = set(without) & set(with_cuda)
    assert len(shared) > 80
    assert all(without[name] == with_cuda[name] for name in shared)
    own = {name for name in without if name not in with_cuda}
    assert {name.removeprefix("cpu/") for name in own if not name.endswith("_stub.cpp.o")} == {
        "csrc.cuda.device_info.cpp.o",
        "csrc.bindings.module.cpp.o",
    }


def test_another_sanitizer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXKV_SANITIZE", "memory")
    with pytest.raises(ValueError, match="FLEXKV_SANITIZE='memory': allowed are"):
        Variant.from_environment()
