"""flexkv's linker with its eyes open: spoils the engine's pool at every flush, and writes down which pages moved.

Lives in the engine's scheduler process. What it does is told by files in the folder SPY_FOLDER names.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from flexkv.adapters.sglang.linker import FlexKVLinker
from flexkv.adapters.sglang.page_numbers import pages_of

FOLDER = "SPY_FOLDER"
NOISE = 7.25
"""What a spoiled pool holds: far from any key or value of the model."""


class SpyingLinker(FlexKVLinker):
    """Notes are lines of JSON in `notes`; a file `corrupt` makes the next reset damage what is stored."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self._folder = Path(os.environ[FOLDER])
        super().__init__(*arguments, **named)
        self._note("start", cached=self._cache.manager.cached_blocks())

    def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
        found = super().lookup(rid, transfers)
        self._note("lookup", asked=len(transfers[0].keys), found=len(found))
        return found

    def load(self, rid: str, transfers: list[Any]) -> bool:
        self._note("load", pages=pages_of(transfers[0].device_indices, self._page_size).tolist())
        return super().load(rid, transfers)

    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:
        self._note("offload", pages=pages_of(transfers[0].device_indices, self._page_size).tolist())
        return super().offload(transfers, session_id)

    def pop_completed_offload(self) -> bool:
        stored = super().pop_completed_offload()
        self._note("stored", stored=stored)
        return stored

    def reset(self) -> None:
        super().reset()
        [pool] = self.pools.values()
        for tensor in (*pool.k_buffer, *pool.v_buffer):
            tensor.fill_(NOISE)
        if (order := self._folder / "corrupt").exists():
            order.unlink()
            self._note("corrupt", slots=self._damage())
        self._note("reset", cached=self._cache.manager.cached_blocks())
        self._cache.manager.check_integrity()

    def _damage(self) -> int:
        """Turns round the bytes of every slot in host memory; how many it were."""
        pool = self._cache._unit.pool
        for slot in range(pool.ready_slots):
            content = pool.slot(slot)
            content[:] = np.ascontiguousarray(content[::-1])
        return int(pool.ready_slots)

    def _note(self, what: str, **about: Any) -> None:
        with (self._folder / "notes").open("a") as notes:
            notes.write(json.dumps({"what": what, **about}) + "\n")
