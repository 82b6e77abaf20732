"""Engines with several KV groups that run at the same time and share their pages. vLLM's own scheduler drives them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm.v1.kv_cache_interface import KVCacheSpec

from flexkv.cache.manager import LocalCacheManager
from flexkv.cache.tiers.running_peers.tier import LivePeerTier
from flexkv.facts.keys import Keys
from flexkv.peers.share import PeerShare
from flexkv.unit.live_unit import LiveUnit
from tests.unit.adapters.scheduled_engine import ScheduledEngine
from tests.unit.adapters.scheduled_pools import full, state, window
from tests.unit.peers.live_engines import DEADLINE_S, wait_for

PROMPT = list(range(10, 60))
"""A prompt of 50 tokens. A hit ends at token 48, which is a multiple of all block sizes of KINDS."""

HIT = 48

KINDS: dict[str, tuple[KVCacheSpec, ...]] = {
    "window": (full(4), window(4, 9)),
    "windows of other blocks": (full(4), window(8, 13), window(16, 5)),
    "two full": (full(4), full(4), window(8, 9)),
    "two full, of other blocks": (full(4), full(8), window(4, 9)),
    "state": (full(4), state(4)),
    "window alone": (window(4, 9),),
}

Start = Callable[..., ScheduledEngine]


def sharing(folder: Path, share: str = "host+disk") -> dict[str, Any]:
    return {"peers.share": share, "peers.folder": str(folder)}


def unit_of(engine: ScheduledEngine) -> LiveUnit:
    unit = engine.connector.scheduler.unit
    assert isinstance(unit, LiveUnit)
    return unit


def manager_of(engine: ScheduledEngine) -> LocalCacheManager:
    manager = unit_of(engine).manager
    assert isinstance(manager, LocalCacheManager)
    return manager


def peer_tiers(engine: ScheduledEngine) -> list[LivePeerTier]:
    return [tier for tier in manager_of(engine).tiers if isinstance(tier, LivePeerTier)]


def peer_share(engine: ScheduledEngine) -> PeerShare:
    share = peer_tiers(engine)[0]._share
    assert isinstance(share, PeerShare)
    return share


def keys_of(engine: ScheduledEngine, tokens: list[int]) -> list[Keys]:
    """Returns the keys of the blocks of these tokens, one array per KV group."""
    keys = engine.connector.scheduler.requests.of(engine.add("probe", tokens)).keys()
    engine.end("probe")
    return [of_group.copy() for of_group in keys]


def knows_pages(engine: ScheduledEngine, pages: int) -> bool:
    """Whether each peer tier of the engine knows exactly `pages` pages of its peers."""
    for tier in peer_tiers(engine):
        tier.take_all_news()
    return all(len(tier.presence) == pages for tier in peer_tiers(engine))


def remove_page(engine: ScheduledEngine, group: int, end: int) -> None:
    """Evicts a page of the prompt from host memory: the page of KV group `group` that ends at token `end`."""
    hub = manager_of(engine).hub
    keys = keys_of(engine, PROMPT)[group]
    block = manager_of(engine).tables.specs[group].block_tokens
    entries = hub.index.find(group, keys[end // block - 1 : end // block])
    assert hub.remove(group, entries) == 1


def pair(start: Start, kind: str, **settings: Any) -> tuple[ScheduledEngine, ScheduledEngine]:
    """Starts an engine that computes the prompt, and another engine, and waits until the other one has learned of these
    pages. Returns the two engines."""
    one, other = start(kind, **settings), start(kind, **settings)
    assert one.run("one", PROMPT) == 0
    wait_for(lambda: knows_pages(other, manager_of(one).cached_blocks()))
    return one, other


def until(
    engine: ScheduledEngine, done: Callable[[], bool], between: Callable[[], None] = lambda: None
) -> None:
    """Runs steps of the engine until `done` returns True. Passes `between` to `ScheduledEngine.step`."""
    ends_s = time.monotonic() + DEADLINE_S
    while not done():
        assert time.monotonic() < ends_s, "it never came to that"
        engine.step(between)
