"""Objects of one case of the fuzzer, made at their first use."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np

from flexkv.transfer.graph import OpId, OpKind, Priority, TransferOp
from tests.unit.native_border.recipes import BLOCKS, RECIPES, RUN, RUNS, WAIT_S

TICKET_S = 0.2
"""Time for a graph to end; behind a graph whose layers nobody opens it does not end."""

NO_TICKET = 2**40
"""A ticket of no graph: an engine with a full queue gives none."""


class World:
    """Objects of one case, made at their first use and then shared by its calls."""

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
        """Addresses of the layers of a pool, with K and V of each block together."""
        pair = RUNS * BLOCKS * RUN
        return np.array([self.memory.ctypes.data, self.memory.ctypes.data + pair], np.int64)

    def ticket(self) -> int:
        """A ticket of a graph that has ended, unless graphs before it still wait for their layers to be opened."""
        engine = self.get("TransferEngine")
        if "ticket" not in self.kept:
            self.kept["ticket"] = engine.submit([self.op()], []) or NO_TICKET
            engine.wait(self.kept["ticket"], TICKET_S)
        return int(self.kept["ticket"])

    def op(self, layerwise: bool = False) -> TransferOp:
        ids = np.arange(2, dtype=np.int32)
        return TransferOp(OpId(next(self.numbers)), OpKind.D2H, 0, Priority.LOAD, ids, ids, layerwise)

    def gated(self) -> int:
        """A ticket of a graph whose layers are not opened yet; if the queue is full, the ticket made last."""
        made = self.get("TransferEngine").submit([self.op(layerwise=True)], [], None, True)
        self.kept["gated"] = made or self.kept.get("gated", NO_TICKET)
        return int(self.kept["gated"])

    def close(self) -> None:
        """Closes the objects with threads; they may be closed twice."""
        for name in ("TransferEngine", "GDSManager", "HostPool"):
            if name in self.kept:
                self.kept[name].close(*((WAIT_S,) if name == "TransferEngine" else ()))
