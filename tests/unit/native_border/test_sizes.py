"""The core refuses impossible sizes before it allocates memory for them. The error names the size and its value."""

from __future__ import annotations

import ctypes
import mmap
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from flexkv import c_ext
from flexkv.errors import (
    BlockRangeError,
    CapacityError,
    ConfigError,
    ContractError,
    FlexKVError,
    GeometryError,
)

ONES = (1, 1, 1, 1)
HUGE = 2**62


def read_raw(
    pool_blocks: object, pointers: np.ndarray, stride: int = 4096, layers: int = 1, **more: object
) -> None:
    """Reads block 0 of a raw file, 64 bytes of one layer, into a pool."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kv")
        path.write_bytes(bytes(8192))
        manager = c_ext.GDSManager({0: [str(path)]}, 1, gpu_device_id=-1)
        try:
            c_ext.transfer_kv_blocks_gds_staged(
                manager, np.zeros(1, np.int32), pointers, np.zeros(1, np.int64), pool_blocks, 64, stride, 0,
                64, 4096, 64, 64, 0, 1, layers, True, is_mla=True, **more,  # type: ignore[arg-type]
            )  # fmt: skip
        finally:
            manager.close()


def read_pool_block(block: int, stride: int = 4096, layers: int = 1) -> None:
    pool = np.zeros(8192, np.uint8)
    read_raw(np.array([block], np.int64), np.array([pool.ctypes.data], np.int64), stride, layers)


@pytest.mark.parametrize("stride", [2**31 - 1, 2**31, 2**31 + 4096, 2**40, 2**44])
@pytest.mark.parametrize("block", [1, 2**11])
def test_a_block_of_the_pool_beyond_its_memory_is_refused(block: int, stride: int) -> None:
    with pytest.raises(GeometryError, match=rf"block {block} of the pool, with a stride of {stride} bytes"):
        read_pool_block(block, stride)


def test_a_pool_that_is_reserved_without_access_is_refused() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    pool = libc.mmap(None, ctypes.c_size_t(8192), 0, anonymous, -1, ctypes.c_long(0))
    assert pool not in (None, ctypes.c_void_p(-1).value)
    try:
        with pytest.raises(GeometryError, match="block 0 of the pool"):
            read_raw(np.zeros(1, np.int64), np.array([pool], np.int64))
    finally:
        libc.munmap(ctypes.c_void_p(pool), ctypes.c_size_t(8192))


def test_control_a_block_within_the_pool_is_read() -> None:
    read_pool_block(1, 4096)
    read_pool_block(0, 2**44)


def codec(stripe: int, runs: list[list[int]]) -> c_ext.PageCodec:
    return c_ext.PageCodec([stripe], [np.array(runs, np.int64)])


def conversion(counts: tuple[int, int, int, int], element: int, stride: int) -> c_ext.PageConversion:
    order = ((stride,) * 4, (stride,) * 4, 0)
    return c_ext.PageConversion(counts, element, order, order)  # type: ignore[arg-type]


def rotate(heads: int, stride: int) -> None:
    keys = np.zeros(64, np.float32)
    offsets, turn = np.zeros(1, np.int64), np.zeros(1, np.int32)
    c_ext.rotate_rows(
        keys,
        keys.copy(),
        offsets,
        offsets,
        turn,
        np.ones((1, 2, 2), np.float32),
        dtype="float32",
        pairing="neox",
        heads=heads,
        head_dim=4,
        rotary_dim=4,
        src_head_stride=stride,
        dst_head_stride=stride,
    )


REFUSED: dict[str, tuple[Callable[[], object], type[FlexKVError], str]] = {
    "layers to time": (
        lambda: c_ext.time_transform(-1, -1, 4096, 1, True, False, 1),
        ConfigError,
        "layers=-1",
    ),
    "bytes to time": (
        lambda: c_ext.time_transform(-1, 2, HUGE, 1, True, False, 1),
        ConfigError,
        f"run_bytes={HUGE}",
    ),
    "blocks to time": (
        lambda: c_ext.time_transform(-1, 2, 4096, HUGE, True, False, 1),
        ConfigError,
        f"blocks={HUGE}",
    ),
    "repeats": (lambda: c_ext.time_transform(-1, 1, 64, 1, True, False, -1), ConfigError, "repeats=-1"),
    "elements of a page": (
        lambda: conversion((2**10, 2**10, 2**10, 1), 1, 1),
        GeometryError,
        "a page of 2147483648 elements",
    ),
    "a step of K": (
        lambda: conversion((2, 2, 2, 2), 1, HUGE),
        GeometryError,
        f"K's step on axis 0 is {HUGE}",
    ),
    "stripes": (
        lambda: c_ext.SlotImage([2**48] * 40_000),
        GeometryError,
        "a slot image of 40000 stripes",
    ),
    "bytes of a run": (
        lambda: codec(4096, [[0, 2**63 - 1, 0], [2**63 - 1, 1, 0]]),
        GeometryError,
        f"{2**63 - 1} bytes at 0",
    ),
    "layer of a run": (lambda: codec(4096, [[0, 4096, 2**31 - 1]]), GeometryError, "of a layer below 65536"),
    "slots of the index": (lambda: c_ext.BlockIndex([2**32 - 1] * 3), CapacityError, "entries"),
    "tokens of all tails": (
        lambda: c_ext.tail_keys(bytes(32), 0, None, b"", [1] * 40_000, 40_000, 1, 0),
        ContractError,
        "allowed are 1073741824 tokens in all",
    ),
    "staging": (
        lambda: c_ext.GDSManager({0: ["none"]}, 1, max_staging_bytes=2**63 - 1, gpu_device_id=-1),
        ConfigError,
        f"max_staging_bytes is {2**63 - 1}",
    ),
    "head stride": (lambda: rotate(4, 2**62), GeometryError, "4 heads with a stride"),
    "block of the pool": (lambda: read_pool_block(2**62), BlockRangeError, f"block {2**62} of the pool"),
    "layers of raw files": (
        lambda: read_pool_block(0, layers=2**30),
        GeometryError,
        f"total_layers is {2**30}",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_size_that_cannot_be_is_named(what: str) -> None:
    call, error, said = REFUSED[what]
    with pytest.raises(error, match=said):
        call()


def test_slab_offsets_end_with_the_slab(tmp_path: Path) -> None:
    path = tmp_path / "slab"
    path.write_bytes(bytes(8192))
    with pytest.raises(GeometryError, match=f"{2**62} slots"):
        c_ext.SlabFile(str(path), 4096, 4096, 2**62, 1)
    slab = c_ext.SlabFile(str(path), 4096, 4096, 1, 1)
    assert slab.offset(1) == 8192
    for slot in (-1, 2, 2**62):
        with pytest.raises(BlockRangeError, match=f"slot {slot}"):
            slab.offset(slot)


class Tensor:
    """An object like a tensor in host memory. Its attributes are those of `array`, except for the ones in `claims`."""

    def __init__(self, array: np.ndarray, **claims: object) -> None:
        self.array, self.claims = array, claims
        self.dtype, self.device = claims.get("dtype", array.dtype), "cpu"

    def is_contiguous(self) -> bool:
        return True

    def data_ptr(self) -> object:
        return self.claims.get("data_ptr", self.array.ctypes.data)

    def numel(self) -> object:
        return self.claims.get("numel", self.array.size)

    def element_size(self) -> object:
        return self.claims.get("element_size", self.array.itemsize)


@pytest.mark.parametrize(
    ("claims", "said"),
    [
        ({"numel": -1}, "-1 elements"),
        ({"numel": 2**62}, "that is no tensor"),
        ({"element_size": 0}, "of 0 bytes"),
        ({"element_size": 1}, "int64 is needed"),
        ({"data_ptr": 0}, "the address 0"),
        ({"data_ptr": 12345}, "boundary of 8 bytes"),
    ],
)
def test_a_tensor_that_cannot_be_is_refused(claims: dict[str, object], said: str) -> None:
    memory, ids = np.zeros(8192, np.uint8), Tensor(np.zeros(1, np.int64), **claims)
    with pytest.raises(GeometryError, match=said):
        read_raw(ids, np.array([memory.ctypes.data], np.int64))


def test_an_object_with_an_address_alone_is_no_tensor() -> None:
    class Address:
        def data_ptr(self) -> int:
            return 4096

    memory = np.zeros(8192, np.uint8)
    with pytest.raises(GeometryError, match=r"staging_buffer has data_ptr\(\) and is no tensor"):
        read_raw(np.zeros(1, np.int64), np.array([memory.ctypes.data]), staging_buffer=Address())


@pytest.mark.parametrize("member", ["ready", "pin", "remove", "slots_of", "keys_of", "pins_of", "pin_coming"])
def test_entries_of_no_dimension_are_refused(member: str) -> None:
    with pytest.raises(ContractError, match="entries must have one dimension"):
        getattr(c_ext.BlockIndex([4]), member)(np.array(1, np.uint32))


def test_a_read_only_array_is_refused_by_name() -> None:
    memory = np.zeros(8192, np.uint8)
    frozen = memory.copy()
    frozen.flags.writeable = False
    with pytest.raises(GeometryError, match="staging_buffer gives no DLPack"):
        read_raw(np.zeros(1, np.int64), np.array([memory.ctypes.data]), staging_buffer=frozen)
