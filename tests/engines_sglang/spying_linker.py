"""flexkv's linker, extended for tests: it also overwrites the engine's pool at every flush, and notes which pages were
moved.

It runs in the engine's scheduler processes. A test gives it orders as files in the folder in the environment variable
SPY_FOLDER. It writes its notes into the same folder.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flexkv.adapters.sglang.linker import FlexKVLinker
from flexkv.adapters.sglang.pages import pages_of
from flexkv.adapters.sglang.pools import view_of
from flexkv.adapters.sglang.rank_cache import RankCache

FOLDER = "SPY_FOLDER"
NOISE_BYTE = 0x41
"""The byte that overwrites a pool. The resulting numbers are 12.08 in float32 and 2.25 in fp8, far from the model's
keys and values.
"""


class SpyingLinker(FlexKVLinker):
    """The linker that tests use. Rank R writes its notes as lines of JSON to `notes-R`.

    The file `corrupt-R` makes the rank damage its stored pages at its next reset. The file `die-R`, with the word
    `load` or `offload`, makes the rank kill its own process when it has started the next load or offload. While the
    file `no-prefetch-R` exists, the rank prefetches nothing.
    """

    def __init__(self, server_args: Any, params: Any, **named: Any) -> None:
        from sglang.srt.runtime_context import get_parallel

        self._rank = get_parallel().tp_rank
        self._folder = Path(os.environ[FOLDER])
        super().__init__(server_args, params, **named)
        self._note("start", cached=self._cache.manager.cached_blocks())

    def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
        # If the engine gets one request at a time, all pages in this count are prefetched pages of the current request.
        begun = sum(tier.counts.prefetched for tier in self._cache.manager.tiers)
        found = super().lookup(rid, transfers)
        if not self._prefetching:
            self._note("lookup", asked=len(transfers[0].keys), found=len(found), prefetched=begun)
        return found

    def prefetch(self, tree_cache: Any, request: Any) -> None:
        if not (self._folder / f"no-prefetch-{self._rank}").exists():
            super().prefetch(tree_cache, request)

    def load(self, rid: str, transfers: list[Any]) -> bool:
        self._note("load", pages=pages_of(transfers[0].device_indices, self._cache.page_tokens).tolist())
        return super().load(rid, transfers)

    def start_layer_wise_loading(self) -> int:
        loads = bool(self._queued)
        index = super().start_layer_wise_loading()
        if loads:
            self._die_if_told("load")
        return index

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        landed = super().finish_layer_wise_loading(counter_index)
        straight = sum(tier.counts.gds_read for tier in self._cache.manager.tiers)
        self._note("landed", landed=landed, straight=straight)
        return landed

    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:
        taken = super().offload(transfers, session_id)
        if taken:
            self._note(
                "offload", pages=pages_of(transfers[0].device_indices, self._cache.page_tokens).tolist()
            )
        self._die_if_told("offload")
        return taken

    def pop_completed_offload(self) -> bool:
        stored = super().pop_completed_offload()
        self._note("stored", stored=stored)
        return stored

    def reset(self) -> None:
        super().reset()
        [pool] = self.pools.values()
        for tensor in view_of(pool, self._cache.page_tokens).tensors:
            tensor.view(torch.uint8).fill_(NOISE_BYTE)
        if (order := self._folder / f"corrupt-{self._rank}").exists():
            order.unlink()
            self._note("corrupt", slots=damage(self._cache))
        self._note("reset", cached=self._cache.manager.cached_blocks())
        self._cache.manager.check_integrity()

    def _die_if_told(self, moment: str) -> None:
        order = self._folder / f"die-{self._rank}"
        if order.exists() and order.read_text() == moment:
            order.unlink()
            os.kill(os.getpid(), signal.SIGKILL)

    def _note(self, what: str, **about: Any) -> None:
        with (self._folder / f"notes-{self._rank}").open("a") as notes:
            notes.write(json.dumps({"what": what, **about}) + "\n")


def damage(cache: RankCache) -> int:
    """Reverses the order of the bytes in every slot of host memory. Returns the number of slots."""
    pool = cache._unit.pool
    for slot in range(pool.ready_slots):
        content = pool.slot(slot)
        content[:] = np.ascontiguousarray(content[::-1])
    return int(pool.ready_slots)
