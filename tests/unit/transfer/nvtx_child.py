"""A child process of test_nvtx.py. It opens a rank's lanes with the settings of its environment, moves pages with every
lane that works without a GPU, and prints which calls the fake NVTX at argv[1] got. argv[2] is a folder for a disk tier.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from flexkv import c_ext
from flexkv.adapters.common.rank_lanes import open_lanes
from flexkv.config import load_config
from flexkv.facts.ranks import RankPlace
from flexkv.transfer.graph import OpId, OpKind, OpStatus, Priority, TransferGraph, TransferOp
from flexkv.transfer.host_pool import HostPool
from flexkv.transfer.layerwise.host_device import HostDevice
from flexkv.transfer.nvtx import span
from tests.unit.gds.slab_world import SlabWorld

LONG_S = 60.0


def copy_pages() -> None:
    memory, pool = np.zeros((4, 8192), np.uint8), HostPool(8192, 4)
    assert pool.wait_ready(4, LONG_S)
    view = c_ext.KvView(np.array([[memory.ctypes.data, 8192, 8192, 0, 0]]), 4, 8192)
    tensor: Any = SimpleNamespace(device=SimpleNamespace(type="cpu", index=None), memory=memory)
    engine = open_lanes(
        load_config(), [view], [tensor], pool, [RankPlace(0, None)], stream_of=lambda device: 0
    )
    pages = np.arange(4, dtype=np.int32)
    ticket = engine.submit(TransferGraph((TransferOp(OpId(1), OpKind.D2H, 0, Priority.STORE, pages, pages),)))
    assert ticket is not None
    assert engine.wait(ticket, LONG_S)
    assert engine.poll()[0].status is OpStatus.OK
    assert engine.close(LONG_S)
    pool.close()


def move_from_disk(folder: Path) -> None:
    world = SlabWorld([folder])
    world.store([0, 1], [0, 1])
    assert world.load(0, [0, 1], [4, 5]).reason == ""
    world.close()


def fail() -> None:
    raise ValueError("a stage that fails")


def run_stages() -> None:
    device = HostDevice()
    stream = device.stream("compute")
    stream.run(lambda: None, "transform", 0)
    stream.run(fail, "scatter", 0)  # if a stage fails, its NVTX range ends, too
    assert stream.record().wait(LONG_S)
    assert device.close(LONG_S)
    with span("outer"), span("inner"):
        pass


def main() -> None:
    library, folder = sys.argv[1:]
    copy_pages()
    move_from_disk(Path(folder))
    run_stages()
    mapped = library in Path("/proc/self/maps").read_text()
    found: dict[str, Any] = {"variant": c_ext.__variant__, "mapped": mapped, "threads": [], "names": []}
    if mapped:
        fake = ctypes.CDLL(library)
        fake.fake_name.restype = ctypes.c_char_p
        fake.fake_count.restype = ctypes.c_long
        found["threads"] = [
            [fake.fake_count(i, what) for what in range(4)] for i in range(fake.fake_threads())
        ]
        found["names"] = sorted(fake.fake_name(i).decode() for i in range(fake.fake_names()))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
