"""Mini engines that run at the same time and share their pages."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flexkv.adapters.vllm.engine_spec import EngineRole
from flexkv.cache.tiers.running_peers.tier import LivePeerTier
from flexkv.peers.share import PeerShare
from tests.unit.adapters.mini_engine import MiniEngine

PROMPT = list(range(100, 123))
"""A prompt of 5 complete blocks of 4 tokens, followed by 3 tokens."""

DEADLINE_S = 30.0

Make = Callable[..., MiniEngine]


def wait_for(done: Callable[[], bool]) -> None:
    ends_s = time.monotonic() + DEADLINE_S
    while not done():
        assert time.monotonic() < ends_s, "it never came to that"
        time.sleep(0.005)


def live_tiers(engine: MiniEngine) -> list[LivePeerTier]:
    return [tier for tier in engine.unit.manager.tiers if isinstance(tier, LivePeerTier)]


def share_of(engine: MiniEngine) -> PeerShare:
    share = live_tiers(engine)[0]._share
    assert isinstance(share, PeerShare)
    return share


def knows(engine: MiniEngine, pages: int) -> bool:
    """Whether each peer tier of the engine knows exactly `pages` pages of its peers."""
    for tier in live_tiers(engine):
        tier.take_all_news()
    return all(len(tier.presence) == pages for tier in live_tiers(engine))


def settings_of(folder: Path, share: str = "host+disk") -> dict[str, Any]:
    return {"peers.share": share, "peers.folder": str(folder), "role": EngineRole(recomputes=True)}


def distant_settings(root: Path, name: str) -> dict[str, Any]:
    """Returns the settings of a unit on machine `name`. The unit's disk folder is in a folder that all machines
    share."""
    return settings_of(root / name, "disk") | {
        "disk.folders": str(root / "shared" / name),
        "disk.bytes_per_folder": 4 << 20,
        "peers.across_machines": True,
        "peers.beat_s": 0.05,
    }


def live_files(root: Path) -> list[Path]:
    return sorted((root / "shared").glob("*/*/*/live.rows"))


def only_live_file(root: Path) -> Path:
    """Waits until exactly one unit's file with its heartbeat is there. Returns its path."""
    wait_for(lambda: len(live_files(root)) == 1)
    return live_files(root)[0]
