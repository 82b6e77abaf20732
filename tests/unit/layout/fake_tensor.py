"""A replacement for torch tensors: NumPy memory, with the few methods that the layout handlers use."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray


class FakeStorage:
    def __init__(self, size: int) -> None:
        self._size = size

    def nbytes(self) -> int:
        return self._size


@dataclass(frozen=True)
class FakeTensor:
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item: int
    dtype: str
    storage_base: int
    storage_size: int

    def data_ptr(self) -> int:
        return self.address

    def stride(self) -> tuple[int, ...]:
        return self.strides

    def element_size(self) -> int:
        return self.item

    def storage_offset(self) -> int:
        return (self.address - self.storage_base) // self.item

    def untyped_storage(self) -> FakeStorage:
        return FakeStorage(self.storage_size)

    def but(self, **changes: Any) -> FakeTensor:
        return replace(self, **changes)


DTYPE_OF_ITEM = {1: "torch.uint8", 2: "torch.bfloat16", 4: "torch.float32"}


def fake_tensor(view: NDArray[np.uint8], storage: NDArray[np.uint8], item: int = 2) -> FakeTensor:
    """Makes a tensor with elements of `item` bytes.

    Args:
        view: a view of bytes in `storage`, whose last axis is contiguous.
    """
    assert view.dtype == np.uint8
    assert np.may_share_memory(view, storage)
    assert view.shape[-1] % item == 0
    return FakeTensor(
        address=view.ctypes.data,
        shape=(*view.shape[:-1], view.shape[-1] // item),
        strides=(*(s // item for s in view.strides[:-1]), 1),
        item=item,
        dtype=DTYPE_OF_ITEM[item],
        storage_base=storage.ctypes.data,
        storage_size=storage.nbytes,
    )
