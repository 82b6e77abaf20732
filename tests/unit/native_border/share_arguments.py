"""Valid arguments for the calls with which units share their pages: boards and directories of peers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from flexkv import c_ext
from tests.unit.native_border.recipes import random_keys
from tests.unit.native_border.world import World

PAGES = 2


def _board(world: World) -> tuple[int, int]:
    board = world.get("SlotBoard")
    return board.fd, board.bytes


def _peer(world: World) -> dict[str, object]:
    if "peer" not in world.kept:
        world.kept["peer"] = world.get("PeerDirectory").add(_board(world))
    return {"peer": world.kept["peer"]}


def _pages(world: World) -> dict[str, object]:
    return {
        "pool": world.get("HostPool"),
        "group": 0,
        "keys": random_keys(PAGES),
        "tokens": np.full(PAGES, 4, np.uint32),
        "expiries": np.zeros(PAGES, np.uint64),
        "slots": np.arange(PAGES, dtype=np.int32),
    }


SHARE_ARGUMENTS: dict[str, Callable[[World], dict[str, object]]] = {
    "BlockIndex.tell": lambda _: {"board": c_ext.SlotBoard(64)},
    "PeerDirectory.add": lambda world: {"board": _board(world)},
    "PeerDirectory.bring": _pages,
    "PeerDirectory.counts": _peer,
    "PeerDirectory.drop": lambda world: {"peer": world.get("PeerDirectory").add(_board(world))},
    "PeerDirectory.find": lambda _: {"group": 0, "keys": random_keys(1), "without": np.array([1], np.int32)},
    "PeerDirectory.pages": _peer,
    "PeerDirectory.read": lambda world: {
        **_peer(world),
        "slot": 0,
        "group": 0,
        "key": random_keys(1),
        "tokens": 4,
        "expiry": 0,
        "image": np.zeros(4096, np.uint8),
    },
    "PeerDirectory.retired": _peer,
    "PeerDirectory.take": lambda _: {"most": 8},
    "SlotBoard.__init__": lambda _: {"slots": 8},
    "SlotBoard.hide": lambda _: {"slots": np.arange(PAGES, dtype=np.int32)},
    "SlotBoard.show": lambda _: {
        "slots": np.arange(PAGES, dtype=np.int32),
        "group": 0,
        "keys": random_keys(PAGES),
    },
    "SlotBoard.note": lambda _: {
        "slots": np.arange(PAGES, dtype=np.int32),
        "tokens": np.full(PAGES, 4, np.uint32),
        "generations": np.ones(PAGES, np.uint64),
        "expiries": np.zeros(PAGES, np.uint64),
        "epoch": 1,
    },
}
