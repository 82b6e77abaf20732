"""The executor loads pages that are on disk in the order of SGLang's pool, and checks every number that it reads."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch

from flexkv.adapters.common.rank_pool import RankPool
from flexkv.adapters.sglang.rank_cache import RankCache
from flexkv.adapters.tensorrt_llm.arguments import EngineArguments
from flexkv.adapters.tensorrt_llm.identity import engine_namespace
from flexkv.cache.keys import TokenChain
from flexkv.config import load_config
from flexkv.facts.ranks import UnitOwner
from flexkv.layout.sglang import SglangHandler
from tests.unit.tensorrt_llm.group import LONG_S
from tests.unit.tensorrt_llm.pool import Pool
from tests.unit.tensorrt_llm.request import Request
from tests.unit.tensorrt_llm.world import (
    PROMPT,
    SHAPE,
    WHOLE,
    Make,
    World,
    arguments,
    settings,
    wait_for_the_disk,
    write_model,
)

PAGES = WHOLE // SHAPE.tokens


def over_sglangs_pages(make_world: Make, folder: Path, spoiled: bool) -> World:
    """Makes a world that has fetched pages from disk to host memory. The pages were stored in the order of SGLang's
    pool.
    """
    given = arguments(model=write_model(folder, SHAPE.size, SHAPE.layers))
    common = {
        "FLEXKV_KEYS_SCHEME": "common",
        "FLEXKV_DISK_FOLDERS": str(folder / "disk"),
        "FLEXKV_DISK_BYTES_PER_FOLDER": "4MiB",
        "FLEXKV_DISK_COMPUTE_IF_FASTER": "false",
    }
    store_as_sglang_does(common, EngineArguments.of(given), spoiled)
    world: World = make_world(common, llm_args=given)
    world.warm_up()
    wait_for_the_disk(world)
    return world


def test_what_sglang_stored_is_loaded(make_world: Make, tmp_path: Path) -> None:
    world = over_sglangs_pages(make_world, tmp_path, spoiled=False)
    assert world.hit(world.serve(PROMPT)) == WHOLE
    world.check()


def test_wrong_numbers_would_be_seen(make_world: Make, tmp_path: Path) -> None:
    """The control: if one number of one page on disk is wrong, the executor notices it."""
    world = over_sglangs_pages(make_world, tmp_path, spoiled=True)
    assert world.hit(world.serve(PROMPT)) == WHOLE
    assert world.executor.wrong


def store_as_sglang_does(common: dict[str, str], arguments_of: EngineArguments, spoiled: bool) -> None:
    """Writes the prompt's expected KV into a pool of SGLang's order, and stores the pages of this pool on disk under
    SGLang's page hashes.
    """
    s = SHAPE
    config = load_config(None, {**{k: v for k, v in os.environ.items() if k == "PATH"}, **settings(**common)})
    words = torch.zeros(2, s.layers, (PAGES + 1) * s.tokens, s.heads, s.size, dtype=torch.int32)
    truth = Pool(s, 0).truth(Request(1, list(PROMPT)), 0, WHOLE).astype(np.uint32)
    # Converts [layers, K and V, heads, positions, size] to [K and V, layers, slots, heads, size]. Page 0 is reserved.
    words[:, :, s.tokens :] = torch.from_numpy(truth.view(np.int32).copy()).permute(1, 0, 3, 2, 4)
    if spoiled:
        words[1, 2, 3 * s.tokens + 1, 0, 5] += 1
    pool = words.view(torch.float32)
    k, v = list(pool[0]), list(pool[1])
    handler = SglangHandler(s.tokens, k_buffers=k, v_buffers=v)
    namespace = engine_namespace(arguments_of, config, s.tokens, "float32")
    cache = RankCache(
        config,
        RankPool(handler.view(), handler.format_id(), s.tokens, (*k, *v), s.layers, s.heads),
        UnitOwner("model", namespace, "dp0.pp0of1.tp0of1"),
        stream_of=lambda device: 0,
    )
    chain = TokenChain(s.tokens)
    chain.extend(PROMPT)
    hashes = [digest.tobytes().hex() for digest in chain.digests]
    cache.store("s", cache.keys(hashes), np.arange(1, PAGES + 1, dtype=np.int32), lambda done: None, None)
    assert cache.quiesce(LONG_S)
    cache.close()
