"""flexkv as HiCache's storage behind the host tier of a real SGLang engine."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from demo.sglang_process import PAGE_TOKENS, SglangProcess
from tests.engines_sglang.conftest import Judge, request

STORED_DEADLINE_S = 60.0
HIT_TOKENS = 200 // PAGE_TOKENS * PAGE_TOKENS


def hicache(**settings: Any) -> dict[str, Any]:
    """Engine arguments; a prefetch is waited for, so that what is stored is served."""
    extra = {key.replace("__", "."): value for key, value in settings.items()}
    extra |= {
        "backend_name": "flexkv",
        "module_path": "flexkv.adapters.sglang",
        "class_name": "FlexKVHiCache",
        "interface_v1": 1,
        "prefetch_threshold": PAGE_TOKENS,
    }
    return {
        "enable_hierarchical_cache": True,
        "hicache_ratio": 2.0,
        "hicache_mem_layout": "page_first_direct",
        "hicache_io_backend": "direct",
        "hicache_write_policy": "write_through",
        "hicache_storage_backend": "dynamic",
        "hicache_storage_prefetch_policy": "wait_complete",
        "hicache_storage_backend_extra_config": json.dumps(extra),
    }


def stored_bytes(disk: Path) -> str:
    return str(sorted((str(file), file.stat().st_mtime_ns) for file in disk.rglob("*") if file.is_file()))


def test_pages_come_back_after_a_flush_and_after_a_restart(model: Path, judge: Judge, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    settings = {"host__bytes": 32 << 20, "disk__folders": str(disk), "disk__bytes_per_folder": 64 << 20}
    with SglangProcess(model, tmp_path / "first.log", hicache(**settings)) as engine:
        [cold] = engine.call("generate", requests=[request("a")])
        judge("a", cold)
        assert cold["cached"] == 0
        at_rest(disk)
        assert engine.call("flush"), "the device's and the host's tiers are empty, the storage is not"
        [answer] = engine.call("generate", requests=[request("a")])
        judge("a", answer)
        assert answer["cached"] == HIT_TOKENS, answer
        assert engine.call("flush")
        [other] = engine.call("generate", requests=[request("a", extra_key="another tenant")])
        judge("a", other)
        assert other["cached"] == 0, other
        at_rest(disk)
    with SglangProcess(model, tmp_path / "second.log", hicache(**settings)) as engine:
        [answer] = engine.call("generate", requests=[request("a")])
        judge("a", answer)
        assert answer["cached"] == HIT_TOKENS, answer


def at_rest(disk: Path) -> None:
    """Waits until nothing in the folder has changed for three seconds."""
    ends_s = time.monotonic() + STORED_DEADLINE_S
    before, since_s = "", time.monotonic()
    while time.monotonic() - since_s < 3:
        assert time.monotonic() < ends_s, "the disk tier never came to rest"
        time.sleep(0.5)
        if (now := stored_bytes(disk)) != before:
            before, since_s = now, time.monotonic()
