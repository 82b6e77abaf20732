"""Tests the interface of the transfer functions: names, order and defaults of their arguments, accepted dtypes, and
errors for bad input.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flexkv import c_ext
from flexkv.errors import (
    BlockRangeError,
    CapacityError,
    ClosedError,
    ConfigError,
    GeometryError,
    TransferError,
)
from tests.unit.gds.raw_world import SGLANG, TRTLLM, VLLM, Case, World

CASE = Case(VLLM, 2, 4096, 3, 8, 6, True, True, 11, align=4096)
NAMES = [
    "gds_manager",
    "gpu_layer_id_list",
    "gpu_layer_ptrs_tensor",
    "gds_block_ids",
    "gpu_block_ids",
    "gpu_kv_stride_in_bytes",
    "gpu_block_stride_in_bytes",
    "gpu_layer_stride_in_bytes",
    "gds_layer_stride_in_bytes",
    "gds_block_stride_in_bytes",
    "gds_kv_stride_in_bytes",
    "block_size_in_bytes",
    "gds_copy_off_inside_chunks",
    "num_blocks_per_file",
    "total_layers",
    "is_read",
]


def run(world: World, manager: Any, change: dict[str, object] | None = None, **options: object) -> None:
    arguments = dict(zip(NAMES, (manager, *world.arguments()), strict=True))
    arguments.update({**world.options(), **options, **(change or {})})
    c_ext.transfer_kv_blocks_gds_staged(**arguments)  # type: ignore[arg-type]


def aligned_buffer(size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    raw = np.zeros(size + 4096, np.uint8)
    start = -raw.ctypes.data % 4096
    return raw[start : start + size]


def test_parameters_and_defaults() -> None:
    text = c_ext.transfer_kv_blocks_gds_staged.__doc__ or ""
    found = re.findall(r"(\w+): [\w.| ]+?(?: = (\w+))?[,)]", text.split("->")[0])
    assert [name for name, _ in found] == [*NAMES, "verbose", "is_mla", "gpu_block_type", "staging_buffer"]
    assert [default for _, default in found][16:] == ["False", "False", "0", "None"]
    stub = Path(inspect.getfile(c_ext)).with_name("c_ext.pyi").read_text()
    declared = stub[stub.index("def transfer_kv_blocks_gds_staged(") :]
    assert re.findall(r"^    (\w+):", declared[: declared.index(") ->")], re.M) == [name for name, _ in found]


def test_torch_tensors_and_dlpack_are_taken_alike(tmp_path: Path) -> None:
    world = World(CASE, tmp_path)
    manager = world.manager()
    world.expect()
    tensors = {
        name: torch.from_numpy(value)
        for name, value in zip(NAMES[1:], world.arguments(), strict=True)
        if isinstance(value, np.ndarray)
    }
    assert len(tensors) == 4
    staging = torch.empty(3 * CASE.file_block_stride, dtype=torch.uint8)
    run(world, manager, tensors, staging_buffer=staging)
    assert world.differences() == []
    assert manager.staging_bytes == 0
    manager.close()


def test_a_callers_staging_buffer(tmp_path: Path) -> None:
    world = World(CASE, tmp_path)
    manager = world.manager()
    world.expect()
    run(world, manager, staging_buffer=aligned_buffer(2 * CASE.file_block_stride))
    assert world.differences() == []
    assert manager.staging_bytes == 0
    with pytest.raises(CapacityError, match="too small for one block of 24576 bytes"):
        run(world, manager, staging_buffer=aligned_buffer(CASE.file_block_stride - 1))
    manager.close()


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"gpu_layer_id_list": np.array([0, 3], np.int32)}, BlockRangeError, "layer 3"),
        ({"gpu_layer_id_list": np.array([-1], np.int32)}, BlockRangeError, "layer -1"),
        ({"gpu_layer_id_list": np.array([1, 1], np.int32)}, GeometryError, "share bytes"),
        ({"gpu_layer_id_list": np.array([], np.int32)}, GeometryError, "empty"),
        ({"gpu_layer_id_list": np.array([0], np.int64)}, GeometryError, "gpu_layer_id_list.*int32"),
        ({"gpu_layer_id_list": [0]}, GeometryError, "gpu_layer_id_list is a list"),
        ({"gds_block_ids": np.array([0], np.int32)}, GeometryError, "gds_block_ids.*int64"),
        ({"gds_block_ids": np.arange(12)[::2]}, GeometryError, "gds_block_ids is not contiguous"),
        ({"gds_block_ids": np.arange(5)}, GeometryError, "6 blocks of the pool and 5"),
        ({"gds_block_ids": np.array([0, 1, 2, 3, 4, 4]), "is_read": False}, BlockRangeError, "named twice"),
        ({"gds_block_ids": np.array([0, 1, 2, 3, 4, 10**6])}, BlockRangeError, "file .* of device 0"),
        ({"gds_block_ids": np.array([0, 1, 2, 3, 4, -1])}, BlockRangeError, "block -1"),
        ({"gpu_block_ids": np.array([0, 1, 2, 3, 4, -1])}, BlockRangeError, "block -1"),
        ({"gpu_block_ids": np.array([0, 1, 2, 3, 4, 4])}, BlockRangeError, "block 4 of the pool"),
        ({"gpu_layer_ptrs_tensor": np.zeros(3, np.int64)}, GeometryError, "address 0"),
        ({"gpu_layer_ptrs_tensor": np.zeros(0, np.int64)}, GeometryError, "number of layers"),
        ({"block_size_in_bytes": 0}, GeometryError, "chunk size"),
        ({"block_size_in_bytes": 8192}, GeometryError, "ends at byte"),
        ({"gds_block_stride_in_bytes": 8192}, GeometryError, "ends at byte"),
        ({"gds_layer_stride_in_bytes": 4096}, GeometryError, "share bytes"),
        ({"gpu_block_stride_in_bytes": 4096}, GeometryError, "share bytes"),
        ({"num_blocks_per_file": 0}, GeometryError, "num_blocks_per_file"),
        ({"gpu_block_type": 3}, GeometryError, "gpu_block_type is 3"),
        ({"gpu_block_type": SGLANG}, GeometryError, "gpu_layer_ptrs_tensor has 3"),
        ({"gpu_block_type": TRTLLM}, GeometryError, "gpu_layer_ptrs_tensor has 3"),
        ({"staging_buffer": 5}, GeometryError, "staging_buffer is a int"),
    ],
)
def test_bad_input_is_refused_and_nothing_moves(
    change: dict[str, object], error: type[Exception], words: str, tmp_path: Path
) -> None:
    world = World(CASE, tmp_path)
    manager = world.manager()
    before = [tensor.copy() for tensor in world.pool.memory]
    with pytest.raises(error, match=words):
        run(world, manager, change)
    assert all((a == b).all() for a, b in zip(before, world.pool.memory, strict=True))
    assert manager.totals["io_calls"] == 0
    manager.close()


def test_a_pool_of_one_layer_is_the_backend_it_says(tmp_path: Path) -> None:
    """The backend's type, not the number of addresses, decides how a pool is read: a pool with a single address may be
    a layer-first pool with one layer.
    """
    world = World(Case(VLLM, 2, 512, 1, 8, 8, True, True, 5, kv_outermost=True), tmp_path)
    manager = world.manager()
    world.expect()
    run(world, manager)
    assert world.differences() == []
    manager.close()


def test_the_manager_says_what_is_wrong_with_its_files(tmp_path: Path) -> None:
    wrong: list[tuple[dict[int, list[str]], int, str]] = [
        ({}, 0, "no device"),
        ({0: []}, 1, "device 0 has no files"),
        ({1: [str(tmp_path / "a")]}, 1, "numbered 0, 1"),
        ({0: [str(tmp_path / "a")]}, 2, "num_devices is 2"),
        ({0: [str(tmp_path / "no" / "a")]}, 1, "cannot open"),
        ({0: [str(tmp_path)]}, 1, "cannot open"),
    ]
    for files, devices, words in wrong:
        with pytest.raises(ConfigError, match=words):
            c_ext.GDSManager(files, devices, gpu_device_id=-1)
    with pytest.raises(ConfigError, match="threads per disk is 65"):
        c_ext.GDSManager({0: [str(tmp_path / "a")]}, 1, threads_per_device=65, gpu_device_id=-1)


def test_a_closed_manager_refuses(tmp_path: Path) -> None:
    world = World(CASE, tmp_path)
    manager = world.manager()
    manager.close()
    manager.close()
    with pytest.raises(ClosedError, match="the GDS manager is closed"):
        run(world, manager)


def test_a_transfer_error_is_an_os_error() -> None:
    assert issubclass(TransferError, OSError)
