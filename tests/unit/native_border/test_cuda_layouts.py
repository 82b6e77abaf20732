"""The structures and numbers that the native core passes to NVIDIA's libraries equal those in NVIDIA's own Python
bindings.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest

from tests.testing_ext import cuda_constants, cuda_layouts

driver = pytest.importorskip("cuda.bindings.driver", reason="the extra flexkv[gpu] is not installed")
cufile = pytest.importorskip("cuda.bindings.cufile", reason="these bindings have no cuFile")

ANY_ORDER = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_ANY
Layout = dict[str, tuple[int, int]]

BATCH: dict[str, tuple[str, Any]] = {
    "order": ("srcAccessOrder", ANY_ORDER),
    "source_hint": ("srcLocHint", (2, 0x71223344)),
    "destination_hint": ("dstLocHint", (2, 0x61223344)),
    "flags": ("flags", 0x51223344),
}


def differences(make: Callable[[], Any], fields: dict[str, tuple[str, Any]], layout: Layout) -> list[str]:
    """Returns the fields of flexkv's structure whose offset or width differs from NVIDIA's."""
    _, total = layout[""]
    wrong = []
    for ours, (theirs, value) in fields.items():
        given = make()
        if isinstance(value, tuple):  # a memory location is a tuple: its kind and its number
            place = getattr(given, theirs)
            place.type, place.id = driver.CUmemLocationType(value[0]), value[1]
            expected = value[0].to_bytes(4, "little") + value[1].to_bytes(4, "little")
        else:
            setattr(given, theirs, value)
            expected = int(value).to_bytes(layout[ours][1], "little")
        offset, size = layout[ours]
        wanted = bytes(offset) + expected + bytes(total - offset - size)
        if len(expected) != size or ctypes.string_at(int(given.getPtr()), total) != wanted:
            wrong.append(ours)
    return wrong


def test_the_attributes_of_a_batch_lie_as_theirs() -> None:
    layout = cuda_layouts()["BatchAttributes"]
    assert set(layout) - {""} == set(BATCH)
    assert differences(driver.CUmemcpyAttributes, BATCH, layout) == []
    assert layout["flags"] == (layout[""][1] - 4, 4)


@pytest.mark.parametrize("moved", [{"order": (4, 4)}, {"source_hint": (8, 8)}, {"flags": (16, 4)}], ids=str)
def test_a_field_elsewhere_is_found(moved: Layout) -> None:
    found = differences(driver.CUmemcpyAttributes, BATCH, cuda_layouts()["BatchAttributes"] | moved)
    assert found == list(moved)


def test_the_description_of_a_file_lies_as_theirs() -> None:
    layout, theirs = cuda_layouts()["CufileDescription"], cufile.descr_dtype
    assert layout[""] == (0, theirs.itemsize)
    names = {"type": "type", "file": "handle", "file_system_ops": "fs_ops"}
    for ours, name in names.items():
        dtype, offset = theirs.fields[name]
        assert layout[ours] == (offset, dtype.itemsize), ours


def numbers_of_theirs() -> dict[str, int]:
    """Returns all numbers in NVIDIA's bindings of the driver, by name: constants, and members of enumerations."""
    found: dict[str, int] = {}
    for name in dir(driver):
        value = getattr(driver, name)
        if isinstance(value, int):
            found[name] = int(value)
        elif hasattr(value, "__members__"):
            found |= {member: int(number) for member, number in value.__members__.items()}
    return found


def test_every_number_is_theirs() -> None:
    ours, theirs = cuda_constants(), numbers_of_theirs()
    assert {name: theirs.get(name) for name in ours} == ours
    assert theirs["CU_MEMORYTYPE_HOST"] != theirs["CU_MEMORYTYPE_DEVICE"]
