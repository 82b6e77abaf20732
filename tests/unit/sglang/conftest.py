"""A pool of torch tensors on the CPU with the memory layout of SGLang's pools, and one rank's cache that uses it.
SGLang need not be installed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from flexkv.adapters.common.rank_pool import RankPool
from flexkv.adapters.sglang.load_batches import LoadBatches
from flexkv.adapters.sglang.offloads import Offloads
from flexkv.adapters.sglang.rank_cache import RankCache
from flexkv.config import load_config
from flexkv.facts.ranks import UnitOwner
from flexkv.layout.sglang import SglangHandler

LAYERS, PAGES, PAGE_TOKENS, HEADS, HEAD_SIZE = 3, 40, 4, 2, 8


class World:
    """One rank: the pool's tensors, and the cache with its loads and offloads."""

    def __init__(self, mover: Any = None, fails_requests: bool = True, **settings: Any) -> None:
        shape = (LAYERS, PAGES * PAGE_TOKENS, HEADS, HEAD_SIZE)
        # As in SGLang, K and V are the two halves of one allocation.
        self.pool = torch.randn((2, *shape), generator=torch.Generator().manual_seed(1))
        k, v = list(self.pool[0]), list(self.pool[1])
        handler = SglangHandler(PAGE_TOKENS, k_buffers=k, v_buffers=v)
        config = load_config({"host.bytes": 1 << 20} | settings, {})
        self.cache = RankCache(
            config,
            RankPool(handler.view(), handler.format_id(), PAGE_TOKENS, (*k, *v), LAYERS),
            UnitOwner("a model", b"n" * 32, "tp0"),
            stream_of=lambda device: 0,
            mover=mover,
            fails_requests=fails_requests,
        )
        self.loads = LoadBatches(self.cache)
        self.offloads = Offloads(self.cache)

    def page(self, number: int) -> torch.Tensor:
        """Returns a copy of a page's content in all layers."""
        first = number * PAGE_TOKENS
        return self.pool[:, :, first : first + PAGE_TOKENS].clone()

    def store(self, hashes: list[str], pages: list[int]) -> bool:
        """Offloads pages and waits until the offload has ended. Returns whether it succeeded."""
        self.offloads.add(self.cache.keys(hashes), blocks(pages), None)
        assert self.cache.quiesce(30)
        assert self.offloads.completed() == 1
        return self.offloads.pop()


def hashes_of(*names: object) -> list[str]:
    return [hashlib.sha256(str(name).encode()).hexdigest() for name in names]


def blocks(pages: list[int]) -> Any:
    return torch.tensor(pages, dtype=torch.int32).numpy()


@pytest.fixture
def worlds() -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def make(mover: Any = None, **settings: Any) -> World:
        made.append(World(mover, **{name.replace("__", "."): value for name, value in settings.items()}))
        return made[-1]

    yield make
    for world in made:
        world.cache.manager.check_integrity()
        world.cache.close()
