"""The objects that the calls of one case of the fuzzer share."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np

from flexkv.transfer.graph import OpId, OpKind, Priority, TransferOp
from tests.unit.native_border.recipes import BLOCKS, RECIPES, RUN, RUNS, WAIT_S

TICKET_S = 0.2
"""Seconds to wait for a graph to end. The wait must be short, because a graph never ends if an earlier graph waits for
layers that nobody opens."""

NO_TICKET = 2**40
"""A ticket that no graph has. Calls use it if the engine's queue is full, so that `submit` returns None."""


class World:
    """The objects of one case. Each object is made at its first use, and the case's calls share it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.numbers = itertools.count(1)
        self.kept: dict[str, Any] = {}
        self.memory = np.zeros((2 * RUNS, BLOCKS, RUN), np.uint8)

    def get(self, name: str) -> Any:
        """Returns the object of the class `name` that this case's calls share."""
        if name not in self.kept:
            self.kept[name] = self.fresh(name)
        return self.kept[name]

    def fresh(self, name: str) -> Any:
        return RECIPES[name](self)

    def path(self) -> str:
        return str(self.folder / f"file-{next(self.numbers)}")

    @property
    def pointers(self) -> np.ndarray:
        """Returns the addresses of the two layers of a pool. Each layer has K and V of each block together."""
        pair = RUNS * BLOCKS * RUN
        return np.array([self.memory.ctypes.data, self.memory.ctypes.data + pair], np.int64)

    def ticket(self) -> int:
        """Returns the ticket of a graph that has ended, unless an earlier graph still waits for its layers to be
        opened."""
        engine = self.get("TransferEngine")
        if "ticket" not in self.kept:
            self.kept["ticket"] = engine.submit([self.op()], []) or NO_TICKET
            engine.wait(self.kept["ticket"], TICKET_S)
        return int(self.kept["ticket"])

    def op(self, layerwise: bool = False) -> TransferOp:
        ids = np.arange(2, dtype=np.int32)
        return TransferOp(OpId(next(self.numbers)), OpKind.D2H, 0, Priority.LOAD, ids, ids, layerwise)

    def gated(self) -> int:
        """Submits a graph whose layers are not open, and returns its ticket. If the queue is full, returns the ticket
        of the last such graph.
        """
        made = self.get("TransferEngine").submit([self.op(layerwise=True)], [], None, True)
        self.kept["gated"] = made or self.kept.get("gated", NO_TICKET)
        return int(self.kept["gated"])

    def close(self) -> None:
        """Closes the objects that have threads. The case's calls may have closed them already."""
        for name in ("TransferEngine", "GDSManager", "HostPool"):
            if name in self.kept:
                self.kept[name].close(*((WAIT_S,) if name == "TransferEngine" else ()))
