"""Measures what it costs a unit (the ranks of an engine that share one cache manager) to share pages with other running
units. Copies from a peer's host pool are compared with plain copies between the same mappings; lookups that find
nothing at a peer are compared with lookups without peers.

    python -m benchmarks.live_peers
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection

import numpy as np

from flexkv import c_ext
from flexkv.cache.base import GroupSpec
from flexkv.cache.manager import LocalCacheManager
from flexkv.cache.tiers.contract import TierFacts
from flexkv.cache.tiers.host.tier import HostTier
from flexkv.cache.tiers.running_peers.tier import LivePeerTier
from flexkv.cache.tiers.tables import TierContext
from flexkv.peers.pool_reader import PoolReader
from flexkv.transfer.host_pool import HostPool

PAGE_BYTES = 2 << 20
PAGES = 128
ROUNDS = 7
LOOKUP_BLOCKS = 1024
LOOKUPS = 2000
TOKENS = 16
PEER_SLOTS = 4096
REPLACED = (16, 64, 256, 4096)
"""Numbers of pages that the peer replaces between two lookups. They hold 256, 1,024, 4,096 and 65,536 tokens."""


def seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def copies() -> None:
    theirs, ours = (HostPool(PAGE_BYTES, PAGES, shared=True) for _ in range(2))
    for pool in (theirs, ours):
        pool.wait_ready(PAGES, 60.0)
        for slot in range(PAGES):
            pool.slot(slot)[:] = 1
    keys = np.random.default_rng(0).integers(0, 256, (PAGES, 16), dtype=np.uint8)
    board, index = c_ext.SlotBoard(PAGES), c_ext.BlockIndex([PAGES])
    index.grow(0, PAGES)
    index.tell(board)
    _, entries, slots, *_ = index.insert(0, keys, PAGES)
    tokens, nothing = np.full(PAGES, TOKENS, np.uint32), np.zeros(0, np.uint64)
    board.note(slots, tokens, nothing, nothing, 0)
    index.finish(entries, np.ones(PAGES, np.uint8))
    _, fd, _, file_bytes = theirs.native.address()
    offset, per_extent, stride = theirs.native.file_layout
    directory = c_ext.PeerDirectory()
    directory.add(
        (board.fd, board.bytes),
        (fd, file_bytes, offset, PAGE_BYTES, per_extent, stride),
        [([(0, 0, PAGE_BYTES)], [])],
    )
    directory.follow()

    def from_peer() -> None:
        ends, _, _ = directory.bring(ours.native, 0, keys, tokens, np.zeros(PAGES, np.uint64), slots)
        assert not ends.any()

    def plain() -> None:
        for slot in range(PAGES):
            np.copyto(ours.slot(slot), theirs.slot(slot))

    rates = {}
    for name, work in (("peer", from_peer), ("memcpy", plain)):
        work()
        rates[name] = PAGES * PAGE_BYTES / statistics.median(seconds(work) for _ in range(ROUNDS)) / 1e9
        print(f"{name}: {rates[name]:.1f} GB/s, pages of {PAGE_BYTES >> 20} MiB")
    print(f"share of memcpy: {rates['peer'] / rates['memcpy']:.2f}")


class NobodyElse:
    """Takes the place of the object through which a unit finds its peers, and reports that there are no peers."""

    joined = 0
    departed: tuple[int, ...] = ()
    turn = (0, 1)
    leaves = False

    def start(self, weights: bytes) -> None: ...
    def retire(self) -> None: ...
    def close(self) -> None: ...
    def end_departed(self, peers: Collection[int]) -> None: ...


class FullPeer:
    """A unit whose slots are all in use, so that each page that it stores replaces another one."""

    def __init__(self) -> None:
        self.board = c_ext.SlotBoard(PEER_SLOTS)
        self._random = np.random.default_rng(2)
        self._next = 0

    def replace(self, pages: int) -> None:
        slots = np.arange(self._next, self._next + pages, dtype=np.int32) % PEER_SLOTS
        self._next += pages
        self.board.hide(slots)
        nothing = np.zeros(0, np.uint64)
        self.board.note(slots, np.full(pages, TOKENS, np.uint32), nothing, nothing, 0)
        self.board.show(slots, 0, self._random.integers(0, 256, (pages, 16), dtype=np.uint8))


def lookups() -> None:
    rng = np.random.default_rng(1)
    asked = [rng.integers(0, 256, (LOOKUP_BLOCKS, 16), dtype=np.uint8)]
    peer, directory = FullPeer(), c_ext.PeerDirectory()
    directory.add((peer.board.fd, peer.board.bytes))

    def live(context: TierContext) -> LivePeerTier:
        reader = PoolReader.__new__(PoolReader)
        tier = LivePeerTier(context, directory, TierFacts("peer-host"), NobodyElse(), reader)
        known = rng.integers(0, 256, (100_000, 16), dtype=np.uint8)
        tier._enter(0, known, np.full(len(known), TOKENS, np.int32), np.zeros(len(known), np.uint64))
        return tier

    managers = [
        LocalCacheManager([GroupSpec(TOKENS, 1 << 16)], tiers=tiers)
        for tiers in ([HostTier], [HostTier, live])
    ]
    for manager in managers:
        manager.hub.grow(0, 1 << 16)
    tier = managers[1].tiers[1]
    assert isinstance(tier, LivePeerTier)

    def look(manager: LocalCacheManager) -> float:
        def work() -> None:
            manager.match("r", asked, 0)
            manager.release("r")

        return seconds(work) * 1e6

    alone, shares = (statistics.median(look(manager) for _ in range(LOOKUPS)) for manager in managers)
    print(f"lookup of {LOOKUP_BLOCKS} blocks that nobody has: {alone:.1f} us, with peers {shares:.1f} us")
    print(f"more with peers: {shares - alone:.1f} us")
    for replaced in REPLACED:
        took: list[list[float]] = [[], []]
        polls = []
        for number in range(LOOKUPS // 10):
            peer.replace(replaced)
            directory.follow()
            # The managers take turns, because replacing pages changes what the CPU caches hold for the next
            # lookup.
            took[number % 2].append(look(managers[number % 2]))
            polls.append(seconds(tier.take_all_news) * 1e6)
        alone, shares = map(statistics.median, took)
        print(
            f"after a peer replaced {replaced} pages: {alone:.1f} us, with peers {shares:.1f} us, "
            f"more {shares - alone:.1f} us; the poll that takes the news over: {statistics.median(polls):.1f} us"
        )


if __name__ == "__main__":
    copies()
    lookups()
