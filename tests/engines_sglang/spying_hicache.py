"""flexkv's HiCache storage that spoils and damages on order. Runs in the engine's scheduler process.

Orders are files in the folder named by SPY_FOLDER. `spoil-R` makes rank R's next lookup overwrite SGLang's host tier
first, which must be empty then; `corrupt-R` makes it damage flexkv's stored pages.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from flexkv.adapters.sglang.hicache import FlexKVHiCache
from tests.engines_sglang.spying_linker import FOLDER, NOISE_BYTE, damage


class SpyingHiCache(FlexKVHiCache):
    """The storage class that users have, plus the orders."""

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
