"""Operations on the block pool of a vLLM engine. They overwrite free blocks with garbage and shuffle the block ids.

The scheduler must be in the process that runs these operations (`IN_PROCESS`); the workers may be in other processes.
"""

from __future__ import annotations

import random
from typing import Any

from demo.engine_child import Operation

from .worker_calls import call_workers

GARBAGE_SCALE = 30.0
"""Standard deviation of the garbage. K and V of the model stay within a few units, so an output that depends on garbage
changes."""


def _block_pool(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool


def _overwrite(worker: Any, blocks: list[int], seed: int) -> int:
    """Runs in each worker: overwrites the given blocks of every layer with garbage. Returns the number of bytes
    written."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    written = 0
    for cache in worker.model_runner.kv_caches:
        target = cache[blocks]
        garbage = torch.randn(target.shape, generator=generator) * GARBAGE_SCALE
        cache[blocks] = garbage.to(cache.dtype)
        written += target.nbytes
    return written


def scribble(llm: Any, seed: int = 1) -> dict[str, Any]:
    """Writes garbage over every block that is free and not in the engine's own prefix cache."""
    pool = _block_pool(llm)
    named = {block for block, hashes in pool.cached_block_hashes_by_block.items() if hashes}
    blocks = [
        block.block_id
        for block in pool.free_block_queue.get_all_free_blocks()
        if block.block_hash is None and block.block_id not in named
    ]
    written = call_workers(llm, _overwrite, blocks, seed) if blocks else []
    return {"blocks": len(blocks), "bytes": sum(written), "free": pool.get_num_free_blocks()}


def spoil_cached(llm: Any, blocks: int, seed: int = 1) -> dict[str, Any]:
    """A control: writes garbage over the first `blocks` blocks in the engine's own prefix cache, so that hits on them
    give wrong answers.
    """
    pool = _block_pool(llm)
    cached = [block.block_id for block in pool.blocks if block.block_hash is not None]
    call_workers(llm, _overwrite, cached[:blocks], seed)
    return {"cached": len(cached)}


def shuffle(llm: Any, seed: int = 1) -> dict[str, Any]:
    """Puts the free blocks in random order. The next request then gets other block ids than the requests before it."""
    queue = _block_pool(llm).free_block_queue
    blocks = queue.popleft_n(queue.num_free_blocks)
    random.Random(seed).shuffle(blocks)
    queue.append_n(blocks)
    return {"first": [block.block_id for block in blocks[:8]]}


def pool(llm: Any) -> dict[str, Any]:
    """Counts the blocks of the engine's pool. `total` includes the null block. `held` counts blocks with at least one
    reference.
    """
    blocks = _block_pool(llm)
    free = blocks.get_num_free_blocks()
    return {"total": blocks.num_gpu_blocks, "free": free, "held": blocks.num_gpu_blocks - 1 - free}


def compare_pages(llm: Any) -> dict[str, Any]:
    """Counts the blocks in the engine's prefix cache. Also counts how many of these blocks have no byte-identical page
    in flexkv's host memory.
    """
    import numpy as np
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from flexkv import c_ext

    (view,) = get_kv_transfer_group().worker.views
    unit = llm.llm_engine.engine_core.engine_core.scheduler.connector.scheduler.unit
    ((place,),) = unit.places
    stripe, size = place.stripe, view.stripe_bytes
    pages = {unit.pool.slot(slot)[stripe : stripe + size].tobytes() for slot in range(unit.pool.ready_slots)}
    missing, named = 0, [block.block_id for block in _block_pool(llm).blocks if block.block_hash is not None]
    for block in named:
        here = np.empty(size, np.uint8)
        c_ext.gather(view, block, here)
        missing += here.tobytes() not in pages
    return {"blocks": len(named), "missing": missing}


OPERATIONS: dict[str, Operation] = {
    "compare_pages": compare_pages,
    "scribble": scribble,
    "spoil_cached": spoil_cached,
    "shuffle": shuffle,
    "pool": pool,
}
