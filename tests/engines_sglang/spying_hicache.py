"""flexkv's HiCache storage that spoils and damages on order. Lives in the engine's scheduler process.

A file `spoil` in the folder SPY_FOLDER names makes the next lookup overwrite SGLang's host tier first, which must be
empty then; a file `corrupt` makes it damage what flexkv stores.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from flexkv.adapters.sglang.hicache import FlexKVHiCache
from tests.engines_sglang.spying_linker import FOLDER, NOISE_BYTE, damage


class SpyingHiCache(FlexKVHiCache):
    """As a user's storage class, but for the orders."""

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        folder = Path(os.environ[FOLDER])
        with self._lock:
            if (folder / "spoil").exists():
                self.mem_pool_host.kv_buffer.view(torch.uint8).fill_(NOISE_BYTE)
                (folder / "spoil").unlink()
            if (folder / "corrupt").exists():
                damage(self._ready)
                (folder / "corrupt").unlink()
            return super().batch_exists(keys, extra_info)
