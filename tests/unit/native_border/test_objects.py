"""The core refuses wrong objects: None, objects of a different class, objects that were never initialised, and objects
that an earlier call has consumed.
"""

from __future__ import annotations

import inspect
from pathlib import Path

import numpy as np
import pytest

from flexkv import c_ext
from flexkv.errors import BlockRangeError, ContractError
from tests.unit.native_border.crash import run

CLASSES = [
    name
    for name, value in vars(c_ext).items()
    if inspect.isclass(value) and value.__module__ == c_ext.__name__
]

TAKES_AN_OBJECT = {
    "engine": "c_ext.TransferEngine(None, 8, 1, 30.0, [{}])",
    "mover": "testing_ext.CountingMover({})",
    "faulty mover": "testing_ext.FaultyMover({}, [])",
    "fault rule": "testing_ext.FaultyMover(c_ext.HostMover(), [{}])",
    "I/O fault rule": "testing_ext.IoFaults([{}])",
    "codec of a disk lane": "c_ext.DiskLane([{}], [pool], [[]], 'auto', 4, 30.0)",
    "pool of a disk lane": "c_ext.DiskLane([codec], [{}], [[]], 'auto', 4, 30.0)",
    "slab of a disk lane": "c_ext.DiskLane([codec], [pool], [[{}]], 'auto', 4, 30.0)",
    "codec of a gds lane": "c_ext.GdsLane([{}], 0, [[]])",
    "view": "engine.attach_view(0, {}, pool, 0, -1)",
    "pool": "engine.attach_view(0, view, {}, 0, -1)",
    "view of a gather": "c_ext.gather({}, 0, bytearray(4096))",
    "index of a lookup": "c_ext.TierLookup([{}], 1)",
    "result of a lookup": "c_ext.TierLookup([c_ext.BlockIndex([4])], 1).release({})",
}
OF_CLASS = {
    "engine": "Lane",
    "mover": "PageMover",
    "faulty mover": "PageMover",
    "fault rule": "FaultRule",
    "I/O fault rule": "IoFaultRule",
    "codec of a disk lane": "PageCodec",
    "pool of a disk lane": "HostPool",
    "slab of a disk lane": "SlabFile",
    "codec of a gds lane": "PageCodec",
    "view": "KvView",
    "pool": "HostPool",
    "view of a gather": "KvView",
    "index of a lookup": "BlockIndex",
    "result of a lookup": "Found",
}
OTHERS = """
runs = np.array([[0, 4096, 0]], np.int64)
codec = c_ext.PageCodec([4096], [runs])
pool = c_ext.HostPool(codec.image_bytes, 2, False, codec.image_bytes, False)
memory = np.zeros(4096, np.uint8)
view = c_ext.KvView(np.array([[memory.ctypes.data, 4096, 4096, 0, 0]], np.int64), 1, 4096)
engine = c_ext.TransferEngine(None, 8, 1, 30.0, [])
"""


@pytest.mark.parametrize("taken_by", TAKES_AN_OBJECT)
def test_none_and_an_uninitialised_object_are_a_type_error(taken_by: str) -> None:
    call, cls = TAKES_AN_OBJECT[taken_by], OF_CLASS[taken_by]
    module = "c_ext" if hasattr(c_ext, cls) else "testing_ext"
    uninitialised = f"{module}.{cls}.__new__({module}.{cls})"
    said = run(
        OTHERS
        + f"caught(lambda: {call.format('None')})\n"
        + f"caught(lambda: {call.format('object()')})\n"
        + f"caught(lambda: {call.format(uninitialised)})\n"
    )
    assert said.count("TypeError ") == 3, said
    assert "whose __init__ has not run: make it by calling the class" in said


@pytest.mark.parametrize("name", CLASSES)
def test_no_member_takes_an_uninitialised_self(name: str) -> None:
    said = run(
        f"""
        cls = c_ext.{name}
        members = [m for m in vars(cls) if not m.startswith("_") or m in ("__len__", "__repr__")]
        blank = cls.__new__(cls)
        class Heir(cls):
            pass
        for member in members:
            value = vars(cls)[member]
            for self in (blank, Heir.__new__(Heir), None):
                if isinstance(value, property):
                    caught(value.fget, self)
                elif not isinstance(value, staticmethod):
                    caught(value, self)
        print("end")
        """
    )
    *lines, last = said.splitlines()
    assert last == "end"
    starts = [line for line in lines if line.startswith(("TypeError ", "nothing ")) or "Error " in line[:40]]
    assert all(line.startswith("TypeError ") for line in starts), starts


def test_what_may_be_none_still_may() -> None:
    engine = c_ext.TransferEngine(None, 8, 1, 30.0, [])
    assert engine.close(10.0)


@pytest.fixture
def lane() -> c_ext.DiskLane:
    codec = c_ext.PageCodec([4096], [np.array([[0, 4096, 0]], np.int64)])
    image = codec.image_bytes
    return c_ext.DiskLane([codec], [c_ext.HostPool(image, 2, False, image, False)], [[]], "threads", 4, 30.0)


def test_a_lane_serves_one_engine(lane: c_ext.DiskLane) -> None:
    first = c_ext.TransferEngine(None, 8, 1, 30.0, [lane])
    with pytest.raises(
        ContractError, match=r"lane disk \(number 0 of those given\) belongs to a transfer engine"
    ):
        c_ext.TransferEngine(None, 8, 1, 30.0, [lane])
    assert first.close(10.0)
    with pytest.raises(ContractError, match="serves one engine"):
        c_ext.TransferEngine(None, 8, 1, 30.0, [lane])
    with pytest.raises(ContractError):
        c_ext.TransferEngine(None, 8, 1, 30.0, [lane, lane])


def test_an_engine_that_could_not_be_made_takes_no_lane(lane: c_ext.DiskLane) -> None:
    with pytest.raises(ContractError, match="two lanes for"):
        c_ext.TransferEngine(None, 8, 1, 30.0, [lane, lane])
    assert c_ext.TransferEngine(None, 8, 1, 30.0, [lane]).close(10.0)


def test_a_disk_that_a_lane_has_not_is_refused(lane: c_ext.DiskLane) -> None:
    for disk in (-1, 1, 2**31 - 1):
        with pytest.raises(BlockRangeError, match=rf"disk {disk}: the lane has disks \[0, 1\)"):
            lane.take_out(disk, "why")
        with pytest.raises(BlockRangeError, match=rf"disk {disk}"):
            lane.counts(disk)


def test_movers_nest_to_a_depth_that_a_stack_holds() -> None:
    said = run(
        """
        mover = c_ext.HostMover()
        for depth in range(1_000_000):
            try:
                mover = testing_ext.CountingMover(mover)
            except ContractError as error:
                print(depth, error)
                break
        del mover
        """
    )
    assert said == "64 a mover around 65 others; allowed are 64\n"


def test_a_slot_image_is_unequal_to_what_is_none() -> None:
    image = c_ext.SlotImage([4096])
    others: list[object] = [3, None, "a"]
    assert image == c_ext.SlotImage([4096])
    assert not any(image == other for other in others)


def test_slabs_of_another_folder_have_no_nul(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(8192))
    said = run(
        f"""
        caught(c_ext.SlabFile, {str(tmp_path / "a")!r} + "\\0b", 4096, 4096, 1, 1)
        caught(c_ext.GDSManager, {{0: [{str(tmp_path / "a")!r} + "\\0b"]}}, 1)
        caught(c_ext.available_memory, "/proc\\0", "/sys")
        """
    )
    assert [line.split()[0] for line in said.splitlines()] == ["DiskError", "ConfigError", "ContractError"]
    assert said.count("NUL") == 3
