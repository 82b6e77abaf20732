"""The interface of tensors that the layout handlers need, and checks of tensors. torch's tensors have this interface,
but this module does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from flexkv.errors import GeometryError

DTYPE_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "int8": 1,
    "uint8": 1,
}
"""Bytes per element of the dtypes that engines use for KV."""


class TensorLike(Protocol):
    """The part of torch.Tensor that the layout handlers use. Strides and the storage offset are in elements."""

    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def dtype(self) -> object: ...
    def data_ptr(self) -> int: ...
    def stride(self) -> Sequence[int]: ...
    def element_size(self) -> int: ...
    def storage_offset(self) -> int: ...


def dtype_name(tensor: TensorLike) -> str:
    return str(tensor.dtype).rpartition(".")[2]


def check_tensor(name: str, tensor: TensorLike, rank: int) -> None:
    """Checks that a tensor has the expected number of dimensions, none of them empty, a dtype in DTYPE_BYTES, and an
    aligned address.

    Args:
        name: name of the tensor for the error's text.
        rank: expected number of dimensions.

    Raises:
        GeometryError: a check failed. The message names the value found and what is allowed.
    """
    shape = tuple(tensor.shape)
    if len(shape) != rank:
        raise GeometryError(f"{name}: shape {shape} has {len(shape)} dimensions, {rank} are needed")
    if not all(size > 0 for size in shape):
        raise GeometryError(f"{name}: shape {shape} has an empty dimension")
    dtype = dtype_name(tensor)
    if dtype not in DTYPE_BYTES:
        raise GeometryError(f"{name}: dtype {dtype}; allowed are {', '.join(DTYPE_BYTES)}")
    if tensor.element_size() != DTYPE_BYTES[dtype]:
        raise GeometryError(
            f"{name}: element size {tensor.element_size()} does not fit dtype {dtype}, "
            f"which has {DTYPE_BYTES[dtype]} bytes"
        )
    if tensor.data_ptr() == 0 or tensor.data_ptr() % tensor.element_size():
        raise GeometryError(
            f"{name}: address {tensor.data_ptr():#x} is null or not aligned to {tensor.element_size()} bytes"
        )


def byte_strides(tensor: TensorLike) -> tuple[int, ...]:
    return tuple(stride * tensor.element_size() for stride in tensor.stride())


def dense_strides(shape: Sequence[int], item_bytes: int) -> tuple[int, ...]:
    """Returns the byte strides of a C-contiguous array of `shape`."""
    strides = [item_bytes] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * shape[i + 1]
    return tuple(strides)


def check_strides(name: str, shape: Sequence[int], found: Sequence[int], expected: Sequence[int]) -> None:
    """Checks that a tensor has the expected strides. Ignores dimensions of size 1, because their strides have no
    effect.

    Args:
        name: name of the tensor for the error's text.
        found: the tensor's strides, in bytes.
        expected: the expected strides, in bytes.

    Raises:
        GeometryError: the strides differ. The message contains the found and the expected strides.
    """
    if any(size > 1 and f != e for size, f, e in zip(shape, found, expected, strict=True)):
        raise GeometryError(
            f"{name}: byte strides {tuple(found)} of shape {tuple(shape)}; expected are {tuple(expected)}"
        )


def storage_base(tensor: TensorLike) -> int:
    """Returns the address of the first byte of the allocation behind `tensor`."""
    return tensor.data_ptr() - tensor.storage_offset() * tensor.element_size()


def storage_bytes(tensor: TensorLike) -> int | None:
    """Returns the size of the allocation behind `tensor` in bytes; None if it is unknown."""
    storage = getattr(tensor, "untyped_storage", None)
    return None if storage is None else int(storage().nbytes())
