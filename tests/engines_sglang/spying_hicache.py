"""flexkv's HiCache storage, extended for tests: it overwrites memory when a test orders it. It runs in the engine's
scheduler processes.

A test gives orders as files in the folder in the environment variable SPY_FOLDER. `spoil-R` makes rank R's next lookup
first overwrite SGLang's host tier, which must be empty. `corrupt-R` makes the lookup first damage flexkv's pages in
host memory.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from flexkv.adapters.sglang.hicache import FlexKVHiCache
from tests.engines_sglang.spying_linker import FOLDER, NOISE_BYTE, damage


class SpyingHiCache(FlexKVHiCache):
    """flexkv's storage class, which also executes a test's orders."""

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        with self._ready.lock:
            if self._ordered("spoil"):
                self.mem_pool_host.kv_buffer.view(torch.uint8).fill_(NOISE_BYTE)
            if self._ordered("corrupt"):
                damage(self._ready.cache)
            return super().batch_exists(keys, extra_info)

    def _ordered(self, what: str) -> bool:
        from sglang.srt.runtime_context import get_parallel

        order = Path(os.environ[FOLDER]) / f"{what}-{get_parallel().tp_rank}"
        if order.exists():
            order.unlink()
            return True
        return False
