"""Makes a small valid object of every class of the native core.

A class without a recipe in `RECIPES` (or a reason in `NOT_MADE`) fails the completeness test.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flexkv import c_ext

if TYPE_CHECKING:
    from tests.unit.native_border.world import World

RUN = 512
RUNS = 2
STRIPE = RUN * RUNS
BLOCKS = 4
SLOTS = 4
WAIT_S = 20.0

NOT_MADE = {
    "CudaLane": "needs a GPU",
    "DeviceMemory": "needs a GPU",
    "OpResult": "made by an engine's poll",
    "QueueWrapper": "abstract: only tests wrap queues",
    "Lane": "abstract: lanes are made as their own classes",
    "StreamPoint": "needs a GPU",
    "PageMover": "abstract: movers are made as their own classes",
}
"""Classes whose objects cannot be made in these tests, and the reason. The fuzzer calls their methods only on hostile
objects."""


def random_keys(count: int = 4, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 16), np.uint8)


def _codec(_: World) -> c_ext.PageCodec:
    return c_ext.PageCodec([STRIPE], [codec_runs()])


def codec_runs() -> np.ndarray:
    return np.array([[i * RUN, RUN, i] for i in range(RUNS)], np.int64)


def _pool(world: World) -> c_ext.HostPool:
    image = world.get("PageCodec").image_bytes
    pool = c_ext.HostPool(image, SLOTS, True, image, False)
    assert pool.wait_ready(SLOTS, WAIT_S), pool.stopped_reason
    return pool


def view_runs(world: World) -> np.ndarray:
    return np.array([[world.memory[i].ctypes.data, RUN, RUN, i * RUN, i] for i in range(RUNS)], np.int64)


def _slab(world: World) -> c_ext.SlabFile:
    path, image = world.path(), world.get("PageCodec").image_bytes
    Path(path).write_bytes(bytes(4096 + SLOTS * image))
    return c_ext.SlabFile(path, 4096, image, SLOTS, 1)


def _disk_lane(world: World) -> c_ext.DiskLane:
    return c_ext.DiskLane(
        [world.get("PageCodec")], [world.get("HostPool")], [[world.get("SlabFile")]], "threads", 2, 30.0
    )


def _engine(world: World) -> c_ext.TransferEngine:
    engine = c_ext.TransferEngine(world.get("HostMover"), 8, 1, 30.0, [world.get("DiskLane")])
    engine.attach_view(0, world.get("KvView"), world.get("HostPool"), 0, -1)
    return engine


def _index(_: World) -> c_ext.BlockIndex:
    index = c_ext.BlockIndex([16, 16], "lru", [0, 0])
    index.grow(0, 16)
    return index


def _lookup(world: World) -> c_ext.TierLookup:
    host, behind = world.get("BlockIndex"), c_ext.BlockIndex([16, 16])
    for index in (host, behind):
        index.grow(0, 16)
        index.grow(1, 16)
    world.kept["behind"] = behind
    return c_ext.TierLookup([host, behind], 2)


def lookup_of_three(world: World) -> dict[str, object]:
    """Returns the arguments of a lookup of three pages per group: one that is ready in host memory, one that a transfer
    is reading into host memory, and one that is ready in the tier behind host memory.
    """
    world.get("TierLookup")
    host, behind = world.get("BlockIndex"), world.kept["behind"]
    offered = []
    for group in range(2):
        keys = random_keys(3, seed=next(world.numbers))
        for index, first in ((host, 0), (behind, 2)):
            entries = index.insert(group, keys[first : first + 1], 1)[1]
            index.finish(entries, np.ones(len(entries), np.uint8))
            index.set_expiry(entries, np.full(len(entries), 100, np.uint64))
        host.insert(group, keys[1:2], 1, 7)
        offered.append(keys)
    return {"keys": offered, "start_block": 0, "room_pages": 8, "tiers_mask": 3, "now_s": 1}


def lengths_of_three(world: World) -> dict[str, object]:
    """Returns the arguments of a lookup of two lengths, with the pages of `lookup_of_three`."""
    arguments = lookup_of_three(world)
    start = arguments.pop("start_block")
    return {**arguments, "start_tokens": start, "most": 2}


def _boundary_lookup(world: World) -> c_ext.BoundaryLookup:
    return c_ext.BoundaryLookup(world.get("TierLookup"), [c_ext.GroupRule("full", 4), _rule(world)], 4)


def _rule(_: World) -> c_ext.GroupRule:
    return c_ext.GroupRule("window", 4, 2)


def _found_lengths(world: World) -> c_ext.FoundLengths:
    lookup = world.get("BoundaryLookup")
    arguments: dict[str, Any] = lengths_of_three(world)
    return lookup.look(**arguments)  # type: ignore[no-any-return]


def _found_pages(world: World) -> c_ext.Found:
    arguments: dict[str, Any] = lookup_of_three(world)
    return world.get("TierLookup").look(**arguments)  # type: ignore[no-any-return]


def _manager(world: World) -> c_ext.GDSManager:
    return c_ext.GDSManager({0: [world.path()]}, 1, threads_per_device=1, gpu_device_id=-1, io="threads")


def head_to_token_major() -> tuple[Any, ...]:
    """Returns the arguments of a page conversion of two tokens and two heads from head-major to token-major order."""
    source, target = ((8, 2, 4, 1), (8, 2, 4, 1), 8), ((8, 4, 2, 1), (8, 4, 2, 1), 8)
    return (1, 2, 2, 2), 1, source, target


RECIPES: dict[str, Callable[[World], Any]] = {
    "BlockIndex": _index,
    "BoundaryLookup": _boundary_lookup,
    "DiskLane": _disk_lane,
    "EngineKeyChain": lambda _: c_ext.EngineKeyChain(bytes(32), 0),
    "Found": _found_pages,
    "FoundLengths": _found_lengths,
    "GDSManager": _manager,
    "GdsLane": lambda world: c_ext.GdsLane([world.get("PageCodec")], 0, [[world.get("SlabFile").row]]),
    "GroupRule": _rule,
    "HostMover": lambda _: c_ext.HostMover(),
    "HostPool": _pool,
    "KvView": lambda world: c_ext.KvView(view_runs(world), BLOCKS, STRIPE),
    "PageCodec": _codec,
    "PageConversion": lambda _: c_ext.PageConversion(*head_to_token_major()),
    "PeerDirectory": lambda _: c_ext.PeerDirectory(),
    "SlabFile": _slab,
    "SlotBoard": lambda _: c_ext.SlotBoard(8),
    "SlotImage": lambda _: c_ext.SlotImage([STRIPE, STRIPE], 64),
    "TierLookup": _lookup,
    "TokenChain": lambda _: c_ext.TokenChain(4),
    "TransferEngine": _engine,
}
