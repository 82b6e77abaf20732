"""Which variant of the build the environment asks for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from build_support.cuda_toolkit import select_toolkit
from build_support.ninja_file import Variant


@pytest.fixture
def no_nvcc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine that has no nvcc in any usual place."""
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
    ("sanitizer", "name"),
    [("", "cpu"), ("address", "cpu-address"), ("thread", "cpu-thread"), ("undefined", "cpu-undefined")],
)
def test_each_sanitizer_is_a_variant_of_its_own(
    sanitizer: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEXKV_CUDA", "0")
    monkeypatch.setenv("FLEXKV_SANITIZE", sanitizer)
    variant = Variant.from_environment()
    assert (variant.name, variant.folder.name) == (name, name)


def test_another_sanitizer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXKV_SANITIZE", "memory")
    with pytest.raises(ValueError, match="FLEXKV_SANITIZE='memory': allowed are"):
        Variant.from_environment()
