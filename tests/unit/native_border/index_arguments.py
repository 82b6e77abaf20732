"""Valid arguments for calls of the index and the lookup: entries in the state that the call needs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from flexkv import c_ext
from tests.unit.native_border.recipes import lengths_of_three, lookup_of_three, random_keys
from tests.unit.native_border.world import World


def entries_of(world: World) -> object:
    if "entries" not in world.kept:
        world.kept["entries"] = world.get("BlockIndex").insert(0, random_keys(), 4)[1]
    return world.kept["entries"].copy()


def _pending(world: World) -> dict[str, object]:
    """Returns arguments with entries of an insert that has not been finished."""
    entries = world.get("BlockIndex").insert(0, random_keys(seed=next(world.numbers)), 4)[1]
    return {"entries": entries, "ok": np.ones(len(entries), np.uint8)}


def _ready(world: World) -> dict[str, object]:
    """Returns arguments with ready entries, which may be leased."""
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


INDEX_ARGUMENTS: dict[str, Callable[[World], dict[str, object]]] = {
    "BlockIndex.__init__": lambda _: {"group_slots": [8, 8], "policy": "lru"},
    "BlockIndex.adopt": lambda _: {"group": 1, "keys": random_keys(0), "slots": np.empty(0, np.int32)},
    "BlockIndex.check_integrity": lambda world: {"pinned": entries_of(world)},
    "BlockIndex.finish": _pending,
    "BlockIndex.grow": lambda _: {"group": 1, "slots": 16},
    "BlockIndex.insert": lambda _: {"group": 0, "keys": random_keys(seed=1), "max_new": 4},
    "BlockIndex.keep_leases": lambda world: {"leased": entries_of(world)},
    "BlockIndex.pin": _ready,
    "BlockIndex.pin_coming": _ready,
    "BlockIndex.pin_found": _found,
    "BlockIndex.retire": lambda _: {"group": 0, "gone": np.zeros(16, np.uint8)},
    "BlockIndex.set_expiry": lambda world: {"entries": entries_of(world), "expiries": np.ones(4, np.uint64)},
    "BlockIndex.touch": _ready,
    "BlockIndex.unpin": _leased,
    "BoundaryLookup.__init__": lambda world: {
        "tiers": world.get("TierLookup"),
        "rules": [world.get("GroupRule"), c_ext.GroupRule("full", 4)],
        "alignment_tokens": 4,
    },
    "BoundaryLookup.keep": lambda world: {"found": world.get("FoundLengths"), "tokens": 8},
    "BoundaryLookup.look": lengths_of_three,
    "GroupRule.__init__": lambda _: {"kind": "window", "block_tokens": 4, "reach": 2},
    "TierLookup.__init__": lambda world: {
        "presences": [world.get("BlockIndex"), c_ext.BlockIndex([16, 16])],
        "groups": 2,
    },
    "TierLookup.look": lookup_of_three,
}
