"""Impossible sizes are refused, by name and value, before anything is allocated for them."""

from __future__ import annotations

import ctypes
import mmap
import resource
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


def copy_layers(start: int, count: int, blocks: int = 0, block_stride: int = 4096) -> None:
    memory = np.zeros(8192, np.uint8)
    ids, pointers = np.array([blocks], np.int64), np.array([memory.ctypes.data], np.int64)
    c_ext.transfer_kv_blocks(
        ids, pointers, 2048, 4096, 4096, ids, memory, 2048, 0, block_stride, 64, start, count, is_mla=True
    )


def copy_pool_block(block: int, stride: int) -> None:
    memory, pool = np.zeros(8192, np.uint8), np.zeros(8192, np.uint8)
    pointers = np.array([pool.ctypes.data], np.int64)
    pool_ids, ids = np.array([block], np.int64), np.zeros(1, np.int64)
    c_ext.transfer_kv_blocks(
        pool_ids, pointers, 64, stride, 0, ids, memory, 64, 0, 4096, 64, 0, 1, is_mla=True
    )


@pytest.mark.parametrize("stride", [2**31 - 1, 2**31, 2**31 + 4096, 2**40, 2**44])
@pytest.mark.parametrize("block", [1, 2**11])
def test_a_block_of_the_pool_beyond_its_memory_is_refused(block: int, stride: int) -> None:
    with pytest.raises(GeometryError, match=rf"block {block} of the pool, with a stride of {stride} bytes"):
        copy_pool_block(block, stride)


def test_a_pool_that_is_reserved_without_access_is_refused() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    pool = libc.mmap(None, ctypes.c_size_t(8192), 0, anonymous, -1, ctypes.c_long(0))
    assert pool not in (None, ctypes.c_void_p(-1).value)
    memory, ids = np.zeros(8192, np.uint8), np.zeros(1, np.int64)
    try:
        with pytest.raises(GeometryError, match="block 0 of the pool"):
            c_ext.transfer_kv_blocks(
                ids, np.array([pool], np.int64), 64, 4096, 0, ids, memory, 64, 0, 4096, 64, 0, 1, is_mla=True
            )
    finally:
        libc.munmap(ctypes.c_void_p(pool), ctypes.c_size_t(8192))


def test_control_a_block_within_the_pool_is_copied() -> None:
    copy_pool_block(1, 4096)
    copy_pool_block(0, 2**44)


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.parametrize(("start", "count"), [(0, 2**30), (2**30, 2**30), (2**16, 1), (0, 0), (-1, 1)])
def test_layers_beyond_the_limit_are_refused_before_they_are_listed(start: int, count: int) -> None:
    before = peak_bytes()
    with pytest.raises(BlockRangeError, match=rf"start_layer_id is {start} and num_layers {count}"):
        copy_layers(start, count)
    assert peak_bytes() - before < 256 << 20  # a list of 2**30 layers has 4 GiB


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
    "block of the other memory": (
        lambda: copy_layers(0, 1, blocks=2**62),
        BlockRangeError,
        f"block {2**62} of the pool",
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
    """A tensor in host memory that makes the given claims."""

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
    pointers = np.array([memory.ctypes.data], np.int64)
    with pytest.raises(GeometryError, match=said):
        c_ext.transfer_kv_blocks(
            ids, pointers, 2048, 4096, 4096, ids, memory, 2048, 0, 4096, 64, 0, 1, is_mla=True
        )


def test_an_object_with_an_address_alone_is_no_tensor() -> None:
    class Address:
        def data_ptr(self) -> int:
            return 4096

    memory = np.zeros(8192, np.uint8)
    with pytest.raises(GeometryError, match=r"cpu_tensor has data_ptr\(\) and is no tensor"):
        c_ext.transfer_kv_blocks(
            np.zeros(1, np.int64), np.array([memory.ctypes.data]), 2048, 4096, 4096, np.zeros(1, np.int64),
            Address(), 2048, 0, 4096, 64, 0, 1, is_mla=True,
        )  # fmt: skip


@pytest.mark.parametrize("member", ["ready", "pin", "remove", "slots_of", "keys_of", "pins_of", "pin_coming"])
def test_entries_of_no_dimension_are_refused(member: str) -> None:
    with pytest.raises(ContractError, match="entries must have one dimension"):
        getattr(c_ext.BlockIndex([4]), member)(np.array(1, np.uint32))


def test_a_read_only_array_is_refused_by_name() -> None:
    memory, ids = np.zeros(8192, np.uint8), np.zeros(1, np.int64)
    pointers = np.array([memory.ctypes.data], np.int64)
    frozen = memory.copy()
    frozen.flags.writeable = False
    with pytest.raises(GeometryError, match="cpu_tensor gives no DLPack"):
        c_ext.transfer_kv_blocks(
            ids, pointers, 2048, 4096, 4096, ids, frozen, 2048, 0, 4096, 64, 0, 1, is_mla=True
        )
