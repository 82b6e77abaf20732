"""If Python passes wrong arrays or buffers to the native layout code, it raises a typed error and never crashes."""

from __future__ import annotations

import ast
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import flexkv
from flexkv import c_ext
from flexkv.errors import BlockRangeError, FlexKVError, GeometryError


def test_the_module_says_what_it_is() -> None:
    info = c_ext.build_info()
    assert c_ext.__variant__.startswith("cuda" if info["cuda"] else "cpu")
    assert int(info["cpp_standard"]) >= 202002


def test_runs_must_be_int64_rows_of_five() -> None:
    with pytest.raises(TypeError, match="incompatible constructor arguments"):
        c_ext.KvView(np.zeros((1, 5), np.float64), 4, 64)  # type: ignore[arg-type]
    with pytest.raises(GeometryError, match="shape"):
        c_ext.KvView(np.zeros((1, 4), np.int64), 4, 64)
    with pytest.raises(GeometryError, match="layer"):
        c_ext.KvView(np.array([[4096, 64, 64, 0, 2**40]]), 4, 64)
    for layer in (2**16, 2**31 - 1):
        with pytest.raises(GeometryError, match=r"layer must be in \[0, 65536\)"):
            c_ext.KvView(np.array([[4096, 64, 64, 0, layer]]), 4, 64)
    huge = 1 << 56
    with pytest.raises(GeometryError, match="the stripe exceeds the address space"):
        c_ext.KvView(np.array([[4096, huge, huge, i * huge, 0] for i in range(128)]), 1, huge)
    with pytest.raises(GeometryError, match="at least one run"):
        c_ext.KvView(np.zeros((0, 5), np.int64), 4, 64)


def test_buffers_must_fit() -> None:
    pool = np.zeros(4 * 64, np.uint8)
    view = c_ext.KvView(np.array([[pool.ctypes.data, 64, 64, 0, 0]]), 4, 64)
    good = np.zeros(64, np.uint8)
    for short in (np.zeros(63, np.uint8), b"x" * 63):
        with pytest.raises(GeometryError, match="the buffer has 63 bytes: the stripe has 64"):
            c_ext.scatter(view, 0, short)
    with pytest.raises(GeometryError, match="a C-contiguous buffer is needed"):
        c_ext.scatter(view, 0, np.zeros(128, np.uint8)[::2])
    with pytest.raises(GeometryError, match="writable"):
        c_ext.gather(view, 0, bytes(64))
    with pytest.raises(BlockRangeError, match=r"layers \[1, 1\)"):
        c_ext.gather_layers(view, 1, 1, 0, good)
    with pytest.raises(BlockRangeError, match="block 4"):
        c_ext.scatter_layers(view, 0, 1, 4, good)


def test_errors_are_flexkv_errors_and_builtin_ones() -> None:
    with pytest.raises(FlexKVError) as caught:
        c_ext.SlotImage([])
    assert isinstance(caught.value, ValueError)
    image = c_ext.SlotImage([1, 5000], 10)
    assert (image.stripe_offset(1), image.trailer_offset, image.total_bytes) == (4096, 12288, 16384)
    assert image == c_ext.SlotImage([1, 5000], 10)
    with pytest.raises(IndexError, match="rank 2: the slot image has ranks"):
        image.stripe_offset(2)


def test_layout_imports_no_engine_and_no_torch() -> None:
    allowed = sys.stdlib_module_names | {"flexkv", "numpy"}
    for source in Path(flexkv.__file__).parent.joinpath("layout").glob("*.py"):
        for node in ast.walk(ast.parse(source.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            assert {name.split(".")[0] for name in names} <= allowed, source
            assert all(
                n.split(".")[:2] in (["flexkv", p] for p in ("layout", "c_ext", "errors"))
                for n in names
                if n.startswith("flexkv")
            ), source


def test_other_threads_run_while_a_view_is_proved() -> None:
    rows = np.array([[4096 + 64 * i, 64 << 18, 64, 64 * i, 0] for i in range(0, 1 << 18)], dtype=np.int64)
    rows[1::2, 0] += 64 << 17  # with this shift, no two neighbouring runs can be merged
    rows = rows[: 1 << 17].copy()
    ticks = 0
    ends = threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not ends.is_set():
            ticks += 1
            time.sleep(0)  # gives the main thread a chance to take the interpreter lock

    thread = threading.Thread(target=tick)
    thread.start()
    interval = sys.getswitchinterval()
    try:
        sys.setswitchinterval(
            1000.0
        )  # so the other thread runs only while this thread has released the interpreter lock
        # repeated, because the other thread may not get a core for a while on a busy machine
        for _ in range(20):
            before = ticks
            view = c_ext.KvView(rows, 4, 64 << 17)
            during = ticks - before
            if during > 1:
                break
    finally:
        sys.setswitchinterval(interval)
        ends.set()
        thread.join()
    assert len(view.segments) == 1 << 17
    assert during > 1, "the interpreter stood still"
