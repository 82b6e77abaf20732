"""If the kernel refuses io_uring, or refuses to register buffers with it, the disk tier still works and reports the
reason."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flexkv import c_ext
from tests.own_tree import OWN_TREE
from tests.unit.storage.refused_child import IO_URING_REGISTER, IO_URING_SETUP

CHILD_S = 120
REGISTER_BUFFERS_UPDATE = 16
REFUSAL = c_ext.uring_refusal()
with_uring = pytest.mark.skipif(bool(REFUSAL), reason=f"io_uring is refused here: {REFUSAL}")


def used(folder: Path, io: str, call: int = 0, error: int = 0, second: int = -1) -> Any:
    """Runs a child that uses a disk tier with registered buffers while the kernel refuses system call `call`. Returns
    the child's output."""
    command = [sys.executable, "-m", "tests.unit.storage.refused_child", str(folder), io]
    command += map(str, (call, error, second))
    done = subprocess.run(command, cwd=OWN_TREE, capture_output=True, text=True, timeout=CHILD_S)
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert "error" in said or said.pop("variant") == c_ext.__variant__
    return said


@pytest.mark.parametrize(
    ("error", "text"), [(errno.EPERM, "Operation not permitted"), (errno.ENOSYS, "Function not implemented")]
)
def test_threads_take_over_where_io_uring_is_refused(tmp_path: Path, error: int, text: str) -> None:
    said = used(tmp_path, "auto", IO_URING_SETUP, error)
    assert said["backend"] == "threads"
    assert f"no io_uring: io_uring_setup: {text}" in said["note"]
    assert "buffers are not registered: it needs io_uring" in said["note"]
    (line,) = [line for line in said["logged"] if "goes by threads" in line]
    assert str(tmp_path) in line
    assert text in line


def test_threads_cut_the_depth_and_say_so(tmp_path: Path) -> None:
    said = used(tmp_path, "threads")
    assert said["backend"] == "threads"
    assert "8 reads and writes at once, where disk.depth = 32 allows more" in said["note"]
    (line,) = [line for line in said["logged"] if "disk.depth" in line]
    assert str(tmp_path) in line


def test_io_uring_that_was_asked_for_and_is_refused_is_an_error(tmp_path: Path) -> None:
    said = used(tmp_path, "uring", IO_URING_SETUP, errno.EPERM)
    assert said == {"error": "DiskError: io_uring_setup: Operation not permitted"}


@with_uring
@pytest.mark.parametrize("io", ["auto", "uring"])
def test_host_memory_stays_registered(tmp_path: Path, io: str) -> None:
    said = used(tmp_path, io)
    assert said == {"backend": "io_uring", "note": "", "logged": [], "pinned": 1}


@with_uring
@pytest.mark.parametrize(
    ("second", "error", "text"),
    [
        (-1, errno.EINVAL, "a table of registered buffers: Invalid argument"),  # as in kernels before 5.19
        (
            REGISTER_BUFFERS_UPDATE,
            errno.ENOMEM,
            "registering a buffer: Cannot allocate memory",
        ),  # as with a low memlock limit
    ],
)
def test_what_cannot_be_registered_goes_without(tmp_path: Path, second: int, error: int, text: str) -> None:
    said = used(tmp_path, "auto", IO_URING_REGISTER, error, second)
    assert said["backend"] == "io_uring"
    assert said["note"] == f"buffers are not registered: {text}"
    assert said["pinned"] == 0
    assert len(said["logged"]) == 1
    assert "buffers are not registered" in said["logged"][0]
