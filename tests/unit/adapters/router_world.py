"""A router that knows an engine only from its KV events, and an engine that gets random requests."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.request import Request

from tests.unit.adapters.mini_engine import MiniEngine
from tests.unit.adapters.vllm_objects import BLOCK_TOKENS, make_request

HOST_SLOTS, DISK_SLOTS = 12, 24
IMAGE_BYTES = 8192
PREFIXES = 6
LONGEST = 5


class Router:
    """Stands for the routers of Dynamo and llm-d: keeps the announced blocks, by medium.

    Those routers count how often a block was announced, and drop the block after the same number of removals. So this
    router fails if a block is announced twice, or removed without having been announced.

    Args:
        misses_one: for control tests. The router ignores one event that reports a removal: the one that removes the
            first block of a prompt from the last medium that has it. If the block is announced again before a request
            needs it, the router ignores another event of this kind instead.
    """

    def __init__(self, misses_one: bool = False) -> None:
        self.has: dict[str, set[Any]] = {"CPU": set(), "STORAGE": set()}
        self.removals = 0
        self._misses_one = misses_one
        self._missed: tuple[str, Any] | None = None
        self._firsts: set[Any] = set()

    def hear(self, events: Iterable[Any]) -> None:
        for event in events:
            if isinstance(event, AllBlocksCleared):
                for blocks in self.has.values():
                    blocks.clear()
            elif isinstance(event, BlockStored):
                if event.parent_block_hash is None:
                    self._firsts.update(event.block_hashes)
                for each in event.block_hashes:
                    self._stored(event.medium, each)
            else:
                assert isinstance(event, BlockRemoved)
                self.removals += 1
                for each in event.block_hashes:
                    self._removed(event.medium, each)

    def _stored(self, medium: str, block: Any) -> None:
        if self._missed is not None and block == self._missed[1]:
            self.has[self._missed[0]].discard(block)
            self._missed = None
        assert block not in self.has[medium], f"announced twice on {medium}"
        self.has[medium].add(block)

    def _removed(self, medium: str, block: Any) -> None:
        assert block in self.has[medium], f"never announced on {medium}"
        is_last = not any(block in self.has[other] for other in self.has if other != medium)
        if self._misses_one and self._missed is None and is_last and block in self._firsts:
            self._missed = (medium, block)
        else:
            self.has[medium].remove(block)

    def predicted(self, request: Request) -> int:
        """Returns how many of the request's tokens, according to the router, will be served from the cache."""
        known = self.has["CPU"] | self.has["STORAGE"]
        hashes = [maybe_convert_block_hash(each) for each in request.block_hashes]
        leading = next((at for at, each in enumerate(hashes) if each not in known), len(hashes))
        return leading * BLOCK_TOKENS


class World:
    """An engine that gets random requests and passes its events to a router.

    Args:
        folder: folder of the engine's disk tier. A second world with the same folder finds the pages of the first one.
    """

    def __init__(self, folder: Path, router: Router, seed: int = 0, **settings: Any) -> None:
        disk: dict[str, Any] = {
            "host.bytes": HOST_SLOTS * 4096,
            "disk.folders": str(folder),
            "disk.bytes_per_folder": DISK_SLOTS * IMAGE_BYTES + (64 << 10),
            "disk.compute_if_faster": False,
        }
        self.engine = MiniEngine(with_events=True, **(disk | settings))
        self.router = router
        self._random = random.Random(seed)
        self._made = 0

    def request(self) -> Request:
        """Makes a request whose prompt has a random number of full blocks and one more token. Prompts share their first
        blocks.
        """
        blocks = self._random.randint(1, LONGEST)
        prefix = self._random.randrange(PREFIXES)
        parted = self._random.randint(0, blocks)
        tokens = [1000 * prefix + at for at in range(parted * BLOCK_TOKENS)]
        tokens += [
            1000 * prefix + 100 * self._random.randint(1, 2) + at
            for at in range((blocks - parted) * BLOCK_TOKENS)
        ]
        self._made += 1
        return make_request([*tokens, 7], f"r{self._made}")

    def settle(self) -> None:
        """Waits until the disk has written all pages, then passes the events to the router."""
        self.engine.drain()
        self.engine.until(lambda: not self.engine.unit.driver.busy)
        self.router.hear(self.engine.take_events())

    def serve_one(self) -> tuple[int, int]:
        """Runs a request. Returns the number of tokens that the router predicted, and the number that was served from
        the cache.
        """
        request = self.request()
        self.settle()
        predicted = self.router.predicted(request)
        served = self.engine.run(request)
        self.engine.forget()
        return predicted, served

    def disturb(self) -> bool:
        """Drops some pages in 5 of 100 calls, and replaces the weights in 1 of 100. Returns whether it replaced the
        weights.
        """
        drawn = self._random.random()
        if drawn < 0.05:
            self.engine.unit.manager.forget(0, self.engine.keys_of(self.request()))
        elif drawn < 0.06:
            self.engine.side.reset()
            return True
        return False
