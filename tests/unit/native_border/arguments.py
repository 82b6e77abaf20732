"""Valid arguments for every call of the native core.

The value of an argument comes from the first of these sources that has one: `ARGUMENTS`, by the call's name; the shared
object of the class in the stub's annotation; `BY_NAME`, by the parameter's name; and `USUAL`, by the annotation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.unit.native_border.copy_arguments import COPY_ARGUMENTS
from tests.unit.native_border.index_arguments import INDEX_ARGUMENTS, entries_of
from tests.unit.native_border.recipes import (
    BLOCKS,
    RECIPES,
    SLOTS,
    STRIPE,
    codec_runs,
    head_to_token_major,
    random_keys,
    view_runs,
)
from tests.unit.native_border.share_arguments import SHARE_ARGUMENTS
from tests.unit.native_border.surface import Parameter, Target
from tests.unit.native_border.world import World
from tests.unit.transfer.fake_nvtx import build_fake_nvtx

TAG_BYTES = 40

NEED_A_GPU = ("HostPool.pin", "TransferEngine.record", "cuda_identity")
"""Calls that need a GPU. Without a GPU, the core refuses them whatever their arguments are."""

NO_CONSTRUCTOR = ("Found.__init__", "FoundLengths.__init__")
"""Constructors that Python cannot call: only methods of other classes make objects of these classes."""


def _address(world: World) -> dict[str, object]:
    pool = world.get("HostPool")
    pid, fd, token, file_bytes = pool.address()
    shape = {name: getattr(pool, name) for name in ("slot_bytes", "slots", "extent_bytes")}
    return {"pid": pid, "fd": fd, "token": token, "file_bytes": file_bytes, **shape}


def _fresh_slab(world: World) -> dict[str, object]:
    path, header, slot, slots, number = world.fresh("SlabFile").row
    return {"path": path, "header_bytes": header, "slot_bytes": slot, "slots": slots, "id": number}


def _two_images(world: World) -> dict[str, object]:
    conversion = world.get("PageConversion")
    return {"source": bytearray(conversion.stripe_bytes), "target": bytearray(conversion.stripe_bytes)}


ARGUMENTS: dict[str, Callable[[World], dict[str, object]]] = {
    **INDEX_ARGUMENTS,
    **COPY_ARGUMENTS,
    **SHARE_ARGUMENTS,
    "DiskLane.take_out": lambda _: {"disk": 0, "reason": "why"},
    "BlockIndex.find_marked": lambda _: {"group": 0, "mark": b"ab"},
    "EngineKeyChain.__init__": lambda _: {"namespace": bytes(32), "group": 0},
    "EngineKeyChain.extend": lambda world: {"engine_keys": [bytes([n]) * 32 for n in range(4)]},
    "GDSManager.__init__": lambda world: {
        "ssd_files": {0: [world.path()]},
        "num_devices": 1,
        "gpu_device_id": -1,
    },
    "GDSManager.register_pool": lambda _: {
        "address": 1 << 20,
        "blocks": 4,
        "block_stride": 8192,
        "block_bytes": 4096,
    },
    "GdsLane.__init__": lambda world: {
        "codecs": [world.get("PageCodec")],
        "stripe": 0,
        "slabs": [[world.get("SlabFile").row]],
    },
    "set_cufile_wheels": lambda world: {"paths": [world.path()]},
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
        "runs": view_runs(world),
        "num_blocks": BLOCKS,
        "stripe_bytes": STRIPE,
    },
    "PageCodec.__init__": lambda _: {"stripe_bytes": [STRIPE], "runs": [codec_runs()]},
    "PageConversion.__init__": lambda _: dict(
        zip(("counts", "element_bytes", "source", "target"), head_to_token_major(), strict=True)
    ),
    "PageConversion.convert": _two_images,
    "SlabFile.__init__": _fresh_slab,
    "SlotImage.__init__": lambda _: {"stripe_bytes": [STRIPE, STRIPE]},
    "SlotImage.__eq__": lambda world: {"arg0": world.fresh("SlotImage")},
    "TokenChain.__init__": lambda _: {"block_tokens": 4, "seed": bytes(32)},
    "TransferEngine.__init__": lambda world: {
        "mover": world.get("HostMover"),
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
    "load_nvtx": lambda world: {"library": str(build_fake_nvtx(world.folder))},
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
    "entries": entries_of,
    "group": lambda _: 0,
    "hi": lambda _: 1,
    "image": lambda world: bytearray(world.get("PageCodec").image_bytes),
    "inner": lambda world: world.get("HostMover"),
    "io": lambda _: "threads",
    "keys": lambda _: random_keys(),
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
    "trailer": lambda world: bytearray(world.get("PageCodec").trailer_bytes),
    "tokens": lambda _: [1, 2, 3, 4],
    "written": lambda _: 1,
}

USUAL: dict[str, object] = {"int": 1, "float": 0.5, "bool": True, "str": "a", "bytes": b"a", "": 1}

OPTIONAL = {
    "DiskLane.__init__": ("wrapper", "zero_fill", "register_buffers"),
    "EngineKeyChain.extend": ("start",),
    "TokenChain.extend": ("start",),
    "TransferEngine.order_after": ("stream",),
    "TransferEngine.submit": ("stream", "gated", "after"),
}


def valid_arguments(target: Target, world: World) -> dict[str, Any]:
    """Returns the arguments that a caller would give. Leaves out parameters in `OPTIONAL`."""
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
