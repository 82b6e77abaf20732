"""Stores and loads pages of HiCache's host pools with flexkv's storage class. SGLang makes the pools, in each of its
layouts."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import torch
from sglang.srt import runtime_context
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import _build_mha_mla_host_pool
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from flexkv.adapters.sglang import engine_watch, hicache
from flexkv.adapters.sglang.identity import Place
from flexkv.adapters.sglang.pools import HOST_LAYOUTS
from flexkv.errors import ConfigError, ContractError, DiskError, GeometryError
from flexkv.facts.ranks import UnitOwner
from tests.engines_sglang.pool_child import PAGE_TOKENS, hashes_of, make_pool

LATENT_LAYOUTS = ("layer_first", "page_first", "page_first_direct")
"""Layouts that SGLang offers for latents. `page_head` is not one of them: it splits heads, and a latent has none."""
POOLS = [(name, layout) for name in ("mha fp16", "mha fp8") for layout in HOST_LAYOUTS] + [
    (name, layout) for name in ("mla bf16", "mla fp8") for layout in LATENT_LAYOUTS
]
numbers = count()


def build_host_pool(name: str, layout: str) -> Any:
    return _build_mha_mla_host_pool(
        pool=make_pool(name),
        host_to_device_ratio=1.0,
        page_size=PAGE_TOKENS,
        layout=layout,
        allocator_type="default",
        pool_label="kv",
    )


def make_storage(pool: Any, number: int | None = None, **settings: Any) -> hicache.FlexKVHiCache:
    """Makes a storage over a host pool. `number` selects its namespace; None means a new namespace."""
    number = next(numbers) if number is None else number
    place = Place("dp0.pp0of1.tp0of1", 1, True)
    vars(hicache).update(
        owner_of=lambda *_: UnitOwner("pool", bytes([number]) * 32, "tp0"),
        prompt_limit=lambda _: None,
        Place=SimpleNamespace(of_this_process=lambda: place),
    )
    storage = hicache.FlexKVHiCache(storage_config(**settings))
    storage.register_mem_pool_host(pool)
    return storage


def storage_config(
    tp_rank: int = 0, attn_cp_size: int = 1, is_mla_model: bool = False, **settings: Any
) -> HiCacheStorageConfig:
    return HiCacheStorageConfig(
        tp_rank=tp_rank,
        tp_size=tp_rank + 1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=attn_cp_size,
        is_mla_model=is_mla_model,
        enable_storage_metrics=False,
        is_page_first_layout=False,
        model_name=None,
        extra_config={"interface_v1": 1, "host.bytes": 4 << 20, "host.verify": True, **settings},
    )


def slots(*pages: int) -> torch.Tensor:
    return torch.cat([torch.arange(page * PAGE_TOKENS, (page + 1) * PAGE_TOKENS) for page in pages])


def by_page(pool: Any) -> torch.Tensor:
    """Returns the bytes of each page, uint8 [pages, bytes]. Finds them by the axes of the pool's layout, not by the
    addresses that are under test.
    """
    body = pool.kv_buffer.view(torch.uint8)
    if isinstance(pool, MLATokenToKVPoolHost):
        body = body.unsqueeze(0)  # adds an axis, because other pools have a K and V axis there
    if pool.layout == "layer_first":  # axes: [K and V, layers, tokens, ...]
        body = body.unflatten(2, (-1, PAGE_TOKENS)).movedim(2, 0)
    elif pool.layout == "page_first":  # axes: [K and V, tokens, ...]
        body = body.unflatten(1, (-1, PAGE_TOKENS)).movedim(1, 0)
    else:  # axes: [K and V, pages, ...]
        body = body.movedim(1, 0)
    return body.reshape(len(body), -1)


def round_trip(pool: Any) -> dict[str, Any]:
    """Stores pages 2 and 5, overwrites the pool, and loads their bytes into pages 7 and 3."""
    storage = make_storage(pool)
    try:
        noise = torch.randint(0, 256, pool.kv_buffer.view(torch.uint8).shape, dtype=torch.uint8)
        pool.kv_buffer.view(torch.uint8).copy_(noise)
        before = by_page(pool).clone()
        keys = hashes_of("a", "b", "absent")
        stored = storage.batch_set_v1(keys[:2], slots(2, 5))
        again = storage.batch_set_v1(keys[:2], slots(2, 5))
        pool.kv_buffer.view(torch.uint8).fill_(0x41)
        spoiled = by_page(pool)[1].clone()
        found = storage.batch_exists(keys)
        loaded = storage.batch_get_v1(keys, slots(7, 3, 6))
        after = by_page(pool)
        targets = {7: 2, 3: 5}
        others = [page for page in range(len(after)) if page not in targets]
        return {
            "stored": [stored, again],
            "found": found,
            "loaded": loaded,
            "same": all(torch.equal(after[page], before[source]) for page, source in targets.items()),
            "others untouched": all(torch.equal(after[page], spoiled) for page in others),
            # A control: the comparison finds that two pages differ.
            "seen to differ": not torch.equal(after[7], before[5]),
        }
    finally:
        storage.close()


def refusal(pool: Any, **changed: Any) -> str:
    for name, value in changed.items():
        setattr(pool, name, value)
    try:
        make_storage(pool).close()
    except GeometryError as error:
        return str(error)
    return ""


def dtypes_of_keys() -> dict[str, Any]:
    """Returns the dtype in the namespace of each pool's pages, for engines with two values of `kv_cache_dtype`."""
    found: dict[str, Any] = {}
    for name in ("mha fp8", "mla fp8", "mha fp16"):
        pool = build_host_pool(name, "page_first")
        found[name] = [
            hicache._kv_dtype(pool, SimpleNamespace(kv_cache_dtype=dtype))
            for dtype in ("fp8_e4m3", "fp8_e5m2")
        ]
    return found


def writers_of_latents() -> dict[str, Any]:
    """Returns two answers to the question whether SGLang lets the second of two ranks store latents: before and after
    flexkv's storage is made."""
    config = storage_config(tp_rank=1, is_mla_model=True)
    before = config.is_storage_writer
    hicache.FlexKVHiCache(config)
    return {"before": before, "after": config.is_storage_writer}


def refused_context_parallelism() -> dict[str, Any]:
    try:
        hicache.FlexKVHiCache(storage_config(attn_cp_size=2))
    except GeometryError as error:
        return {"refused": str(error)}
    return {}


def new_weights() -> dict[str, Any]:
    """Changes the weights as SGLang does, while HiCache's thread still has a page of the former weights to store. Then
    empties the engine's tree twice. Returns which pages the storage has after each step.
    """
    pool = build_host_pool("mha fp16", "page_first")
    storage = make_storage(pool)
    updater = SchedulerWeightUpdaterManager.__new__(SchedulerWeightUpdaterManager)
    updater.metrics_collector = None
    keys = hashes_of("former", "late", "new")
    try:
        storage.batch_set_v1(keys[:1], slots(2))
        with updater._observe_weight_load("disk"):
            pass
        storage.batch_set_v1(keys[1:2], slots(5))
        found = {"former": storage.exists(keys[0]), "late": storage.exists(keys[1])}
        empty_tree()
        found["late, after the flush"] = storage.exists(keys[1])
        storage.batch_set_v1(keys[2:], slots(6))
        empty_tree()
        found["new, after another flush"] = storage.exists(keys[2])
    finally:
        storage.close()
    return found


def attached_later() -> dict[str, Any]:
    """Stores a page on disk, closes the storage, and looks the page up with a new storage of the same owner. Does this
    in two engines: one still has the weights of its start, and the weights of the other one changed before the storage
    was attached.
    """
    pool = build_host_pool("mha fp16", "page_first")
    key, number, found = hashes_of("page"), next(numbers), {}
    with tempfile.TemporaryDirectory() as folder:
        settings = {"disk.folders": folder, "disk.bytes_per_folder": 4 << 20}
        for name, changed in (("first", False), ("weights of the start", False), ("other weights", True)):
            with patch.object(engine_watch, "_weights_changed", changed):
                storage = make_storage(pool, number, **settings)
            found[name] = storage.batch_exists(key)
            if name == "first":
                storage.batch_set_v1(key, slots(2))
            storage.close()
    return found


def empty_tree() -> None:
    """Empties a stand-in for SGLang's tree by the method of SGLang that empties a tree."""
    tree = MagicMock(linker=None, buffer_pipeline=None, cache_controller=None)
    UnifiedRadixCache.reset(tree)


def registered_again() -> dict[str, Any]:
    """Registers the same pool again, which succeeds. Then registers another pool of the same shape, which is refused.
    Pages that were stored before are still found.
    """
    pool, other = (build_host_pool("mha fp16", "page_first") for _ in range(2))
    storage = make_storage(pool)
    try:
        keys = hashes_of("a", "b")
        storage.batch_set_v1(keys, slots(2, 5))
        storage.register_mem_pool_host(pool)
        found = storage.batch_exists(keys)
        try:
            storage.register_mem_pool_host(other)
        except ContractError as error:
            refused = str(error)
        else:
            refused = ""
        return {
            "same": found,
            "other": refused,
            "after both": storage.batch_exists(keys),
            "pool": storage.mem_pool_host is pool,
        }
    finally:
        storage.close()


def held_by_a_refused_storage() -> dict[str, Any]:
    """Starts two storages that fail: flexkv cannot hook the first one into SGLang, and the thread of the second one
    cannot start. Then starts a storage that works in the same folder.

    Returns the threads and errors of the first two, and the results of the third.
    """
    pool = build_host_pool("mha fp16", "page_first")
    number = next(numbers)
    found: dict[str, Any] = {}
    kept = []

    def cannot_hook(*_: object) -> None:
        raise ConfigError("no such hook")

    def cannot_start(*_: object) -> Any:
        raise RuntimeError("can't start new thread")

    before = set(threading.enumerate())  # also contains threads that storages of other cases may have left
    with tempfile.TemporaryDirectory() as folder:
        settings = {"disk.folders": folder, "disk.bytes_per_folder": 4 << 20}
        for name, value in (("watch", cannot_hook), ("PageBatches", cannot_start)):
            original = vars(hicache)[name]
            setattr(hicache, name, value)
            try:
                make_storage(pool, number, **settings)
            except (ConfigError, RuntimeError) as error:
                # the error's traceback keeps the storage alive, and all objects that the storage refers to
                kept.append(error)
            setattr(hicache, name, original)
            left = set(threading.enumerate()) - before
            found[name] = [thread.name for thread in left if "hicache" in thread.name]
        storage = make_storage(pool, number, **settings)
        found["works"] = storage.batch_set_v1(hashes_of("a"), slots(2))
        try:
            make_storage(pool, number, **settings)
        except DiskError as error:
            found["control"] = str(error)
        storage.close()
    found["refused"] = [str(error) for error in kept]
    return found


def cases() -> Iterator[tuple[str, dict[str, Any]]]:
    import hicache_on_cpu  # type: ignore[import-not-found]

    hicache_on_cpu.activate()
    runtime_context.get_server_args = lambda: SimpleNamespace(kv_cache_dtype="auto")
    for name, layout in POOLS:
        yield f"{name} {layout}", round_trip(build_host_pool(name, layout))
    yield "refused", {"layout": refusal(build_host_pool("mha fp16", "page_first"), layout="page_unified")}
    yield "dtypes of keys", dtypes_of_keys()
    yield "writers of latents", writers_of_latents()
    yield "context parallelism", refused_context_parallelism()
    yield "attached later", attached_later()
    yield "new weights", new_weights()
    yield "registered again", registered_again()
    yield "refused late", held_by_a_refused_storage()
