"""Valid objects and arguments for every class and function of the native core, small and quickly made.

A class without a recipe in `RECIPES` (or a reason in `NOT_MADE`) fails the completeness test. Arguments come from
`ARGUMENTS` by the call's name, else from `BY_NAME` by the parameter's, else from the stub's annotation.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from flexkv import c_ext
from flexkv.transfer.graph import OpId, OpKind, Priority, TransferOp
from tests.unit.native_border.surface import Parameter, Target

RUN = 512
RUNS = 2
STRIPE = RUN * RUNS
BLOCKS = 4
SLOTS = 4
WAIT_S = 20.0
TICKET_S = 0.2
"""For a graph to end; behind one whose layers nobody opens it does not."""
NO_TICKET = 2**40
"""Of no graph: an engine whose queue is full gives none."""
TAG_BYTES = 40

NOT_MADE = {
    "CudaLane": "needs a GPU",
    "DeviceMemory": "needs a GPU",
    "OpResult": "made by an engine's poll",
    "Lane": "abstract: lanes are made as their own classes",
    "PageMover": "abstract: movers are made as their own classes",
}
"""Classes of which no object can be made here: their members are called with hostile ones alone."""


NEED_A_GPU = ("HostPool.pin",)
"""Calls that are refused with a ConfigError here, however they are made."""

NO_CONSTRUCTOR = ("Found.__init__",)
"""Of classes whose objects come from calls of others."""


class World:
    """Objects of one case, made when they are first asked for and then shared by its calls."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.numbers = itertools.count(1)
        self.kept: dict[str, Any] = {}
        self.memory = np.zeros((2 * RUNS, BLOCKS, RUN), np.uint8)

    def get(self, name: str) -> Any:
        """The object of a class that this case's calls share."""
        if name not in self.kept:
            self.kept[name] = self.fresh(name)
        return self.kept[name]

    def fresh(self, name: str) -> Any:
        return RECIPES[name](self)

    def path(self) -> str:
        return str(self.folder / f"file-{next(self.numbers)}")

    @property
    def pointers(self) -> np.ndarray:
        """Addresses of the layers of a pool, K and V of each block together."""
        pair = RUNS * BLOCKS * RUN
        return np.array([self.memory.ctypes.data, self.memory.ctypes.data + pair], np.int64)

    def ticket(self) -> int:
        """A ticket of a graph that has ended, unless graphs before it wait to be opened."""
        engine = self.get("TransferEngine")
        if "ticket" not in self.kept:
            self.kept["ticket"] = engine.submit([self.op()], []) or NO_TICKET
            engine.wait(self.kept["ticket"], TICKET_S)
        return int(self.kept["ticket"])

    def op(self, layerwise: bool = False) -> TransferOp:
        ids = np.arange(2, dtype=np.int32)
        return TransferOp(OpId(next(self.numbers)), OpKind.D2H, 0, Priority.LOAD, ids, ids, layerwise)

    def gated(self) -> int:
        """A ticket of a graph whose layers are to be opened: where the queue is full, of the last one made."""
        made = self.get("TransferEngine").submit([self.op(layerwise=True)], [], None, True)
        self.kept["gated"] = made or self.kept.get("gated", NO_TICKET)
        return int(self.kept["gated"])

    def close(self) -> None:
        """What has threads ends; what was closed by a call already does not mind."""
        for name in ("FaultyMover", "IoFaults"):
            if name in self.kept:
                self.kept[name].release()
        for name in ("TransferEngine", "GDSManager", "HostPool"):
            if name in self.kept:
                self.kept[name].close(*((WAIT_S,) if name == "TransferEngine" else ()))


def _keys(count: int = 4, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 16), np.uint8)


def _codec(_: World) -> c_ext.PageCodec:
    return c_ext.PageCodec([STRIPE], [_codec_runs()])


def _codec_runs() -> np.ndarray:
    return np.array([[i * RUN, RUN, i] for i in range(RUNS)], np.int64)


def _pool(world: World) -> c_ext.HostPool:
    image = world.get("PageCodec").image_bytes
    pool = c_ext.HostPool(image, SLOTS, True, image, False)
    assert pool.wait_ready(SLOTS, WAIT_S), pool.stopped_reason
    return pool


def _view_runs(world: World) -> np.ndarray:
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
    engine = c_ext.TransferEngine(world.get("FaultyMover"), 8, 1, 30.0, [world.get("DiskLane")])
    engine.attach_view(0, world.get("KvView"), world.get("HostPool"), 0, -1)
    return engine


def _index(world: World) -> c_ext.BlockIndex:
    index = c_ext.BlockIndex([16, 16])
    index.grow(0, 16)
    world.kept["entries"] = index.insert(0, _keys(), 4)[1]
    return index


def _entries(world: World) -> object:
    world.get("BlockIndex")
    return world.kept["entries"].copy()


def _lookup(world: World) -> c_ext.TierLookup:
    host, behind = world.get("BlockIndex"), c_ext.BlockIndex([16, 16])
    for index in (host, behind):
        index.grow(0, 16)
        index.grow(1, 16)
    world.kept["behind"] = behind
    return c_ext.TierLookup([host, behind], 2)


def _look(world: World) -> dict[str, object]:
    """Of each group a page that is ready in host memory, one that is filled there, and one in the tier behind."""
    world.get("TierLookup")
    host, behind = world.get("BlockIndex"), world.kept["behind"]
    offered = []
    for group in range(2):
        keys = _keys(3, seed=next(world.numbers))
        for index, first in ((host, 0), (behind, 2)):
            entries = index.insert(group, keys[first : first + 1], 1)[1]
            index.finish(entries, np.ones(len(entries), np.uint8))
            index.set_expiry(entries, np.full(len(entries), 100, np.uint64))
        host.insert(group, keys[1:2], 1, 7)
        offered.append(keys)
    return {"keys": offered, "start_block": 0, "room_pages": 8, "tiers_mask": 3, "now_s": 1}


def _found_pages(world: World) -> c_ext.Found:
    arguments: dict[str, Any] = _look(world)
    return world.get("TierLookup").look(**arguments)  # type: ignore[no-any-return]


def _manager(world: World) -> c_ext.GDSManager:
    return c_ext.GDSManager({0: [world.path()]}, 1, threads_per_device=1, gpu_device_id=-1, io="threads")


RECIPES: dict[str, Callable[[World], Any]] = {
    "BlockIndex": _index,
    "CountingMover": lambda world: c_ext.CountingMover(world.get("HostMover")),
    "DiskLane": _disk_lane,
    "EngineKeyChain": lambda _: c_ext.EngineKeyChain(bytes(32), 0),
    "FaultRule": lambda _: c_ext.FaultRule(0, nth_op=1000),
    "FaultyMover": lambda world: c_ext.FaultyMover(world.get("CountingMover"), [world.get("FaultRule")]),
    "Found": _found_pages,
    "GDSManager": _manager,
    "GdsLane": lambda world: c_ext.GdsLane([world.get("PageCodec")], 0, [[world.get("SlabFile").row]]),
    "HostMover": lambda _: c_ext.HostMover(),
    "HostPool": _pool,
    "IoFaultRule": lambda _: c_ext.IoFaultRule(0, nth=1000),
    "IoFaults": lambda world: c_ext.IoFaults([world.get("IoFaultRule")]),
    "KvView": lambda world: c_ext.KvView(_view_runs(world), BLOCKS, STRIPE),
    "PageCodec": _codec,
    "PageConversion": lambda _: c_ext.PageConversion(*_conversion()),
    "SlabFile": _slab,
    "SlotImage": lambda _: c_ext.SlotImage([STRIPE, STRIPE], 64),
    "TierLookup": _lookup,
    "TokenChain": lambda _: c_ext.TokenChain(4),
    "TransferEngine": _engine,
}


def _conversion() -> tuple[Any, ...]:
    """Two tokens of two heads, from head-major to token-major."""
    source, target = ((8, 2, 4, 1), (8, 2, 4, 1), 8), ((8, 4, 2, 1), (8, 4, 2, 1), 8)
    return (1, 2, 2, 2), 1, source, target


def _raw_transfer(world: World) -> dict[str, object]:
    chunk = RUN
    return {
        "gds_manager": world.get("GDSManager"),
        "gpu_layer_id_list": np.arange(2, dtype=np.int32),
        "gpu_layer_ptrs_tensor": world.pointers,
        "gds_block_ids": np.arange(2),
        "gpu_block_ids": np.arange(2),
        "gpu_kv_stride_in_bytes": chunk,
        "gpu_block_stride_in_bytes": 2 * chunk,
        "gpu_layer_stride_in_bytes": 2 * chunk * BLOCKS,
        "gds_layer_stride_in_bytes": 2 * chunk,
        "gds_block_stride_in_bytes": 4 * chunk,
        "gds_kv_stride_in_bytes": chunk,
        "block_size_in_bytes": chunk,
        "gds_copy_off_inside_chunks": 0,
        "num_blocks_per_file": 16,
        "total_layers": 2,
        "is_read": False,
    }


def _raw_copy(world: World) -> dict[str, object]:
    return {
        "gpu_block_id_tensor": np.arange(2),
        "gpu_tensor_ptrs_tensor": world.pointers,
        "gpu_kv_stride_in_bytes": RUN,
        "gpu_block_stride_in_bytes": 2 * RUN,
        "gpu_layer_stride_in_bytes": 2 * RUN * BLOCKS,
        "cpu_block_id_tensor": np.arange(2),
        "cpu_tensor": np.zeros(4 * RUN * BLOCKS, np.uint8),
        "cpu_kv_stride_in_bytes": RUN,
        "cpu_layer_stride_in_bytes": 2 * RUN,
        "cpu_block_stride_in_bytes": 4 * RUN,
        "chunk_size_in_bytes": RUN,
        "start_layer_id": 0,
        "num_layers": 2,
    }


def _rotation(_: World) -> dict[str, object]:
    keys = np.ones(64, np.float32)
    return {
        "src": keys,
        "dst": keys.copy(),
        "src_offsets": np.array([0, 64], np.int64),
        "dst_offsets": np.array([64, 0], np.int64),
        "turn_of_row": np.array([0, -1], np.int32),
        "turns": np.ones((1, 2, 2), np.float32),
        "dtype": "float32",
        "pairing": "neox",
        "heads": 2,
        "head_dim": 4,
        "rotary_dim": 4,
        "src_head_stride": 16,
        "dst_head_stride": 16,
    }


def _address(world: World) -> dict[str, object]:
    pool = world.get("HostPool")
    pid, fd, token, file_bytes = pool.address()
    shape = {name: getattr(pool, name) for name in ("slot_bytes", "slots", "extent_bytes")}
    return {"pid": pid, "fd": fd, "token": token, "file_bytes": file_bytes, **shape}


def _pending(world: World) -> dict[str, object]:
    """Entries of an insert that has not ended."""
    entries = world.get("BlockIndex").insert(0, _keys(seed=next(world.numbers)), 4)[1]
    return {"entries": entries, "ok": np.ones(len(entries), np.uint8)}


def _ready(world: World) -> dict[str, object]:
    """Entries that may be leased."""
    index = world.get("BlockIndex")
    index.finish(**_pending(world))
    found = index.take_coldest(0, 4)
    index.unpin(found)
    return {"entries": found}


def _leased(world: World) -> dict[str, object]:
    ready = _ready(world)
    world.get("BlockIndex").pin(**ready)
    return ready


def _found(world: World) -> dict[str, object]:
    entries = _ready(world)["entries"]
    return {"group": 0, "keys": world.get("BlockIndex").keys_of(entries), "entries": entries}


def _fresh_slab(world: World) -> dict[str, object]:
    path, header, slot, slots, number = world.fresh("SlabFile").row
    return {"path": path, "header_bytes": header, "slot_bytes": slot, "slots": slots, "id": number}


def _two_images(world: World) -> dict[str, object]:
    conversion = world.get("PageConversion")
    return {"source": bytearray(conversion.stripe_bytes), "target": bytearray(conversion.stripe_bytes)}


ARGUMENTS: dict[str, Callable[[World], dict[str, object]]] = {
    "BlockIndex.__init__": lambda _: {"group_slots": [8, 8], "policy": "lru"},
    "BlockIndex.adopt": lambda _: {"group": 1, "keys": _keys(0), "slots": np.empty(0, np.int32)},
    "BlockIndex.check_integrity": lambda world: {"pinned": _entries(world)},
    "BlockIndex.finish": _pending,
    "BlockIndex.grow": lambda _: {"group": 1, "slots": 16},
    "BlockIndex.insert": lambda _: {"group": 0, "keys": _keys(seed=1), "max_new": 4},
    "BlockIndex.keep_leases": lambda world: {"leased": _entries(world)},
    "BlockIndex.pin": _ready,
    "BlockIndex.pin_coming": _ready,
    "BlockIndex.pin_found": _found,
    "BlockIndex.retire": lambda _: {"group": 0, "gone": np.zeros(16, np.uint8)},
    "BlockIndex.set_expiry": lambda world: {"entries": _entries(world), "expiries": np.ones(4, np.uint64)},
    "BlockIndex.touch": _ready,
    "BlockIndex.unpin": _leased,
    "DiskLane.take_out": lambda _: {"disk": 0, "reason": "why"},
    "EngineKeyChain.__init__": lambda _: {"namespace": bytes(32), "group": 0},
    "EngineKeyChain.extend": lambda world: {"engine_keys": [bytes([n]) * 32 for n in range(4)]},
    "FaultRule.__init__": lambda _: {"action": 1, "delay_s": 0.0},
    "GDSManager.__init__": lambda world: {
        "ssd_files": {0: [world.path()]},
        "num_devices": 1,
        "gpu_device_id": -1,
    },
    "GdsLane.__init__": lambda world: {
        "codecs": [world.get("PageCodec")],
        "stripe": 0,
        "slabs": [[world.get("SlabFile").row]],
    },
    "HostPool.__init__": lambda _: {
        "slot_bytes": 4096,
        "slots": SLOTS,
        "shared": False,
        "extent_bytes": 8192,
        "huge_pages": False,
    },
    "HostPool.attach": _address,
    "HostPool.settle": lambda _: {"slots": np.arange(2, dtype=np.int32), "read": 1, "verified": True},
    "KvView.__init__": lambda world: {
        "runs": _view_runs(world),
        "num_blocks": BLOCKS,
        "stripe_bytes": STRIPE,
    },
    "PageCodec.__init__": lambda _: {"stripe_bytes": [STRIPE], "runs": [_codec_runs()]},
    "PageConversion.__init__": lambda _: dict(
        zip(("counts", "element_bytes", "source", "target"), _conversion(), strict=True)
    ),
    "PageConversion.convert": _two_images,
    "SlabFile.__init__": _fresh_slab,
    "SlotImage.__init__": lambda _: {"stripe_bytes": [STRIPE, STRIPE]},
    "SlotImage.__eq__": lambda world: {"arg0": world.fresh("SlotImage")},
    "TierLookup.__init__": lambda world: {
        "presences": [world.get("BlockIndex"), c_ext.BlockIndex([16, 16])],
        "groups": 2,
    },
    "TierLookup.look": _look,
    "TokenChain.__init__": lambda _: {"block_tokens": 4, "seed": bytes(32)},
    "TransferEngine.__init__": lambda world: {
        "mover": world.get("CountingMover"),
        "queue_ops": 8,
        "copy_threads": 1,
        "op_stuck_s": 30.0,
        "lanes": [world.fresh("DiskLane")],
    },
    "TransferEngine.attach_view": lambda world: {
        "group": next(world.numbers),
        "view": world.get("KvView"),
        "pool": world.get("HostPool"),
        "stripe_offset": 0,
        "digest_offset": -1,
    },
    "TransferEngine.open_layers": lambda world: {"tickets": [world.gated()], "layers": 1},
    "TransferEngine.wait_layer": lambda world: {"ticket": world.ticket(), "layer": 0, "deadline_s": 0.01},
    "available_memory": lambda _: {"proc_root": "/proc"},
    "check_rotation": _rotation,
    "rotate_rows": _rotation,
    "sha256": lambda _: {"data": b"abc"},
    "tail_keys": lambda _: {
        "namespace": bytes(32),
        "group": 0,
        "parent_key": bytes(32),
        "extra": b"",
        "tokens": [1, 2, 3],
        "longest": 3,
        "shortest": 1,
        "base_block": 1,
    },
    "time_transform": lambda _: {
        "gpu_device_id": -1,
        "layers": 2,
        "run_bytes": 4096,
        "blocks": 1,
        "into_pool": True,
        "whole_device": False,
        "repeats": 1,
    },
    "transfer_kv_blocks": _raw_copy,
    "reserve_gds_staging": _raw_transfer,
    "transfer_kv_blocks_gds": _raw_transfer,
    "transfer_kv_blocks_gds_staged": _raw_transfer,
}

BY_NAME: dict[str, Callable[[World], object]] = {
    "action": lambda _: 0,
    "block": lambda _: 1,
    "blocks": lambda _: 1,
    "codecs": lambda world: [world.get("PageCodec")],
    "count": lambda _: 0,
    "deadline_s": lambda _: 0.01,
    "depth": lambda _: 2,
    "disk": lambda _: 0,
    "edges": lambda _: [],
    "entries": _entries,
    "group": lambda _: 0,
    "hi": lambda _: 1,
    "image": lambda world: bytearray(world.get("PageCodec").image_bytes),
    "inner": lambda world: world.get("HostMover"),
    "io": lambda _: "threads",
    "keys": lambda _: _keys(),
    "kind": lambda _: 0,
    "lo": lambda _: 0,
    "now_s": lambda _: 1,
    "max_results": lambda _: 8,
    "now": lambda _: 1,
    "ops": lambda world: [world.op()],
    "pools": lambda world: [world.get("HostPool")],
    "rank": lambda _: 0,
    "rules": lambda _: [],
    "run": lambda _: b"abc",
    "slab_id": lambda _: 1,
    "slabs": lambda world: [[world.get("SlabFile")]],
    "slot": lambda _: 0,
    "slots": lambda _: np.arange(4, dtype=np.int32),
    "stripe": lambda _: bytearray(STRIPE),
    "stuck_s": lambda _: 30.0,
    "tag": lambda _: bytes(TAG_BYTES),
    "tiers_mask": lambda _: 3,
    "ticket": lambda world: world.ticket(),
    "tokens": lambda _: [1, 2, 3, 4],
    "written": lambda _: 1,
}

USUAL: dict[str, object] = {"int": 1, "float": 0.5, "bool": True, "str": "a", "bytes": b"a", "": 1}


def valid_arguments(target: Target, world: World) -> dict[str, Any]:
    """What a caller would give: parameters with a default may be left out."""
    if target.name in ARGUMENTS:
        return dict(ARGUMENTS[target.name](world))
    return {p.name: valid_argument(p, world, target) for p in target.parameters if not _optional(target, p)}


def valid_argument(parameter: Parameter, world: World, target: Target) -> Any:
    usual = ARGUMENTS[target.name](world).get(parameter.name) if target.name in ARGUMENTS else None
    if usual is not None:
        return usual
    if target.name == "HostPool.wait_ready" and parameter.name == "slots":
        return SLOTS
    base = parameter.annotation.removesuffix(" | None")
    if base in RECIPES:
        return world.get(base)
    if base == "PageMover":
        return world.get("HostMover")
    if parameter.name in BY_NAME:
        return BY_NAME[parameter.name](world)
    return USUAL.get(base, 1)


def _optional(target: Target, parameter: Parameter) -> bool:
    return parameter.name in OPTIONAL.get(target.name, ())


OPTIONAL = {
    "DiskLane.__init__": ("faults", "zero_fill", "register_buffers"),
    "IoFaultRule.__init__": ("write", "disk", "nth", "offset", "error", "bytes", "times"),
    "EngineKeyChain.extend": ("start",),
    "TokenChain.extend": ("start",),
    "TransferEngine.submit": ("stream", "gated"),
}
