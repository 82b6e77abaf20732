"""A running engine with HiCache, whose storage is flexkv."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from demo.sglang_process import PAGE_TOKENS, SglangProcess
from tests.engines_sglang.asked import Asked
from tests.engines_sglang.spied import wait_until_durable


class Stored(Asked):
    """An engine with the spying HiCache storage. The constructor starts the engine.

    Args:
        folder: folder for the log and the orders; must not exist yet.
        disk: folder of flexkv's disk tier.
        arguments: more engine arguments.
        settings: flexkv's settings by dotted name, with `__` for each dot.
    """

    def __init__(
        self,
        model: Path,
        folder: Path,
        disk: Path,
        arguments: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> None:
        self.folder, self.disk = folder, disk
        folder.mkdir()
        given = {**hicache(disk, **settings), **(arguments or {})}
        self._ranks = int(given.get("tp_size", 1))
        told = {"SPY_FOLDER": str(folder), **(environment or {})}
        self.engine = SglangProcess(model, folder / "engine.log", given, **told)

    def served(self, answer: dict[str, Any]) -> int:
        return int(answer["cached"])

    def forget(self) -> None:
        """Empties the engine's own tiers on the device and on the host, but not flexkv's storage. Also makes the next
        lookup overwrite the host tier.
        """
        wait_until_durable(self.disk)
        assert self.engine.call("flush")
        for rank in range(self._ranks):
            self.order("spoil", rank)

    def order(self, what: str, rank: int = 0) -> None:
        """Writes an order for the storage of a rank. The storage deletes the file when it executes the order."""
        (self.folder / f"{what}-{rank}").touch()


def hicache(disk: Path, **settings: Any) -> dict[str, Any]:
    """Returns the engine arguments for HiCache with flexkv. With them the engine waits for prefetches, so stored pages
    are hits.
    """
    extra = {
        "backend_name": "flexkv",
        "module_path": "tests.engines_sglang.spying_hicache",
        "class_name": "SpyingHiCache",
        "interface_v1": 1,
        "prefetch_threshold": PAGE_TOKENS,
        "host.bytes": 32 << 20,
        "disk.folders": str(disk),
        "disk.bytes_per_folder": 64 << 20,
    } | {key.replace("__", "."): value for key, value in settings.items()}
    return {
        "enable_hierarchical_cache": True,
        # With this ratio, SGLang's host tier has space for 2,457 tokens, fewer than the prompts of the eviction test
        # have.
        "hicache_ratio": 1.2,
        "hicache_mem_layout": "page_first_direct",
        "hicache_io_backend": "direct",
        "hicache_write_policy": "write_through",
        "hicache_storage_backend": "dynamic",
        "hicache_storage_prefetch_policy": "wait_complete",
        "hicache_storage_backend_extra_config": json.dumps(extra),
    }
